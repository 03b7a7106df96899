"""StagedModel: the stages of a model on this rank, and the pipeline that runs them with the other
ranks of the axis "pp"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import naming_lost_ranks
from pyops.mesh import Mesh
from pyops.parallel.fused_head import FusedHead
from pyops.parallel.losses import CountedLoss
from pyops.parallel.stages.model_layout import ModelLayout
from pyops.parallel.stages.model_stage import ModelStage, cut_into_stages
from pyops.pipeline import Action, Pipeline, PipelineConfig, Schedule, balance, custom
from pyops.pipeline.runtime.stage import Stage
from pyops.zero import ZeroOptimizer

__all__ = ["StagePlan", "StagedModel", "check_trained", "stage_boundaries"]

BeforeForward = Callable[[int], None]  # of the number of the micro-batch


def stage_boundaries(
    model: nn.Module, layout: ModelLayout, num_stages: int, given: Sequence[int] | None
) -> list[int]:
    """The first block of each stage and, last, the number of blocks.

    Args:
        model: The whole model, whose parameters may be on the meta device.
        layout: Of the model.
        num_stages: How many stages there are.
        given: The boundaries where the caller says them. None: the stages have about equally many
            parameters. Those of the embeddings, which compute next to nothing, do not count; those
            of the head count as what they compute.

    Raises:
        ValueError: Fewer blocks than stages, or boundaries that do not fit.
    """
    names = [name for name, _ in layout.blocks()]
    if num_stages > len(names):
        raise ValueError(
            f"the plan has {num_stages} stages, but {type(model).__name__} has {len(names)} "
            f"blocks ({', '.join(each.name for each in layout.lists)}); set pp x stages_per_rank "
            f"to {len(names)} or less"
        )
    if given is not None:
        found = list(given)
        rising = all(a < b for a, b in itertools.pairwise(found))
        if len(found) != num_stages + 1 or found[0] or found[-1] != len(names) or not rising:
            raise ValueError(
                f"pipeline.boundaries is {found}; give {num_stages + 1} rising numbers from 0 to "
                f"{len(names)}, the first block of each stage and the number of blocks"
            )
        return found
    modules = dict(model.named_modules(remove_duplicate=False))
    costs = [float(sum(p.numel() for p in modules[name].parameters())) for name in names]
    last = set(layout.modules_of(len(names) - 1, None)) - {names[-1]}
    costs[-1] += sum(p.numel() for name in last for p in modules[name].parameters(recurse=False))
    return balance(costs, num_stages=num_stages)


def check_trained(model: nn.Module, layout: ModelLayout, boundaries: Sequence[int]) -> None:
    """Refuse a stage that has nothing to train: it would wait for gradients that nothing asks for.

    Args:
        model: The whole model.
        layout: Of the model.
        boundaries: As of `stage_boundaries`.

    Raises:
        ValueError: Names the stage and the fix.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    last = len(boundaries) - 2
    for stage, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        names = layout.modules_of(begin, None if stage == last else end)
        if not any(p.requires_grad for name in names for p in modules[name].parameters()):
            raise ValueError(
                f"stage {stage} of the pipeline (blocks {begin} to {end - 1}) has no parameter "
                "that requires a gradient; unfreeze some (adapters in all blocks, without "
                "layers_to_transform), give PipelineOptions(boundaries=...) under which each "
                "stage has some, or set pp to 1"
            )


@dataclass(frozen=True)
class StagePlan:
    """Where a model is to be cut, found before anything of it is changed."""

    layout: ModelLayout
    """How the model calls its blocks."""

    schedule: Schedule
    """What each rank of the pipeline computes."""

    boundaries: list[int]
    """The first block of each stage and, last, the number of blocks."""

    shapes: nn.Module
    """A `meta_copy` of the whole model."""

    device: torch.device
    """Of the activations."""

    gather_once: bool = False
    """Whether the parameters of ZeRO stage 3 are gathered once a step, not for each
    micro-batch."""


