"""How long a step takes, term by term, in seconds.

    step = m (a micro-batch on the slowest rank) + idle + messages that nothing hides + optimizer

    products    2 r c k operations at the part of the peak that their width delivers
    attention   the scores that a causal mask leaves, or all, where scores are made in memory
    between     bytes over the memory's bandwidth
    messages    latency of each hop + bytes / bandwidth; a group with g ranks on a node has
                min(links within the node, g network links)

What is hidden behind the computation slows it by the part `contention` of its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyops.plan.clusters import Cluster, Link
from pyops.plan.layout import Layout, Software
from pyops.plan.rank_memory import ELEMENT_BYTES, blocks_of_a_rank, rank_parameters
from pyops.plan.shapes import ModelShape
from pyops.plan.turns import idle

__all__ = ["Case", "StepTime", "group_link", "step_time"]

LAUNCH_SECONDS = 5e-6  # of a kernel by the host: an estimate
KERNELS = 20  # of a block and forward: an estimate
OPTIMIZER_BYTES = 28.0  # of an element: master, moments and gradient read, all but that written
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


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank."""

    products: float = 0.0
    """Matrix products of the blocks and the head."""
    attention: float = 0.0
    """Scores and what they weigh."""
    between: float = 0.0
    """Norms, activations, residual sums, the loss."""
    recomputed: float = 0.0
    """What is computed a second time."""
    tensor_messages: float = 0.0
    """Messages of tp that nothing hides."""
    pipeline_messages: float = 0.0
    """Messages of pp that nothing hides."""
    idle: float = 0.0
    """The bubble of the pipeline."""
    data_messages: float = 0.0
    """Messages of dp that nothing hides, and what hidden ones slow down."""
    optimizer: float = 0.0
    """The optimizer's step."""
    host: float = 0.0
    """Launching kernels, as far as that takes longer than they do."""
    stragglers: float = 0.0
    """Waiting for the slowest rank of all."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.products
            + self.attention
            + self.between
            + self.recomputed
            + self.tensor_messages
            + self.pipeline_messages
            + self.idle
            + self.data_messages
            + self.optimizer
            + self.host
            + self.stragglers
        )


@dataclass(frozen=True)
class _Pass:
    """Seconds of one forward, or backward, of a block or of the head, for a micro-batch."""

    products: float = 0.0
    attention: float = 0.0
    between: float = 0.0
    messages: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.between + self.messages

    def times(self, factor: float) -> _Pass:
        return _Pass(
            factor * self.products,
            factor * self.attention,
            factor * self.between,
            factor * self.messages,
        )

    def plus(self, other: _Pass) -> _Pass:
        return _Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.between + other.between,
            self.messages + other.messages,
        )


def group_link(cluster: Cluster, *, ranks: int, stride: int) -> Link:
    """The link that a group of `ranks` ranks sees which lie `stride` apart.

    Args:
        cluster: The devices.
        ranks: Of the group.
        stride: From one of its ranks to the next.
    """
    together = max(1, min(ranks, cluster.devices_per_node // stride))
    if ranks <= together:
        return cluster.node
    network = cluster.network
    speed = min(cluster.node.speed, together * network.speed)
    hops = (together - 1) * cluster.node.latency + network.latency
    return Link(speed, 1.0, hops / together, network.contention)


def _ring(link: Link, *, nbytes: float, ranks: int, passes: int, messages: int = 1) -> float:
    """Seconds of `messages` collectives that take `nbytes` together; an all-reduce has two
    passes, a gather and a scatter one each."""
    if ranks == 1:
        return 0.0
    steps = ranks - 1
    if passes == 2:  # a tree has fewer hops
        steps = min(2 * steps, 4 * math.ceil(math.log2(ranks)))
    return messages * steps * link.latency + passes * nbytes * (ranks - 1) / ranks / link.speed


def _forward(case: Case, layout: Layout) -> _Pass:
    """Of a block."""
    shape, device, software = case.shape, case.cluster.device, case.software
    tokens, t = float(layout.micro_batch * shape.sequence_length), layout.tp
    peak, element = device.operations(case.precision), ELEMENT_BYTES[case.precision]
    memory = device.memory_bandwidth * device.efficiency.memory
    product = peak * device.efficiency.of_width(shape.dim / t)
    scores = tokens * shape.sequence_length * shape.query_width / t
    if software.fused_attention:
        attention = 2.0 * scores / (peak * device.efficiency.attention)
    else:
        attention = 4.0 * scores / product
        # For each query and key of each head.
        pairs = tokens * shape.sequence_length * shape.num_heads / t
        attention += software.score_bytes * element / 2.0 * pairs / memory
    share = 1.0 / t if layout.sequence_parallel else 1.0
    activation = (3.0 if shape.gated else 2.0) * shape.inner  # read, and written
    if not shape.learned_positions:
        activation += 2.0 * (shape.query_width + shape.kv_width)  # rotated
    moved = software.elementwise_bytes * element / 2.0 * shape.dim * tokens * share
    moved = software.unfused * (moved + element * activation * tokens / t)
    return _Pass(
        products=2.0 * tokens * shape.block_matrices / t / product,
        attention=attention,
        between=moved / memory,
        messages=_tensor_messages(case, layout, sums=2),
    )


def _tensor_messages(case: Case, layout: Layout, *, sums: float) -> float:
    """Seconds of so many sums of a micro-batch's activations over the ranks of tp, or of as many
    gathers and scatters."""
    if layout.tp == 1:
        return 0.0
    link = group_link(case.cluster, ranks=layout.tp, stride=1)
    tokens = layout.micro_batch * case.shape.sequence_length
    element = float(max(case.software.tensor_sum_bytes, ELEMENT_BYTES[case.precision]))
    if layout.sequence_parallel:  # what is gathered is rounded already
        element = (element + ELEMENT_BYTES[case.precision]) / 2
    nbytes = tokens * case.shape.dim * element
    return sums * _ring(link, nbytes=nbytes, ranks=layout.tp, passes=2)


def _backward(case: Case, layout: Layout, forward: _Pass) -> _Pass:
    """Of a block, without what is computed again."""
    again = forward.messages / 2.0 if layout.sequence_parallel else 0.0
    messages = (forward.messages + again) * (1.0 - case.software.tensor_overlap)
    of_scores = 2.5 if case.software.fused_attention else 2.0
    return _Pass(
        2.0 * forward.products, of_scores * forward.attention, 2.0 * forward.between, messages
    )


def _again(layout: Layout, forward: _Pass) -> _Pass:
    """Of a block: what is computed a second time."""
    if layout.recompute == "block":
        return forward
    return _Pass(attention=forward.attention if layout.recompute == "attention" else 0.0)


def _head(case: Case, layout: Layout) -> _Pass:
    """Forward of the head and the loss; backward takes twice that."""
    shape, device = case.shape, case.cluster.device
    tokens = float(layout.micro_batch * shape.sequence_length)
    rate = device.operations(case.precision) * device.efficiency.of_width(shape.dim)
    moved = LOGIT_BYTES[case.software.whole_logits] / 3.0 * tokens * shape.vocab_size / layout.tp
    return _Pass(
        products=2.0 * tokens * shape.head_parameters / layout.tp / rate,
        between=moved / (device.memory_bandwidth * device.efficiency.memory),
    )


def step_time(case: Case, layout: Layout) -> StepTime:
    """The time of a step.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    m, blocks = layout.num_microbatches, blocks_of_a_rank(case.shape, layout)
    forward = _forward(case, layout)
    backward, again = _backward(case, layout, forward), _again(layout, forward)
    # The rank with the head may have fewer blocks, where they are not shared out evenly.
    spare = blocks * layout.pp - case.shape.num_layers
    last = max(0, blocks - spare) if layout.pp > 1 else blocks
    head = _head(case, layout)
    both = forward.plus(backward)
    with_head = both.times(last).plus(head.times(3.0))
    plain = both.times(blocks)
    longer = with_head.total + last * again.total > plain.total + blocks * again.total
    work, of_again = (with_head, last) if longer else (plain, blocks)
    waits = idle(
        layout,
        blocks * forward.total,
        blocks * (backward.total / 2.0 + again.total),
        blocks * backward.total / 2.0,
    )
    computed = work.total + of_again * again.total
    launched = KERNELS * LAUNCH_SECONDS * blocks * (4 if layout.recompute == "block" else 3)
    found = StepTime(
        host=m * max(0.0, launched - computed),
        products=m * work.products,
        attention=m * work.attention,
        between=m * work.between,
        recomputed=m * of_again * again.total,
        tensor_messages=m * work.messages,
        pipeline_messages=_pipeline_messages(case, layout, computed),
        idle=waits,
        data_messages=_data_messages(case, layout, work=computed, last=blocks * backward.total),
        optimizer=_optimizer(case, layout),
    )
    slowest = case.software.straggling * math.sqrt(2.0 * math.log(layout.num_ranks))
    return replace(found, stragglers=slowest * found.total)


