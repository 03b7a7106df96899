"""What a rank has in memory, term by term, in bytes.

states       ZeRO (Rajbhandari et al., SC 2020): parameters, gradients, optimizer states
activations  a block and micro-batch (Korthikanti et al., arXiv:2205.05198, table 2; those of
             pyops' layers in docs/recompute.md), times blocks, times micro-batches kept
the rest     insides of the block that is computed again, logits, buckets, messages, reserved
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyops.plan.clusters import GIB, Device
from pyops.plan.costs.codecs import codec_memory
from pyops.plan.costs.turns import kept
from pyops.plan.layout import Layout, Software
from pyops.plan.shapes import ModelShape

__all__ = [
    "ADAM",
    "Memory",
    "block_bytes",
    "blocks_of_a_rank",
    "host_bytes",
    "memory",
    "state_bytes",
]

ADAM = 8.0
"""Bytes of an element's optimizer states, of Adam: two moments in fp32."""
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MESSAGES = 2  # of each neighbor in a pipeline: one that is read while the next arrives
BUCKETS = 2  # in flight
OFFLOAD_TILES = 3.0 * (32 << 20)  # bytes of states that are on the device while they are stepped
CHUNK_BYTES = 1 << 30  # of logits that a loss without whole logits makes at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the peak of a step."""

    parameters: float = 0.0
    """Its parameters."""
    gradients: float = 0.0
    """Its gradients."""
    states: float = 0.0
    """Optimizer states, with master weights in 16 bits."""
    activations: float = 0.0
    """What forward keeps for backward, of all micro-batches kept."""
    recomputed: float = 0.0
    """Insides of what is computed again, once."""
    logits: float = 0.0
    """Of the loss, or of the first block's backward, where that takes more."""
    buffers: float = 0.0
    """Buckets, gathered parameters, messages."""
    reserved: float = 0.0
    """Driver, kernels and communicators."""
    fragmentation: float = 0.0
    """What the allocator takes beside."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.parameters
            + self.gradients
            + self.states
            + self.activations
            + self.recomputed
            + self.logits
            + self.buffers
            + self.reserved
            + self.fragmentation
        )

    @property
    def gib(self) -> float:
        """All of it, in GiB."""
        return self.total / GIB


def state_bytes(
    num_parameters: float,
    layout: Layout,
    software: Software,
    *,
    precision: str = "bf16",
    optimizer_bytes: float = ADAM,
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and states of a rank that has so many parameters.

    Args:
        num_parameters: Of its blocks and ends, shared by tp already.
        layout: Its ZeRO stage and copies.
        software: In what gradients and parameters are kept.
        precision: "fp32", "bf16" or "fp16".
        optimizer_bytes: Of an element's states.
    """
    element = ELEMENT_BYTES[precision]
    width = software.parameter_bytes or element
    gradient = max(software.gradient_bytes, element)
    states = optimizer_bytes + (4 if width < 4 else 0)
    copies = float(layout.copies)
    shared_gradients = layout.zero >= 2 and (layout.pp == 1 or layout.zero == 3)
    return (
        num_parameters * width / (copies if layout.zero == 3 else 1.0),
        num_parameters * gradient / (copies if shared_gradients else 1.0),
        num_parameters * states / (copies if layout.zero >= 1 else 1.0),
    )


def _scores(shape: ModelShape, layout: Layout, software: Software) -> float:
    """Of the core of attention, of a block and micro-batch."""
    s, a = shape.sequence_length, shape.num_heads
    rows = layout.micro_batch / layout.cp
    if software.activations == "megatron":
        return 0.0 if software.fused_attention else 5.0 * a * s * s * rows / layout.tp
    return 4.0 * a * s * rows / layout.tp  # a number for each row of scores


