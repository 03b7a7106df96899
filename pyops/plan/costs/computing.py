"""What a rank computes for a micro-batch: of a block, of the ends of the model, of the optimizer.

    products    2 r c k operations at the part of the peak that their width delivers
    attention   the scores that a causal mask leaves, or all, where scores are made in memory
    between     bytes over the memory's bandwidth

Where blocks were measured (`Case.measured`) their sum is what was measured, and the parts are in
the proportion of the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyops.plan.clusters import Cluster
from pyops.plan.costs.measured import Line, MeasuredCosts
from pyops.plan.costs.rank_memory import ELEMENT_BYTES, rank_parameters
from pyops.plan.layout import Layout, Software
from pyops.plan.shapes import ModelShape

__all__ = ["Case", "Pass", "again_of", "backward_of", "ends", "forward_of", "optimizer_seconds"]

OPTIMIZER_BYTES = 28.0  # of an element: master, moments and gradient read, all but that written
# Attention that comes in parts is slower: nine tenths of the speed of one device with 8,192 tokens
# each, on 8 A100 and H800 (zhuzilin/ring-flash-attention, README.md, zigzag, forward and backward).
PARTS_TOKENS = 1000.0
LOGIT_BYTES: Mapping[bool, float] = {True: 22.0, False: 6.0}  # of a logit, in forward and backward


@dataclass(frozen=True)
class Case:
    """What is priced, apart from the layout."""

    shape: ModelShape
    """The model."""
    cluster: Cluster
    """The devices and links."""
    software: Software
    """What trains it."""
    precision: str = "bf16"
    """ "fp32", "bf16" or "fp16"."""
    measured: MeasuredCosts | None = None
    """What blocks were measured to take; None: formulas say it."""

    def measured_for(self, layout: Layout) -> MeasuredCosts | None:
        """`measured`, where blocks were measured as the layout cuts them.

        Args:
            layout: With its tp.
        """
        found = self.measured
        return found if found is not None and found.has(layout.tp) else None


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward, or backward, of a block or of the ends, for a micro-batch."""

    products: float = 0.0
    attention: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.attention + self.between

    def times(self, factor: float) -> Pass:
        """So many of it."""
        return Pass(factor * self.products, factor * self.attention, factor * self.between)

    def plus(self, other: Pass) -> Pass:
        """Both, one after the other."""
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.between + other.between,
        )


def rows_of(layout: Layout) -> float:
    """Rows of a micro-batch that a rank computes: ranks of cp have a part of the tokens of each."""
    return layout.micro_batch / layout.cp


def _formula(case: Case, layout: Layout) -> Pass:
    """Forward of a block, by what it computes and moves."""
    shape, device, software = case.shape, case.cluster.device, case.software
    tokens, t = rows_of(layout) * shape.sequence_length, layout.tp
    peak, element = device.operations(case.precision), ELEMENT_BYTES[case.precision]
    memory = device.memory_bandwidth * device.efficiency.memory
    product = peak * device.efficiency.of_width(shape.dim / t)
    scores = tokens * shape.sequence_length * shape.query_width / t
    if software.fused_attention:
        reached = software.attention or device.efficiency.attention
        attention = 2.0 * scores / (peak * reached)
    else:
        attention = 4.0 * scores / product
        # For each query and key of each head.
        pairs = tokens * shape.sequence_length * shape.num_heads / t
        attention += software.score_bytes * element / 2.0 * pairs / memory
    if layout.cp > 1 and layout.cp_method != "ulysses":
        own = shape.sequence_length / layout.cp
        attention *= (own + PARTS_TOKENS) / own
    share = 1.0 / t if layout.sequence_parallel else 1.0
    activation = (3.0 if shape.gated else 2.0) * shape.inner  # read, and written
    if not shape.learned_positions:
        activation += 2.0 * (shape.query_width + shape.kv_width)  # rotated
    moved = software.elementwise_bytes * element / 2.0 * shape.dim * tokens * share
    moved = software.unfused * (moved + element * activation * tokens / t)
    return Pass(2.0 * tokens * shape.block_matrices / t / product, attention, moved / memory)


def _back(case: Case, forward: Pass) -> Pass:
    of_scores = 2.5 if case.software.fused_attention else 2.0
    return Pass(2.0 * forward.products, of_scores * forward.attention, 2.0 * forward.between)


def _as_measured(
    case: Case, layout: Layout, formula: Pass, lines: Mapping[int, Line], *, backward: bool
) -> Pass:
    """The formula, scaled as it is for the block that was measured: without sequence parallelism,
    where every rank computes what lies between the layers of all tokens."""
    whole = formula
    if layout.sequence_parallel:
        whole = _formula(case, replace(layout, sequence_parallel=False))
        whole = _back(case, whole) if backward else whole
    measured = lines[layout.tp].at(rows_of(layout))
    return formula.times(measured / whole.total)


def forward_of(case: Case, layout: Layout) -> Pass:
    """Of a block, messages apart.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    formula, found = _formula(case, layout), case.measured_for(layout)
    if found is None:
        return formula
    return _as_measured(case, layout, formula, found.forward, backward=False)


def backward_of(case: Case, layout: Layout, forward: Pass) -> Pass:
    """Of a block, without what is computed again.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
        forward: Of the block.
    """
    found = case.measured_for(layout)
    if found is None:
        return _back(case, forward)
    formula = _back(case, _formula(case, layout))
    return _as_measured(case, layout, formula, found.backward, backward=True)


def again_of(case: Case, layout: Layout, forward: Pass) -> Pass:
    """Of a block: what is computed a second time.

    Args:
        case: The model, the cluster, the program.
        layout: Which says what.
        forward: Of the block.
    """
    if layout.recompute == "block":
        found = case.measured_for(layout)
        return forward if found is None else forward.times(found.again)
    return Pass(attention=forward.attention if layout.recompute == "attention" else 0.0)


def ends(case: Case, layout: Layout) -> Pass:
    """Forward and backward of the embedding, the head and the loss.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    shape, device = case.shape, case.cluster.device
    tokens = rows_of(layout) * shape.sequence_length
    rate = device.operations(case.precision) * device.efficiency.of_width(shape.dim)
    moved = LOGIT_BYTES[case.software.whole_logits] * tokens * shape.vocab_size / layout.tp
    formula = Pass(
        products=6.0 * tokens * shape.head_parameters / layout.tp / rate,
        between=moved / (device.memory_bandwidth * device.efficiency.memory),
    )
    found = case.measured_for(layout)
    if found is None:
        return formula
    seconds = sum(
        lines[layout.tp].at(rows_of(layout)) for lines in (found.ends_forward, found.ends_backward)
    )
    return formula.times(seconds / formula.total)


def optimizer_seconds(case: Case, layout: Layout) -> float:
    """Of a step on the rank that has most parameters.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    count = max(rank_parameters(case.shape, layout, rank) for rank in (0, layout.pp - 1))
    owned = count / layout.copies if layout.zero else count
    if case.measured is not None:
        return case.measured.optimizer.at(owned)
    device = case.cluster.device
    return OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.efficiency.memory)
