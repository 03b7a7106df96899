"""Messages of tp, cp, pp and dp, in seconds of a rank, less what the computation hides.

tp    a block sums activations twice in forward and twice in backward
cp    keys and values, or heads for tokens, once or twice a block and pass
pp    activations and their gradients from stage to stage
dp    gradients once a step, parameters by the stage of ZeRO
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyops.plan.clusters import Cluster, Link
from pyops.plan.costs.codecs import codec_bytes, codec_seconds
from pyops.plan.costs.computing import Case, Pass
from pyops.plan.costs.context import received
from pyops.plan.costs.links import exposed, group_link, ring
from pyops.plan.costs.rank_memory import ELEMENT_BYTES, blocks_of_a_rank, rank_parameters
from pyops.plan.layout import Layout, Software

__all__ = [
    "Held",
    "Sent",
    "context_messages",
    "copies_messages",
    "data_messages",
    "neighbor_messages",
    "num_messages",
    "pipeline_messages",
    "tensor_messages",
]

OF_A_STEP = 3  # the loss, the norm of the gradient, a vote


def tensor_messages(case: Case, layout: Layout, *, sums: float) -> float:
    """Seconds of so many sums of a micro-batch's activations over the ranks of tp, or of as many
    gathers and scatters.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
        sums: How many.
    """
    if layout.tp == 1:
        return 0.0
    link = group_link(case.cluster, ranks=layout.tp, stride=1)
    tokens = layout.micro_batch * case.shape.sequence_length / layout.cp
    element = float(max(case.software.tensor_sum_bytes, ELEMENT_BYTES[case.precision]))
    if layout.sequence_parallel:  # what is gathered is rounded already
        element = (element + ELEMENT_BYTES[case.precision]) / 2
    nbytes = tokens * case.shape.dim * element
    return sums * ring(link, nbytes=nbytes, ranks=layout.tp, passes=2)


def context_messages(case: Case, layout: Layout, attention: Pass) -> tuple[float, float]:
    """Seconds of a block's forward and backward that ranks of cp wait for each other's keys and
    values.

    Args:
        case: The model, the cluster, the program.
        layout: With its cp.
        attention: Forward of the block, beside whose attention a ring sends.
    """
    if layout.cp == 1:
        return 0.0, 0.0
    link = group_link(case.cluster, ranks=layout.cp, stride=layout.tp)
    cost, found = received(case.shape, layout, precision=case.precision), []
    for each, hides in ((cost.forward, 1.0), (cost.backward, 2.5)):
        nbytes = layout.micro_batch * each.received_bytes
        seconds = each.messages * link.latency + nbytes / link.speed
        if layout.cp_method == "ring":  # the next part comes while the part at hand is computed
            seconds = exposed(seconds, hides * attention.attention, link, case.software)
        found.append(seconds)
    return found[0], found[1]


def pipeline_messages(case: Case, layout: Layout, work: float) -> float:
    """What sends to and receipts from neighbors take beside the computation of a micro-batch.

    Args:
        case: The model, the cluster, the program.
        layout: With its pp.
        work: Seconds that a micro-batch computes on a rank.
    """
    tokens = layout.micro_batch * case.shape.sequence_length / layout.cp
    cut = layout.sequence_parallel or case.software.cuts_messages
    share = 1.0 / layout.tp if cut else 1.0
    nbytes = tokens * case.shape.dim * ELEMENT_BYTES[case.precision] * share
    return neighbor_messages(case.cluster, case.software, layout, nbytes=nbytes, work=work)


def neighbor_messages(
    cluster: Cluster, software: Software, layout: Layout, *, nbytes: float, work: float
) -> float:
    """What sends to and receipts from neighbors in a pipeline take beside the computation.

    Args:
        cluster: The devices and links.
        software: Whether it sends beside the computation.
        layout: With its pp.
        nbytes: Of a micro-batch from stage to stage.
        work: Seconds that a micro-batch computes on a rank.
    """
    if layout.pp == 1:
        return 0.0
    link = group_link(cluster, ranks=layout.pp, stride=layout.tp * layout.copies)
    if link is not cluster.node:
        link = cluster.network
    each = 2.0 * layout.stages_per_rank * (link.latency + nbytes / link.speed)
    if software.overlaps_gradients:
        waits = max(0.0, each - work) + link.contention * min(each, work)
        return layout.num_microbatches * waits + (layout.pp - 1) * each
    return layout.num_microbatches * each


def data_messages(case: Case, layout: Layout, *, work: float, last: float) -> float:
    """Messages of dp and cp that nothing hides, with what hidden ones slow down: their ranks have
    the same parameters.

    Args:
        case: The model, the cluster, the program.
        layout: With its copies and ZeRO stage.
        work: Seconds that a micro-batch computes.
        last: Of them, those of a backward.
    """
    software, element = case.software, ELEMENT_BYTES[case.precision]
    count = max(rank_parameters(case.shape, layout, rank) for rank in (0, layout.pp - 1))
    held = Held(count, blocks_of_a_rank(case.shape, layout) + 1)
    wire, coded = None, 0.0
    if layout.codec != "none" and layout.copies > 1:
        exact = float(max(software.gradient_bytes, element))
        wire = codec_bytes(layout.codec, case.shape, exact=exact)
        coded = codec_seconds(layout.codec, case.cluster.device, count)
    link = group_link(case.cluster, ranks=layout.copies, stride=layout.tp)
    sent = Sent(software, element, wire)
    return copies_messages(link, sent, layout, held, work=work, last=last) + coded


@dataclass(frozen=True)
class Held:
    """What ranks that have the same parameters exchange."""

    count: float
    """Parameters of a rank."""
    units: int
    """In how many parts ZeRO 3 gathers them."""


@dataclass(frozen=True)
class Sent:
    """How it travels."""

    software: Software
    """In what gradients are kept, and whether they travel beside the computation."""
    element: int
    """Bytes of a parameter."""
    wire: float | None = None
    """Bytes of a gradient's element through a codec; None: without one."""