def block_bytes(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    *,
    precision: str = "bf16",
    recompute: str | None = None,
) -> float:
    """What a block keeps for backward of a micro-batch, on a rank.

    Args:
        shape: Of the model.
        layout: Its tp, sequence parallelism and rows.
        software: Whose layers they are.
        precision: "fp32", "bf16" or "fp16".
        recompute: Of `pyops.plan.layout.RECOMPUTE`; None: as the layout says.
    """
    recompute = layout.recompute if recompute is None else recompute
    element, t = ELEMENT_BYTES[precision], layout.tp
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    share = 1.0 / t if layout.sequence_parallel else 1.0
    if recompute == "block":
        return element * tokens * shape.dim * share
    inside = 2 * shape.query_width + 2 * shape.kv_width + (3 if shape.gated else 2) * shape.inner
    if software.activations == "megatron":
        between = 10.0 * shape.dim * tokens * share  # with masks of dropout
    else:
        numbers = 8.0 if shape.rms_norm else 16.0  # of each token in both norms
        between = (4.0 * element * shape.dim + numbers) * tokens * share
        if not shape.learned_positions:
            # Rotated keys lie beside those which are packed with the values; without shared groups
            # so do the queries.
            inside += shape.kv_width
            if shape.kv_heads == shape.num_heads:
                inside += shape.query_width
    found = between + element * inside * tokens / t
    return found if recompute == "attention" else found + _scores(shape, layout, software)


