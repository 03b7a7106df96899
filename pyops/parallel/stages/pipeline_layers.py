"""What StagedModel asks of the stages of a model, whoever wrote it: the layers of the pipeline,
where they are cut, and what they are called with.

    BlockStages    a model of anybody's: one layer for each stage, which calls the whole model
    LayerStages    a model that was written as layers: these
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyops.parallel.fused_head import FusedHead
from pyops.pipeline import Schedule

__all__ = ["PipelineInputs", "PipelineLayers", "StagePlan", "given_boundaries"]


@dataclass(frozen=True)
class PipelineInputs:
    """What a Pipeline is called with for the arguments of a model."""

    batch: Any
    """Of the first layer."""

    named: dict[str, Any]
    """Of all layers that name them."""


class StagePlan(ABC):
    """Where a model is to be cut, found before anything of it is changed."""

    schedule: Schedule
    """What each rank of the pipeline computes."""

    @abstractmethod
    def cut(
        self, model: nn.Module, *, rank: int, named_arguments: frozenset[str]
    ) -> PipelineLayers:
        """Cut the model, in place: what only stages of other ranks need loses its memory.

        Args:
            model: The whole model, cut by tensor parallelism or not.
            rank: Of this process, along the axis "pp".
            named_arguments: The names of the arguments of the model's forward.
        """


class PipelineLayers(ABC):
    """The stages of a model, as a pipeline runs them."""

    layers: Sequence[nn.Module]
    """Of the pipeline, those of other ranks among them."""

    first_layers: Sequence[int]
    """The first layer of each stage and, last, the number of layers."""

    names: Sequence[str]
    """Of what the plan's boundaries count: blocks, or layers."""

    boundaries: Sequence[int]
    """The first of them of each stage and, last, how many there are."""

    equal_parts: bool = False
    """Whether all micro-batches must have equally many rows."""

    @abstractmethod
    def inputs(
        self, arguments: Mapping[str, Any], *, rows: int, num_microbatches: int
    ) -> PipelineInputs:
        """What the pipeline is called with.

        Args:
            arguments: Of the model's forward.
            rows: How many there are.
            num_microbatches: Into how many parts the pipeline cuts them.
        """

    @abstractmethod
    def logits(self, outputs: Any) -> Tensor:
        """The logits [rows, T, V] among what the last layer returns."""

    def set_head(self, head: FusedHead) -> None:
        """Let the last stage compute the loss in its head."""
        raise TypeError(f"{type(self).__name__} has no head that could be given labels")

    @abstractmethod
    def on_exit(self, call: Callable[[Sequence[Any]], None]) -> None:
        """Call this with the values for the next stage where a forward of the model ends before its
        end."""


def given_boundaries(given: Sequence[int], *, num_stages: int, count: int, what: str) -> list[int]:
    """The boundaries of the stages, as the caller said them.

    Args:
        given: PipelineOptions.boundaries.
        num_stages: How many stages there are.
        count: How many blocks, or layers, there are.
        what: "block" or "layer".

    Raises:
        ValueError: They do not fit.
    """
    found = list(given)
    rising = all(a < b for a, b in itertools.pairwise(found))
    if len(found) != num_stages + 1 or found[0] or found[-1] != count or not rising:
        raise ValueError(
            f"pipeline.boundaries is {found}; give {num_stages + 1} rising numbers from 0 to "
            f"{count}, the first {what} of each stage and the number of {what}s"
        )
    return found
