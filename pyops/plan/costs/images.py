"""What a CoAtNet takes: bytes of a rank and seconds of a step, layer by layer, since no two stages
of it are alike.

    memory    the most of   states + what layers 0 to i keep + what the backward of layer i makes
    step      m (the slowest stage) + idle + messages that nothing hides + optimizer

Stages of a pipeline are cut by the time of their layers. A tensor that is kept is written once and
read once in forward: an estimate of what lies between the products.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pyops.models.coatnet.costs import LayerSizes
from pyops.pipeline import balance
from pyops.plan.clusters import GIB, Cluster
from pyops.plan.costs.computing import OPTIMIZER_BYTES, Pass
from pyops.plan.costs.links import group_link, ring
from pyops.plan.costs.measured import MeasuredLayers
from pyops.plan.costs.messages import OF_A_STEP, Held, Sent, copies_messages, neighbor_messages
from pyops.plan.costs.rank_memory import ADAM, BUCKETS, ELEMENT_BYTES, MESSAGES, Memory, state_bytes
from pyops.plan.costs.times import StepTime, crowding, late
from pyops.plan.costs.turns import kept
from pyops.plan.layout import Layout, Software
from pyops.plan.shapes import ImageShape

__all__ = ["ImageCase", "image_memory", "image_step", "num_image_messages", "stage_bounds"]

UNDER_WAY = 2.0  # tensors as wide as the inside of a layer that its backward has at a time
SUMS = {"C": 1, "T": 2}  # of a block's result over ranks of tp in forward; in backward as many
MESSAGES_OF_TP = 2  # of either block and pass: of a convolution block one is of the gate, and small
NORM_SUMS = 8  # of the two norms that ranks share in a convolution block, small ones


@dataclass(frozen=True)
class ImageCase:
    """What is priced, apart from the layout."""

    shape: ImageShape
    """The model."""
    cluster: Cluster
    """The devices and links."""
    software: Software
    """What trains it."""
    precision: str = "bf16"
    """ "fp32", "bf16" or "fp16"."""
    measured: MeasuredLayers | None = None
    """What layers were measured to take; None: formulas say it."""

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return ELEMENT_BYTES[self.precision]


class _Rates(NamedTuple):
    """What a device computes and moves in a second, as far as formulas ask."""

    peak: float
    product: float
    half_width: float
    attention: float
    memory: float

    @classmethod
    def of(cls, case: ImageCase) -> _Rates:
        device = case.cluster.device
        part = device.efficiency
        memory = device.memory_bandwidth * part.memory
        peak = device.operations(case.precision)
        return cls(peak, part.product, part.half_width, part.attention, memory)


@lru_cache(maxsize=1024)
def _forwards(
    shape: ImageShape, rates: _Rates, element: int, images: int, ranks: int
) -> tuple[Pass, ...]:
    """A forward of each layer, by its formula."""
    found = []
    for layer in shape.layers:
        cut = (layer.cut_products - layer.scores) / ranks
        products = layer.products - layer.cut_products + cut
        width = max(1.0, layer.width / ranks)
        delivered = rates.peak * rates.product * width / (width + rates.half_width)
        moved = 2.0 * layer.kept_bytes(images, element=element, ranks=ranks)
        found.append(
            Pass(
                products=2.0 * images * products / delivered,
                attention=2.0 * images * layer.scores / ranks / (rates.peak * rates.attention),
                between=moved / rates.memory,
            )
        )
    return tuple(found)


def _passes(case: ImageCase, layout: Layout) -> list[tuple[Pass, Pass]]:
    """Forward and backward of each layer, of a micro-batch."""
    images, rates = layout.micro_batch, _Rates.of(case)
    forwards = _forwards(case.shape, rates, case.element, images, layout.tp)
    if (measured := case.measured) is None:
        return [
            (each, Pass(2.0 * each.products, 2.5 * each.attention, 2.0 * each.between))
            for each in forwards
        ]
    # Ranks of tp for which nothing was measured have the part that formulas say.
    tp = layout.tp if measured.has(layout.tp) else 1
    there = _forwards(case.shape, rates, case.element, images, tp)
    found = []
    for number, (each, whole) in enumerate(zip(forwards, there, strict=True)):
        lines = (measured.forward[tp][number], measured.backward[tp][number])
        scale = 1.0 / whole.total
        first, second = (scale * line.at(float(images)) for line in lines)
        found.append((each.times(first), each.times(second)))
    return found


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    return tuple(balance(costs, num_stages=stages))


def stage_bounds(case: ImageCase, layout: Layout) -> tuple[int, ...]:
    """The first layer of each rank of the pipeline and, last, the number of layers.

    Args:
        case: The model, the cluster, the program.
        layout: With its pp.
    """
    if layout.pp == 1:
        return 0, case.shape.num_layers
    times = [forward.total + backward.total for forward, backward in _passes(case, layout)]
    whole = sum(times)
    return _balanced(tuple(round(each / whole, 9) for each in times), layout.pp)


# --------------------------------------------------------------------------------------------------
# memory


def _kept(case: ImageCase, layout: Layout, layer: LayerSizes, *, again: bool) -> float:
    """Bytes that a layer keeps of a micro-batch; again: where it is computed again."""
    if again and layer.kind in SUMS:
        return float(case.element * layout.micro_batch * layer.taken)
    return layer.kept_bytes(layout.micro_batch, element=case.element, ranks=layout.tp)


def _under_way(case: ImageCase, layout: Layout, layer: LayerSizes) -> float:
    """Bytes that the backward of a layer makes beside what is kept."""
    inside = UNDER_WAY * layer.inside / layout.tp
    return case.element * layout.micro_batch * (inside + layer.given)


@dataclass(frozen=True)
class _Gathered:
    """Of the parameters and gradients of a rank's layers, where the backward of a layer begins."""

    buffers: list[float]
    """Of each layer: what is whole, of ZeRO 3, or in buckets."""
    gradients: list[float]
    """Of each layer: this rank's part of the gradients, as far as it is there."""