def _pipeline_messages(case: Case, layout: Layout, work: float) -> float:
    """What sends to and receipts from neighbors take beside the computation of a micro-batch."""
    if layout.pp == 1:
        return 0.0
    tokens = layout.micro_batch * case.shape.sequence_length
    cut = layout.sequence_parallel or case.software.cuts_messages
    share = 1.0 / layout.tp if cut else 1.0
    nbytes = tokens * case.shape.dim * ELEMENT_BYTES[case.precision] * share
    link = group_link(case.cluster, ranks=layout.pp, stride=layout.tp * layout.dp)
    if link is not case.cluster.node:
        link = case.cluster.network
    each = 2.0 * layout.stages_per_rank * (link.latency + nbytes / link.speed)
    if case.software.overlaps_gradients:
        exposed = max(0.0, each - work) + link.contention * min(each, work)
        return layout.num_microbatches * exposed + (layout.pp - 1) * each
    return layout.num_microbatches * each


def _data_messages(case: Case, layout: Layout, *, work: float, last: float) -> float:
    """Messages of dp that nothing hides, with what hidden ones slow down.

    Args:
        work: Seconds that a micro-batch computes.
        last: Of them, those of a backward.
    """
    if layout.dp == 1:
        return 0.0
    software, element = case.software, ELEMENT_BYTES[case.precision]
    count = max(rank_parameters(case.shape, layout, rank) for rank in (0, layout.pp - 1))
    link = group_link(case.cluster, ranks=layout.dp, stride=layout.tp)
    gradient = max(software.gradient_bytes, element)
    ranks, m = layout.dp, layout.num_microbatches
    if layout.zero == 3:
        units = blocks_of_a_rank(case.shape, layout) + 1
        gather = _ring(link, nbytes=count * element, ranks=ranks, passes=1, messages=units)
        scatter = _ring(link, nbytes=count * gradient, ranks=ranks, passes=1, messages=units)
        return m * _exposed(2.0 * gather + scatter, work, link, software)
    messages = max(1, math.ceil(count * gradient / software.bucket_bytes))
    if layout.zero == 0:
        reduce = _ring(link, nbytes=count * gradient, ranks=ranks, passes=2, messages=messages)
        return _exposed(reduce, last, link, software)
    scatter = _ring(link, nbytes=count * gradient, ranks=ranks, passes=1, messages=messages)
    gather = _ring(link, nbytes=count * element, ranks=ranks, passes=1, messages=messages)
    scatters = m if layout.zero == 2 and layout.pp == 1 else 1
    beside = _exposed(scatter, last, link, software)
    return scatters * beside + _exposed(gather, work - last, link, software)


def _exposed(messages: float, hide: float, link: Link, software: Software) -> float:
    if not software.overlaps_gradients:
        return messages
    return max(0.0, messages - hide) + link.contention * min(messages, hide)


def _optimizer(case: Case, layout: Layout) -> float:
    count = max(rank_parameters(case.shape, layout, rank) for rank in (0, layout.pp - 1))
    device = case.cluster.device
    owned = count / layout.dp if layout.zero else count
    return OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.efficiency.memory)
