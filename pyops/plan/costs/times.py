"""How long a step takes, term by term, in seconds.

    step = m (a micro-batch on the slowest rank) + idle + messages that nothing hides + optimizer

What is hidden behind the computation slows it by the part `contention` of its time. Where a node
has fewer processors than ranks, these take turns: what they compute takes at least the work of all
of them over the processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyops.plan.clusters import Cluster
from pyops.plan.costs.computing import (
    Case,
    Pass,
    again_of,
    backward_of,
    ends,
    forward_of,
    optimizer_seconds,
)
from pyops.plan.costs.messages import (
    context_messages,
    data_messages,
    num_messages,
    pipeline_messages,
    tensor_messages,
)
from pyops.plan.costs.offloading import offload_seconds
from pyops.plan.costs.rank_memory import blocks_of_a_rank
from pyops.plan.costs.turns import idle
from pyops.plan.layout import Layout

__all__ = ["StepTime", "crowding", "late", "step_time"]

LAUNCH_SECONDS = 5e-6  # of a kernel by the host: an estimate
KERNELS = 20  # of a block and forward: an estimate
# What a rank needs a processor for. Messages were timed with as many ranks, which took turns then.
COMPUTED = ("products", "attention", "between", "recomputed", "optimizer", "host")


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
    context_messages: float = 0.0
    """Messages of cp that nothing hides."""
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
    crowding: float = 0.0
    """Waiting for processors that other ranks use."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.products
            + self.attention
            + self.between
            + self.recomputed
            + self.tensor_messages
            + self.context_messages
            + self.pipeline_messages
            + self.idle
            + self.data_messages
            + self.optimizer
            + self.host
            + self.stragglers
            + self.crowding
        )


@dataclass(frozen=True)
class _Block:
    """A micro-batch's passes through a block, with their messages."""

    forward: Pass
    backward: Pass
    again: Pass
    tensor: tuple[float, float, float]
    """Messages of tp in forward, in backward, and where it is computed again."""
    context: tuple[float, float, float]
    """Likewise of cp."""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Forward, backward, again, with messages."""
        passes = (self.forward, self.backward, self.again)
        forward, backward, again = (
            each.total + tensor + context
            for each, tensor, context in zip(passes, self.tensor, self.context, strict=True)
        )
        return forward, backward, again


def _block(case: Case, layout: Layout) -> _Block:
    forward = forward_of(case, layout)
    backward = backward_of(case, layout, forward)
    sums = tensor_messages(case, layout, sums=2)
    gathered = sums / 2.0 if layout.sequence_parallel else 0.0
    in_backward = (sums + gathered) * (1.0 - case.software.tensor_overlap)
    context = context_messages(case, layout, forward)
    again, whole = again_of(case, layout, forward), layout.recompute == "block"
    messages, exchanged = (sums, context[0]) if whole else (0.0, 0.0)
    return _Block(forward, backward, again, (sums, in_backward, messages), (*context, exchanged))


def step_time(case: Case, layout: Layout) -> StepTime:
    """The time of a step.

    Args:
        case: The model, the cluster, the program.
        layout: How the training is shared out.
    """
    m, blocks = layout.num_microbatches, blocks_of_a_rank(case.shape, layout)
    block, head = _block(case, layout), ends(case, layout)
    forward, backward, again = block.seconds
    # The rank with the head may have fewer blocks, where they are not shared out evenly.
    spare = blocks * layout.pp - case.shape.num_layers
    last = max(0, blocks - spare) if layout.pp > 1 else blocks
    both = forward + backward + again
    longer = last * both + head.total > blocks * both
    count, at_the_end = (last, head) if longer else (blocks, Pass())
    computed = count * both + at_the_end.total
    waits = idle(
        layout,
        blocks * forward,
        blocks * (backward / 2.0 + again),
        blocks * backward / 2.0,
    )
    work = block.forward.plus(block.backward).times(count).plus(at_the_end)
    found = StepTime(
        host=_host(case, layout, blocks, computed),
        products=m * work.products,
        attention=m * work.attention,
        between=m * work.between,
        recomputed=m * count * again,
        tensor_messages=m * count * (block.tensor[0] + block.tensor[1]),
        context_messages=m * count * (block.context[0] + block.context[1]),
        pipeline_messages=pipeline_messages(case, layout, computed),
        idle=waits,
        data_messages=data_messages(case, layout, work=computed, last=blocks * backward),
        optimizer=optimizer_seconds(case, layout) + offload_seconds(case, layout),
    )
    deviation = case.software.straggling if case.measured is None else case.measured.straggling
    found = replace(found, stragglers=late(layout, deviation) * found.total)
    return replace(found, crowding=crowding(case.cluster, layout, found))


def _host(case: Case, layout: Layout, blocks: int, computed: float) -> float:
    """Launching kernels: beside the computation, where it is not measured with it."""
    m = layout.num_microbatches
    if (measured := case.measured) is not None:
        return measured.launch * measured.of_a_message * num_messages(layout, blocks)
    launched = KERNELS * LAUNCH_SECONDS * blocks * (4 if layout.recompute == "block" else 3)
    return m * max(0.0, launched - computed)


def late(layout: Layout, deviation: float) -> float:
    """Which part of a step the slowest rank of all takes longer than a typical one.

    Args:
        layout: With its ranks.
        deviation: Of a rank's step, as a part of it.
    """
    return deviation * math.sqrt(2.0 * math.log(layout.num_ranks))


def crowding(cluster: Cluster, layout: Layout, found: StepTime) -> float:
    """Seconds of a step that ranks wait for processors which others use.

    Args:
        cluster: With its processors.
        layout: With its ranks.
        found: The step without that.
    """
    ranks = min(layout.num_ranks, cluster.devices_per_node)
    if not cluster.processors or ranks <= cluster.processors:
        return 0.0
    busy = sum(float(getattr(found, name)) for name in COMPUTED)
    return max(0.0, busy * (ranks / cluster.processors - 1.0) - found.idle)