def _gathered(case: ImageCase, layout: Layout, layers: Sequence[LayerSizes]) -> _Gathered:
    """Of the layers of a rank. With ZeRO 3 blocks come and go; stem and head stay whole from
    forward to the end of backward, and so do their gradients."""
    several = [layer.rank_parameters(layout.tp) for layer in layers]
    software = case.software
    gradient, number = float(max(software.gradient_bytes, case.element)), len(several)
    owned = gradient * sum(several) / (layout.copies if layout.zero >= 2 else 1)
    # Of ZeRO 2 and 3 a rank makes its part of the gradients during a step's first backward.
    fills = layout.zero >= 2 and layout.pp == layout.num_microbatches == 1
    after = [sum(several[i + 1 :]) / sum(several) for i in range(number)]
    gradients = [owned * part if fills else owned for part in after]
    if layout.copies == 1:
        return _Gathered([0.0] * number, gradients)
    if layout.zero < 3:
        most = sum(several) * gradient
        if software.buckets_are_slices:
            most *= 1.0 - 1.0 / layout.copies if layout.zero == 2 else 0.0
        return _Gathered([min(BUCKETS * float(software.bucket_bytes), most)] * number, gradients)
    units = [
        size if layer.kind in SUMS else 0.0 for size, layer in zip(several, layers, strict=True)
    ]
    rest, found = sum(several) - sum(units), []
    for i in range(number):
        # Parameters of this block and the next in backward; gradients of this one and the last.
        there = rest + sum(units[max(0, i - 1) : i + 1])
        made = rest + sum(units[i : i + 2])
        found.append(case.element * there + gradient * made)
    return _Gathered(found, gradients)


def _messages(case: ImageCase, layout: Layout, layers: Sequence[LayerSizes], rank: int) -> float:
    if layout.pp == 1:
        return 0.0
    sides = [layers[0].taken] if rank else []
    sides += [layers[-1].given] if rank < layout.pp - 1 else []
    return float(MESSAGES * case.element * layout.micro_batch * sum(sides))


def _of_rank(case: ImageCase, layout: Layout, rank: int, optimizer_bytes: float) -> Memory:
    """Of a rank of the pipeline, where the backward of that layer begins at which most is there."""
    first, end = stage_bounds(case, layout)[rank : rank + 2]
    layers = case.shape.layers[first:end]
    count = sum(layer.rank_parameters(layout.tp) for layer in layers)
    parameters, _, states = state_bytes(
        count,
        layout,
        case.software,
        precision=case.precision,
        optimizer_bytes=optimizer_bytes,
    )
    again = layout.recompute == "block"
    each = [_kept(case, layout, layer, again=again) for layer in layers]
    waiting = (kept(layout, rank) - 1.0) * sum(each)
    messages, gathered = _messages(case, layout, layers, rank), _gathered(case, layout, layers)
    found = []
    for i, before in enumerate(itertools.accumulate(each)):
        found.append(
            Memory(
                parameters=parameters,
                gradients=gathered.gradients[i],
                states=states,
                activations=waiting + before,
                recomputed=_kept(case, layout, layers[i], again=False) - each[i],
                logits=_under_way(case, layout, layers[i]),
                buffers=messages + gathered.buffers[i],
            )
        )
    return max(found, key=lambda memory: memory.total)


def image_memory(case: ImageCase, layout: Layout, *, optimizer_bytes: float = ADAM) -> Memory:
    """The memory of the rank that takes most.

    Args:
        case: The model, the cluster, the program.
        layout: How it is shared out.
        optimizer_bytes: Of an element's states.
    """
    several = [_of_rank(case, layout, rank, optimizer_bytes) for rank in range(layout.pp)]
    worst = max(several, key=lambda each: each.total)
    return replace(
        worst,
        fragmentation=(case.software.fragmentation - 1.0) * worst.total,
        reserved=case.cluster.device.reserved_gib * GIB,
    )


