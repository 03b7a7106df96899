"""StagedModel: the stages of a model on this rank, and the pipeline that runs them with the other
ranks of the axis "pp".

    rank 0   embedding, block 0, block 1   0F0 0F1 0F2 0B0 0F3 0B1 ...  0B3 | reduce |
    rank 1   block 2, block 3, head        1F0 1B0 1F1 1B1 ...   1B3 | reduce | norm, step

    reduce: the gradients of the stage are reduced over its copies, as soon as they are complete
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import naming_lost_ranks
from pyops.mesh import Mesh
from pyops.parallel.fused_head import FusedHead
from pyops.parallel.losses import CountedLoss
from pyops.parallel.stages.pipeline_layers import PipelineInputs, PipelineLayers, StagePlan
from pyops.pipeline import Action, Pipeline, PipelineConfig, Schedule, custom
from pyops.pipeline.runtime.microbatch import num_rows
from pyops.pipeline.runtime.stage import Stage
from pyops.zero import ZeroOptimizer

__all__ = ["StagedModel", "broadcast_logits"]

BeforeForward = Callable[[int], None]  # of the number of the micro-batch


class StagedModel:
    """Cuts a model, in place, and runs its stages.

    Args:
        model: The whole model, cut by tensor parallelism or not; afterwards this rank's stages.
        stages: Where it is cut.
        mesh: The ranks.
        loss: Of a micro-batch.
        named_arguments: The names of the arguments of the model's forward.
        gather_once: Whether the parameters of ZeRO stage 3 are gathered once a step, not for each
            micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: StagePlan,
        *,
        mesh: Mesh,
        loss: CountedLoss,
        named_arguments: frozenset[str],
        gather_once: bool = False,
    ) -> None:
        self.model, self.plan, self.mesh, self.loss = model, stages.schedule, mesh, loss
        self.gather_once = gather_once
        self.stages: PipelineLayers = stages.cut(
            model, rank=mesh.rank("pp"), named_arguments=named_arguments
        )
        self.before_forward: BeforeForward = lambda number: None
        self.pipeline: Pipeline | None = None
        self._one_batch: Pipeline | None = None

    def set_head(self, head: FusedHead) -> None:
        """Let the last stage compute the loss in its head.

        Args:
            head: Of the model.
        """
        self.stages.set_head(head)

    def connect(self, optimizer: ZeroOptimizer) -> None:
        """Make the pipeline, once the stages' parameters have their memory. A collective.

        Args:
            optimizer: Of this rank's parameters. It sums the gradients of what several stages
                hold, and those of the copies of a stage as soon as they are complete.
        """
        self.pipeline = self._pipeline(self.plan)
        self._optimizer = optimizer
        self.stages.on_exit(optimizer.forward_left)
        complete = self._complete_after()

        def reduce(action: Action) -> None:
            if parameters := complete.get(action):
                optimizer.reduce(parameters)

        self.pipeline.on_action(reduce)

    def _pipeline(self, plan: Schedule) -> Pipeline:
        config = PipelineConfig(
            reduction="sum",
            boundaries=self.stages.first_layers,
            before_forward=self._before,
            tied=None,
        )
        return Pipeline(
            self.stages.layers, schedule=plan, mesh=self.mesh, loss=self.loss.sum, config=config
        )

    def _complete_after(self) -> dict[Action, list[nn.Parameter]]:
        """After which action of this rank the gradients of which parameters are complete. What
        several of its stages have, such as a shared embedding, is complete with the last of them.
        """
        assert self.pipeline is not None
        rank = self.mesh.rank("pp")
        last, order = self.plan.last_gradients, self.plan.ranks[rank]
        stages = sorted(self.plan.stages_of(rank), key=lambda stage: last[stage])
        holder = {
            p: stage
            for stage in stages
            for layer in self.pipeline.stages[stage].layers
            for p in layer.parameters()
        }
        found: dict[Action, list[nn.Parameter]] = {}
        for parameter, stage in holder.items():
            found.setdefault(order[last[stage]], []).append(parameter)
        return found

    def _before(self, stage: Stage, number: int) -> None:
        self.before_forward(number)

    def step(
        self, arguments: Mapping[str, Any], batch: Mapping[str, Any], *, rows: int, scale: float
    ) -> Tensor:
        """Forward and backward of all micro-batches: the sum of their losses, on every rank.

        Args:
            arguments: Of the model's forward.
            batch: The same rows for the loss.
            rows: How many rows there are.
            scale: The gradients are multiplied by it.
        """
        assert self.pipeline is not None
        given = self._inputs(arguments, rows)
        with self._gathered():
            return self.pipeline.step(given.batch, dict(batch), scale=scale, **given.named)

    def evaluate(
        self, arguments: Mapping[str, Any], batch: Mapping[str, Any] | None, *, rows: int
    ) -> Any:
        """Forward alone: the sum of the losses, on every rank; without a batch, what the model
        returns for the rows, on the rank of the last stage, None elsewhere."""
        assert self.pipeline is not None
        target, given = None if batch is None else dict(batch), self._inputs(arguments, rows)
        with self._gathered():
            return self.pipeline(given.batch, target, **given.named)

    def _inputs(self, arguments: Mapping[str, Any], rows: int) -> PipelineInputs:
        return self.stages.inputs(arguments, rows=rows, num_microbatches=self.plan.num_microbatches)

    def _gathered(self) -> AbstractContextManager[None]:
        return self._optimizer.whole_parameters() if self.gather_once else nullcontext()

    def logits(self, arguments: Mapping[str, Any], *, last: bool = False) -> Tensor:
        """The logits [rows, T, V], on every rank. A collective of the ranks of one copy of the
        model.

        Args:
            arguments: Of the model's forward, tensors [rows, T] among them.
            last: Whether those of the last position alone are sent: [rows, 1, V].
        """
        if self._one_batch is None:
            orders = custom(_one_microbatch(self.plan), rank_of=self.plan.rank_of)
            self._one_batch = self._pipeline(orders)
        pipeline = self._one_batch
        pipeline.eval()
        rows = num_rows(dict(arguments)) or 0
        given = self.stages.inputs(arguments, rows=rows, num_microbatches=1)
        outputs = pipeline(given.batch, None, **given.named)
        logits = None if outputs is None else self.stages.logits(outputs)
        if logits is not None and last:
            logits = logits[:, -1:]
        return broadcast_logits(logits, pipeline)

    @property
    def own_blocks(self) -> list[tuple[int, int]]:
        """(first block, block behind the last one) of each stage of this rank."""
        own = self.plan.stages_of(self.mesh.rank("pp"))
        first = self.stages.boundaries
        return [(first[stage], first[stage + 1]) for stage in own]

    @property
    def described(self) -> str:
        """The schedule, and which blocks or layers are on which stage, in words."""
        first, names = self.stages.boundaries, self.stages.names
        stages = " | ".join(
            names[a] if b - a == 1 else f"{names[a]} .. {names[b - 1]}"
            for a, b in itertools.pairwise(first)
        )
        return f"pipeline {self.plan.name}, {self.plan.num_microbatches} micro-batches: {stages}"


def broadcast_logits(logits: Tensor | None, pipeline: Pipeline) -> Tensor:
    """The logits that the last stage of a pipeline has, on all its ranks. A collective.

    Args:
        logits: On the rank of the last stage; None elsewhere.
        pipeline: Of this rank.
    """
    if pipeline.group is None:
        assert logits is not None
        return logits
    last = pipeline.schedule.rank_of[-1]
    kind = [None if logits is None else (tuple(logits.shape), logits.dtype)]
    with naming_lost_ranks("the broadcast of logits", group=pipeline.group):
        dist.broadcast_object_list(kind, group=pipeline.group, group_src=last)
        assert kind[0] is not None
        if logits is None:
            logits = torch.empty(kind[0][0], dtype=kind[0][1], device=pipeline.device)
        logits = logits.contiguous()
        dist.broadcast(logits, group=pipeline.group, group_src=last)
    return logits


def _one_microbatch(plan: Schedule) -> list[list[Action]]:
    """The orders of a forward and a backward of one micro-batch over the stages of `plan`."""
    orders = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        orders.append(
            [
                *(Action(stage, "F", 0) for stage in stages),
                *(Action(stage, "B", 0) for stage in reversed(stages)),
            ]
        )
    return orders