def copies_messages(
    link: Link, sent: Sent, layout: Layout, held: Held, *, work: float, last: float
) -> float:
    """Messages between ranks with the same parameters that nothing hides, with what hidden ones
    slow down.

    Args:
        link: That carries them.
        sent: How they travel.
        layout: With its copies and ZeRO stage.
        held: What they exchange.
        work: Seconds that a micro-batch computes.
        last: Of them, those of a backward.
    """
    ranks, m = layout.copies, layout.num_microbatches
    if ranks == 1:
        return 0.0
    software, element, count = sent.software, sent.element, held.count
    gradient = max(software.gradient_bytes, element)
    if layout.zero == 3:
        gather = ring(link, nbytes=count * element, ranks=ranks, passes=1, messages=held.units)
        scatter = ring(link, nbytes=count * gradient, ranks=ranks, passes=1, messages=held.units)
        return m * exposed(2.0 * gather + scatter, work, link, software)
    messages = max(1, math.ceil(count * gradient / software.bucket_bytes))
    if layout.zero == 0:
        nbytes = count * (gradient if sent.wire is None else sent.wire)
        reduce = ring(link, nbytes=nbytes, ranks=ranks, passes=2, messages=messages)
        return exposed(reduce, last, link, software)
    scatter = ring(link, nbytes=count * gradient, ranks=ranks, passes=1, messages=messages)
    gather = ring(link, nbytes=count * element, ranks=ranks, passes=1, messages=messages)
    scatters = m if layout.zero == 2 and layout.pp == 1 else 1
    beside = exposed(scatter, last, link, software)
    return scatters * beside + exposed(gather, work - last, link, software)


def num_messages(layout: Layout, blocks: int) -> int:
    """Messages that a rank waits for in a step.

    Args:
        layout: How the training is shared out.
        blocks: Of the rank.
    """
    if layout.num_ranks == 1:
        return 0
    m, found = layout.num_microbatches, OF_A_STEP
    if layout.tp > 1:
        # Of a block two sums in forward and two in backward; with sequence parallelism gathers and
        # scatters, some of them beside products. Of both ends four.
        found += m * (blocks * (6 if layout.sequence_parallel else 4) + 4)
    if layout.cp > 1:
        found += 3 * m * blocks * (layout.cp - 1)
    if layout.pp > 1:
        found += 2 * m * layout.stages_per_rank
    if layout.copies > 1:
        found += {0: 1, 1: 2, 2: m + 1, 3: 3 * m * (blocks + 1)}[layout.zero]
    return found