def blocks_of_a_rank(shape: ModelShape, layout: Layout) -> int:
    """Blocks of the rank that has most of them."""
    return -(-shape.num_layers // layout.num_stages) * layout.stages_per_rank


def rank_parameters(shape: ModelShape, layout: Layout, rank: int) -> float:
    """Parameters of a rank of the pipeline, shared by tp."""
    found = float(blocks_of_a_rank(shape, layout) * shape.block_parameters)
    holds_head = rank == (0 if layout.schedule == "zbv" else layout.pp - 1)
    if rank == 0:
        found += shape.embedding_parameters
    if holds_head:
        found += shape.norm_parameters
        if not (shape.tied_head and rank == 0):
            found += shape.head_parameters
    return found / layout.tp


def memory(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    *,
    precision: str = "bf16",
    device: Device | None = None,
    optimizer_bytes: float = ADAM,
) -> Memory:
    """The memory of the rank that takes most.

    Args:
        shape: Of the model.
        layout: How it is shared out.
        software: What trains it.
        precision: "fp32", "bf16" or "fp16".
        device: Whose driver takes its part; None: of nothing.
        optimizer_bytes: Of an element's states.
    """
    ends = {0, layout.pp - 1}
    several = [_of_rank(shape, layout, software, rank, precision, optimizer_bytes) for rank in ends]
    worst = max(several, key=lambda each: each.total)
    return replace(
        worst,
        fragmentation=(software.fragmentation - 1.0) * worst.total,
        reserved=device.reserved_gib * GIB if device else 0.0,
    )


def _of_rank(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    rank: int,
    precision: str,
    optimizer_bytes: float,
) -> Memory:
    element, t = ELEMENT_BYTES[precision], layout.tp
    count = rank_parameters(shape, layout, rank)
    parameters, gradients, states = state_bytes(
        count, layout, software, precision=precision, optimizer_bytes=optimizer_bytes
    )
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    share = 1.0 / t if layout.sequence_parallel else 1.0
    each = block_bytes(shape, layout, software, precision=precision)
    whole = block_bytes(shape, layout, software, precision=precision, recompute="none")
    activations = each * blocks_of_a_rank(shape, layout) * kept(layout, rank)
    # Of a block's backward, while all else is there: gradients of the MLP's inside, before and
    # behind its activation, and of the tokens.
    under_way = element * tokens * (2.0 * shape.inner / t + 2.0 * shape.dim)
    logits = 0.0 if software.activations == "megatron" else under_way
    if rank == (0 if layout.schedule == "zbv" else layout.pp - 1):
        # What the last norm takes and gives, which is gone when the blocks' backward begins.
        last_norm = 2.0 * element * shape.dim * tokens * share
        activations += last_norm
        logits = max(_loss(shape, layout, software, element, tokens), logits - last_norm)
    messages = 0.0
    if layout.pp > 1:
        neighbors = 1 if rank in (0, layout.pp - 1) and layout.stages_per_rank == 1 else 2
        messages = MESSAGES * neighbors * element * tokens * shape.dim * share
    left_out = codec_memory(layout.codec, copies=layout.copies) * count
    tiles = OFFLOAD_TILES if layout.offload != "none" else 0.0
    gathered = _gathered_keys(shape, layout, element)
    # Of ZeRO 2 and 3 a rank makes its part of the gradients during the backward of a step's first
    # micro-batch; later ones add to it.
    fills = layout.zero >= 2 and layout.pp == layout.num_microbatches == 1
    start = Memory(
        parameters=parameters,
        gradients=0.0 if fills else gradients,
        states=left_out + (min(states, tiles) if tiles else states),
        activations=activations,
        recomputed=whole - each if layout.recompute != "none" else 0.0,
        logits=logits,
        buffers=messages + gathered + _buckets(shape, layout, software, count, element),
    )
    if not fills:
        return start
    first = replace(
        start,
        gradients=gradients * (1.0 - 1.0 / shape.num_layers),
        activations=each,
        # One gradient of the MLP's inside, while those of earlier blocks are on their way.
        logits=under_way - element * tokens * shape.inner / t,
        buffers=gathered + _buckets(shape, layout, software, count, element, ends=True),
    )
    return max(start, first, key=lambda memory: memory.total)


def _loss(
    shape: ModelShape, layout: Layout, software: Software, element: int, tokens: float
) -> float:
    """Of the loss of a micro-batch, on the rank that has the head."""
    every = tokens * shape.vocab_size / layout.tp
    if software.whole_logits:
        return (element + 8.0) * every
    # And the gradient of the head, added up in fp32.
    return min(4.0 * every, float(CHUNK_BYTES)) + 4.0 * shape.head_parameters / layout.tp


def host_bytes(shape: ModelShape, layout: Layout, optimizer_bytes: float) -> float:
    """Of host memory that a rank's offloaded states take, with master weights.

    Args:
        shape: Of the model.
        layout: Which may offload.
        optimizer_bytes: Of an element's states.
    """
    if layout.offload == "none":
        return 0.0
    count = max(rank_parameters(shape, layout, rank) for rank in (0, layout.pp - 1))
    return (optimizer_bytes + 4.0) * count / layout.copies


def _gathered_keys(shape: ModelShape, layout: Layout, element: int) -> float:
    """Keys and values of other ranks' tokens, of one block: of all of them, or of a ring the part
    at hand and that which comes."""
    if layout.cp == 1:
        return 0.0
    keys = 2.0 * element * layout.micro_batch * shape.sequence_length * shape.kv_width / layout.tp
    return keys * (2.0 / layout.cp if layout.cp_method == "ring" else 1.0)


def _buckets(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    count: float,
    element: int,
    *,
    ends: bool = False,
) -> float:
    """Of gradients on their way and gathered parameters, where backward begins, or ends."""
    if layout.copies == 1:
        return 0.0
    gradient = max(software.gradient_bytes, element)
    if layout.zero < 3:
        most = count * gradient
        if software.buckets_are_slices:  # of the gradients: those of other owners are beside them
            most *= 1.0 - 1.0 / layout.copies if layout.zero == 2 else 0.0
        return min(BUCKETS * float(software.bucket_bytes), most)
    unit = shape.block_parameters * element / layout.tp
    rest = max(0.0, count - blocks_of_a_rank(shape, layout) * shape.block_parameters / layout.tp)
    # Where backward begins the parameters of two blocks are whole, and the gradients of one; where
    # it ends those of one, and the gradients of one and of two on their way (counted in runs).
    several = 4.0 if ends and software.buckets_are_slices else 3.0
    return several * unit + 2.0 * element * rest
