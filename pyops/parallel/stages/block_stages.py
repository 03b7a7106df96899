"""Stages of a model that was not written for a pipeline: where it is cut, and the layers of the
pipeline that run it, one for each stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.parallel.fused_head import FusedHead
from pyops.parallel.stages.model_layout import ModelLayout
from pyops.parallel.stages.model_stage import ModelStage, cut_into_stages
from pyops.parallel.stages.pipeline_layers import (
    PipelineInputs,
    PipelineLayers,
    StagePlan,
    given_boundaries,
)
from pyops.pipeline import Schedule, balance
from pyops.tensor_parallel.convert.region_hooks import SplitTokens

__all__ = ["BlockStagePlan", "check_trained", "stage_boundaries"]


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
        return given_boundaries(given, num_stages=num_stages, count=len(names), what="block")
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
class BlockStagePlan(StagePlan):
    """Where a model is to be cut between its blocks, found before anything of it is changed."""

    layout: ModelLayout
    """How the model calls its blocks."""

    schedule: Schedule
    """What each rank of the pipeline computes."""

    boundaries: Sequence[int]
    """The first block of each stage and, last, the number of blocks."""

    shapes: nn.Module
    """A `meta_copy` of the whole model."""

    device: torch.device
    """Of the activations."""

    def cut(self, model: nn.Module, *, rank: int, named_arguments: frozenset[str]) -> BlockStages:
        """See `StagePlan.cut`."""
        shares_tokens = any(SplitTokens.of(module) for module in model.modules())
        stages = cut_into_stages(
            model,
            self.layout,
            self.boundaries,
            self.schedule.stages_of(rank),
            shapes=self.shapes,
            device=self.device,
            named_arguments=named_arguments,
        )
        return BlockStages(stages, self, equal_parts=shares_tokens)


class BlockStages(PipelineLayers):
    """One layer of the pipeline for each stage.

    Args:
        stages: All of them; those of other ranks have no modules.
        plan: Where they were cut.
        equal_parts: Whether all micro-batches must have equally many rows: a block that is computed
            again in backward goes by the tokens' shape of the last forward.
    """

    def __init__(
        self, stages: Sequence[ModelStage], plan: BlockStagePlan, *, equal_parts: bool
    ) -> None:
        self.equal_parts = equal_parts
        self._stages = list(stages)
        self.layers = list(stages)
        self.first_layers = tuple(range(len(stages) + 1))
        self.names = [name for name, _ in plan.layout.blocks()]
        self.boundaries = tuple(plan.boundaries)

    def inputs(
        self, arguments: Mapping[str, Any], *, rows: int, num_microbatches: int
    ) -> PipelineInputs:
        """Each stage calls the whole model with all arguments; the pipeline's own batch is the
        numbers of the rows."""
        return PipelineInputs(torch.arange(rows), dict(arguments))

    def logits(self, outputs: Any) -> Tensor:
        """See `PipelineLayers.logits`."""
        found: Tensor = outputs["logits"]
        return found

    def set_head(self, head: FusedHead) -> None:
        """See `PipelineLayers.set_head`."""
        for stage in self._stages:
            if stage.bounds.end is None:
                stage.head = head

    def on_exit(self, call: Callable[[Sequence[Any]], None]) -> None:
        """See `PipelineLayers.on_exit`."""
        for stage in self._stages:
            stage.on_exit = call