class StagedModel:
    """Cuts a model, in place, and runs its stages.

    Args:
        model: The whole model, cut by tensor parallelism or not; afterwards this rank's stages.
        stages: Where it is cut.
        mesh: The ranks.
        loss: Of a micro-batch.
        named_arguments: The names of the arguments of the model's forward.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: StagePlan,
        *,
        mesh: Mesh,
        loss: CountedLoss,
        named_arguments: frozenset[str],
    ) -> None:
        self.model, self.plan, self.mesh, self.loss = model, stages.schedule, mesh, loss
        self.boundaries, self.gather_once = stages.boundaries, stages.gather_once
        self.names = [name for name, _ in stages.layout.blocks()]
        self.stages: list[ModelStage] = cut_into_stages(
            model,
            stages.layout,
            stages.boundaries,
            stages.schedule.stages_of(mesh.rank("pp")),
            shapes=stages.shapes,
            device=stages.device,
            named_arguments=named_arguments,
        )
        self.before_forward: BeforeForward = lambda number: None
        self.pipeline: Pipeline | None = None
        self._one_batch: Pipeline | None = None

    def set_head(self, head: FusedHead) -> None:
        """Let the last stage compute the loss in its head.

        Args:
            head: Of the model.
        """
        for stage in self.stages:
            if stage.bounds.end is None:
                stage.head = head

    def connect(self, optimizer: ZeroOptimizer) -> None:
        """Make the pipeline, once the stages' parameters have their memory. A collective.

        Args:
            optimizer: Of this rank's parameters. It sums the gradients of what several stages
                hold, and those of the copies of a stage as soon as they are complete.
        """
        self.pipeline = self._pipeline(self.plan)
        self._optimizer = optimizer
        for stage in self.stages:
            stage.on_exit = optimizer.forward_left
        complete = self._complete_after()

        def reduce(action: Action) -> None:
            if parameters := complete.get(action):
                optimizer.reduce(parameters)

        self.pipeline.on_action(reduce)

    def _pipeline(self, plan: Schedule) -> Pipeline:
        config = PipelineConfig(
            reduction="sum",
            boundaries=tuple(range(len(self.stages) + 1)),
            before_forward=self._before,
            tied=None,
        )
        return Pipeline(
            self.stages, schedule=plan, mesh=self.mesh, loss=self.loss.sum, config=config
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
        numbers = torch.arange(rows)
        with self._optimizer.whole_parameters() if self.gather_once else nullcontext():
            return self.pipeline.step(numbers, dict(batch), scale=scale, **arguments)

    def evaluate(
        self, arguments: Mapping[str, Any], batch: Mapping[str, Any] | None, *, rows: int
    ) -> Any:
        """Forward alone: the sum of the losses, on every rank; without a batch, what the model
        returns for the rows, on the rank of the last stage, None elsewhere."""
        assert self.pipeline is not None
        target = None if batch is None else dict(batch)
        return self.pipeline(torch.arange(rows), target, **arguments)

    def logits(self, arguments: Mapping[str, Any]) -> Tensor:
        """The logits of all positions, on every rank. A collective of the ranks of one copy of the
        model.

        Args:
            arguments: Of the model's forward, "input_ids" [rows, T] among them.
        """
        if self._one_batch is None:
            orders = custom(_one_microbatch(self.plan), rank_of=self.plan.rank_of)
            self._one_batch = self._pipeline(orders)
        pipeline = self._one_batch
        pipeline.eval()
        outputs = pipeline(torch.arange(len(arguments["input_ids"])), None, **arguments)
        logits: Tensor | None = None if outputs is None else outputs["logits"].contiguous()
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
            dist.broadcast(logits, group=pipeline.group, group_src=last)
        return logits

    @property
    def own_blocks(self) -> list[tuple[int, int]]:
        """(first block, block behind the last one) of each stage of this rank."""
        own = self.plan.stages_of(self.mesh.rank("pp"))
        return [(self.boundaries[stage], self.boundaries[stage + 1]) for stage in own]

    @property
    def described(self) -> str:
        """Which blocks are on which stage, in words."""
        ends = zip(self.boundaries, self.boundaries[1:], strict=False)
        return " | ".join(
            self.names[a] if b - a == 1 else f"{self.names[a]} .. {self.names[b - 1]}"
            for a, b in ends
        )


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