# --------------------------------------------------------------------------------------------------
# time


def _sums(case: ImageCase, layout: Layout, layer: LayerSizes) -> float:
    """Seconds of a block's sums over ranks of tp, in one pass."""
    measured = case.measured is not None and case.measured.has(layout.tp)
    if layout.tp == 1 or measured or layer.kind not in SUMS:
        return 0.0  # or measured with the layer
    link = group_link(case.cluster, ranks=layout.tp, stride=1)
    element = max(case.software.tensor_sum_bytes, case.element)
    nbytes = float(element * layout.micro_batch * layer.given * SUMS[layer.kind])
    return ring(link, nbytes=nbytes, ranks=layout.tp, passes=2, messages=MESSAGES_OF_TP)


def num_image_messages(case: ImageCase, layout: Layout, layers: Sequence[LayerSizes]) -> int:
    """Messages that a rank waits for in a step.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
        layers: Of the rank.
    """
    if layout.num_ranks == 1:
        return 0
    m, found = layout.num_microbatches, OF_A_STEP
    blocks = [layer for layer in layers if layer.kind in SUMS]
    if layout.tp > 1 and not (case.measured is not None and case.measured.has(layout.tp)):
        norms = sum(NORM_SUMS for layer in blocks if layer.norm_pixels)
        found += m * (2 * MESSAGES_OF_TP * len(blocks) + norms)
    if layout.pp > 1:
        found += 2 * m
    if layout.copies > 1:
        found += {0: 1, 1: 2, 2: m + 1, 3: 3 * m * (len(blocks) + 1)}[layout.zero]
    return found


def _optimizer(case: ImageCase, layout: Layout, count: float) -> float:
    owned = count / layout.copies if layout.zero else count
    if case.measured is not None:
        return case.measured.optimizer.at(owned)
    device = case.cluster.device
    return OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.efficiency.memory)


@dataclass(frozen=True)
class _Stage:
    """A rank of the pipeline, of a micro-batch."""

    layers: Sequence[LayerSizes]
    work: Pass
    backward: float
    again: float
    sums: float

    @property
    def seconds(self) -> float:
        return self.work.total + self.again + self.sums

    def count(self, ranks: int) -> float:
        return sum(layer.rank_parameters(ranks) for layer in self.layers)


def _stages(case: ImageCase, layout: Layout) -> list[_Stage]:
    found, every = [], _passes(case, layout)
    for first, end in itertools.pairwise(stage_bounds(case, layout)):
        layers = case.shape.layers[first:end]
        work, backward, again, sums = Pass(), 0.0, 0.0, 0.0
        for layer, (there, back) in zip(layers, every[first:end], strict=True):
            work, backward = work.plus(there).plus(back), backward + back.total
            passes = 2
            if layout.recompute == "block" and layer.kind in SUMS:
                again, passes = again + there.total, 3
            sums += passes * _sums(case, layout, layer)
        found.append(_Stage(layers, work, backward, again, sums))
    return found


def image_step(case: ImageCase, layout: Layout) -> StepTime:
    """The time of a step.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    m, stages = layout.num_microbatches, _stages(case, layout)
    slowest = max(stages, key=lambda stage: stage.seconds)
    fullest = max(stages, key=lambda stage: stage.count(layout.tp))
    link = group_link(case.cluster, ranks=layout.copies, stride=layout.tp)
    largest = max((stage.layers[-1].given for stage in stages[:-1]), default=0)
    software, measured = case.software, case.measured
    host = 0.0
    if measured is not None:
        messages = num_image_messages(case, layout, slowest.layers)
        host = measured.launch * measured.of_a_message * messages
    found = StepTime(
        products=m * slowest.work.products,
        attention=m * slowest.work.attention,
        between=m * slowest.work.between,
        recomputed=m * slowest.again,
        tensor_messages=m * slowest.sums,
        pipeline_messages=neighbor_messages(
            case.cluster,
            software,
            layout,
            nbytes=float(case.element * layout.micro_batch * largest),
            work=slowest.seconds,
        ),
        # The first micro-batch goes through all stages, the others follow the slowest one.
        idle=sum(stage.seconds for stage in stages) - slowest.seconds,
        data_messages=copies_messages(
            link,
            Sent(software, case.element),
            layout,
            Held(fullest.count(layout.tp), len(fullest.layers)),
            work=slowest.seconds,
            last=slowest.backward,
        ),
        optimizer=_optimizer(case, layout, fullest.count(layout.tp)),
        host=host,
    )
    deviation = software.straggling if measured is None else measured.straggling
    found = replace(found, stragglers=late(layout, deviation) * found.total)
    return replace(found, crowding=crowding(case.cluster, layout, found))
