"""What ranks of context parallelism receive for a block's attention: the formulas of
`pyops.context_parallel.context_cost`, for the heads that a rank of tp has."""

from __future__ import annotations

from pyops.context_parallel import AttentionShape, ContextCost, context_cost
from pyops.plan.layout import Layout
from pyops.plan.shapes import ModelShape
from pyops.precision import PRECISIONS

__all__ = ["received"]


def received(shape: ModelShape, layout: Layout, *, precision: str) -> ContextCost:
    """What a rank receives for a block's attention of a row, in forward and in backward.

    Args:
        shape: Of the model.
        layout: With its cp, tp and method.
        precision: Of keys and values.
    """
    heads, least = shape.num_heads // layout.tp, -(-shape.kv_heads // layout.tp)
    attention = AttentionShape(
        -(-shape.sequence_length // layout.cp) * layout.cp,  # rows are padded
        heads,
        shape.head_width,
        num_kv_heads=next(n for n in range(least, heads + 1) if heads % n == 0),
        dtype=PRECISIONS[precision].dtype,
    )
    return context_cost(attention, ranks=layout.cp, method=layout.cp_method)
