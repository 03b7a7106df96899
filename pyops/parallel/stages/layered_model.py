"""LayeredModel: a model that was written for several ranks, as pyops.models.GPT is.

    layers    embedding | blocks.0 | blocks.1 | head      called one after the other; the last one
                                                          is given the targets, and gives the loss
    costs         0     |    7     |    7     |  3        by which the stages are evened out

Its layers are cut over the tensor-parallel ranks already, it keys its own dropout, and its
parameters may be on the meta device until a module's memory is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from pyops.parallel.stages.pipeline_layers import (
    PipelineInputs,
    PipelineLayers,
    StagePlan,
    given_boundaries,
)
from pyops.pipeline import Schedule, balance
from pyops.pipeline.runtime.stage import named_arguments as names_of_arguments

__all__ = ["LayeredModel", "LayeredModule"]


class LayeredModule(Protocol):
    """What is asked of a module that was written for several ranks."""

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is the forward, in order."""
        ...

    def keep_layers(self, numbers: Collection[int]) -> None:
        """Let go of all `layers()` but these; names stay those of the whole model."""
        ...

    def set_dropout(
        self, shape: tuple[int, int], *, seed: int, step: int, first_row: int = 0
    ) -> None:
        """Key all dropout for the next forward, over (rows, tokens) of `shape`, of which the first
        row has this number in the step's global batch."""
        ...


@dataclass(frozen=True)
class LayeredModel:
    """What `parallelize` takes as model where the model was written for several ranks.

    LayeredModel(gpt, names=("embedding", "blocks.0", "head"), costs=(0.0, 7.0, 3.0),
                 inputs="tokens_BT", initialize=lambda module: gpt.initialize(0, only=module))
    """

    module: Any
    """A torch.nn.Module and a `LayeredModule`, made with the tensor-parallel group of the plan."""

    names: tuple[str, ...]
    """Of its layers."""

    costs: tuple[float, ...]
    """What each layer computes, in one unit for all."""

    inputs: str
    """The argument of the forward that the first layer is called with, a tensor [rows, T]. Layers
    after it are given the other arguments that they name, and shape=(rows, T) where they name
    that."""

    initialize: Callable[[nn.Module], None] | None = None
    """Gives one module, not its children, its values once it has memory. None: they are there."""

    def blocks(self) -> list[nn.Module]:
        """The layers that are items of a list, by their names: "blocks.0", but not "head"."""
        layers = zip(self.names, self.module.layers(), strict=True)
        return [layer for name, layer in layers if name.rpartition(".")[2].isdigit()]

    def shape(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """(rows, tokens) of these arguments of the forward."""
        rows, tokens = arguments[self.inputs].shape[:2]
        return int(rows), int(tokens)

    def stage_plan(self, schedule: Schedule, boundaries: Sequence[int] | None) -> StagePlan:
        """Where the layers are cut.

        Args:
            schedule: Of the pipeline.
            boundaries: The first layer of each stage and, last, the number of layers. None: the
                stages' costs are about equal.

        Raises:
            ValueError: Fewer layers than stages, or boundaries that do not fit.
        """
        count, stages = len(self.names), schedule.num_stages
        if stages > count:
            raise ValueError(
                f"the plan has {stages} stages, but {type(self.module).__name__} has {count} "
                f"layers; set pp x stages_per_rank to {count} or less"
            )
        if boundaries is None:
            found = balance(self.costs, num_stages=stages)
        else:
            found = given_boundaries(boundaries, num_stages=stages, count=count, what="layer")
        return LayerStagePlan(self, schedule, tuple(found))


@dataclass(frozen=True)
class LayerStagePlan(StagePlan):
    """Where a model is to be cut between its layers."""

    model: LayeredModel
    """Whole."""

    schedule: Schedule
    """What each rank of the pipeline computes."""

    boundaries: tuple[int, ...]
    """The first layer of each stage and, last, the number of layers."""

    def cut(self, model: nn.Module, *, rank: int, named_arguments: frozenset[str]) -> LayerStages:
        """See `StagePlan.cut`."""
        layers = self.model.module.layers()
        own = [
            number
            for stage in self.schedule.stages_of(rank)
            for number in range(self.boundaries[stage], self.boundaries[stage + 1])
        ]
        self.model.module.keep_layers(own)
        return LayerStages(layers, self)


class LayerStages(PipelineLayers):
    """The model's own layers.

    Args:
        layers: All of them; those of other ranks have no memory.
        plan: Where they were cut.
    """

    equal_parts = True  # one shape is told to the layers of all micro-batches

    def __init__(self, layers: Sequence[nn.Module], plan: LayerStagePlan) -> None:
        self.layers, self._model = layers, plan.model
        self.first_layers = self.boundaries = plan.boundaries
        self.names = plan.model.names
        self._told_shape = any("shape" in names_of_arguments(layer) for layer in layers)

    def inputs(
        self, arguments: Mapping[str, Any], *, rows: int, num_microbatches: int
    ) -> PipelineInputs:
        """See `PipelineLayers.inputs`."""
        first = self._model.inputs
        named = {name: value for name, value in arguments.items() if name != first}
        if self._told_shape:
            named["shape"] = (rows // num_microbatches, self._model.shape(arguments)[1])
        return PipelineInputs(arguments[first], named)

    def logits(self, outputs: Any) -> Tensor:
        """The last layer returns them, where it has no targets."""
        found: Tensor = outputs
        return found

    def on_exit(self, call: Callable[[Sequence[Any]], None]) -> None:
        """Layers are called one by one, and no forward ends before its end."""
