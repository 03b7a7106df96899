"""States of a rank of a model with experts: experts are shared out over ep ranks among the copies
of all else, and so have fewer copies.

    copies of all else     dp x cp             of the experts     tp x dp x cp / ep

An expert is not cut by tp (Megatron-core's expert tensor parallelism of 1). No run of pyops has
experts: these are counts.
"""

from __future__ import annotations

from dataclasses import replace

from pyops.plan.costs.rank_memory import ADAM, state_bytes
from pyops.plan.layout import Layout, Software
from pyops.plan.shapes import ExpertShape, PlanError

__all__ = ["expert_state_bytes"]


def expert_state_bytes(
    shape: ExpertShape,
    layout: Layout,
    software: Software,
    *,
    ep: int = 1,
    precision: str = "bf16",
    optimizer_bytes: float = ADAM,
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and states of a rank. In a pipeline they are those of an even
    part of the model.

    Args:
        shape: Of the model.
        layout: Its tp, pp, copies and ZeRO stage.
        software: In what gradients and parameters are kept.
        ep: Ranks that share the experts out.
        precision: "fp32", "bf16" or "fp16".
        optimizer_bytes: Of an element's states.

    Raises:
        PlanError: ep does not divide the experts, or the ranks of a stage.
    """
    ranks = layout.tp * layout.copies
    for what, number in (("experts", shape.experts.number), ("ranks of a stage", ranks)):
        if ep < 1 or number % ep:
            raise PlanError(
                f"ep is {ep!r}, which does not divide the {number} {what}; choose a divisor"
            )
    experts = shape.blocks * shape.experts.number * shape.expert_parameters
    parts = (
        (shape.common_parameters / (layout.tp * layout.pp), layout),
        (experts / (ep * layout.pp), replace(layout, tp=1, cp=1, dp=ranks // ep)),
    )
    common, own = (
        state_bytes(count, shared, software, precision=precision, optimizer_bytes=optimizer_bytes)
        for count, shared in parts
    )
    parameters, gradients, states = (a + b for a, b in zip(common, own, strict=True))
    return parameters, gradients, states
