"""ModelStage: one stage of a model that was not written for a pipeline, run by the model's own
code.

    stage 0   embeddings, block 0, block 1   ->  hidden states  ->  stage 1   block 2, block 3, head

Each rank calls the whole model's forward. Blocks of other stages let the hidden states pass, other
modules of other stages give zeros (see placeholder.py), the stage's first block gets what the stage
before has sent, and the forward ends where the next stage's first block is entered (see
stage_range.py). So whatever the model's code does around its blocks (masks, positions, rotary
tables) is done on every stage, and nothing has to be known of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pyops.parallel.fused_head import LABELS, FusedHead
from pyops.parallel.stages.model_layout import ModelLayout
from pyops.parallel.stages.placeholder import Placeholder
from pyops.parallel.stages.stage_range import BlockGate, StageExit, StageRange
from pyops.tensor_parallel.convert.region_hooks import SplitTokens

__all__ = ["CachePerStage", "ModelStage", "StageBounds", "cut_into_stages", "stage_bounds"]


@dataclass(frozen=True)
class StageBounds:
    """The blocks [begin, end) of a stage.

    Attributes:
        begin: The first block.
        end: The block behind the last one; None for the last stage.
    """

    begin: int
    end: int | None


def stage_bounds(boundaries: Sequence[int]) -> list[StageBounds]:
    """The bounds of all stages.

    Args:
        boundaries: The first block of each stage and, last, the number of blocks.
    """
    ends: list[int | None] = [*boundaries[1:-1], None]
    return [StageBounds(begin, end) for begin, end in zip(boundaries, ends, strict=False)]


class CachePerStage(ABC):
    """Given as an argument of the model, this is replaced by what belongs to the stage."""

    @abstractmethod
    def of_stage(self, begin: int) -> Any:
        """The argument for the stage that begins with this block."""


class ModelStage(nn.Module):
    """A layer of a `pyops.pipeline.Pipeline`: forward(*values of the stage before, **arguments of
    the model) gives the values for the next stage, or what the model returns.

    Args:
        model: The model, cut by `cut_into_stages`.
        bounds: Of this stage.
        modules: {name in the model: module} of what the stage computes; none for a stage of
            another rank.
        stage_range: Of the model.
        named_arguments: The names of the arguments of the model's forward.

    Attributes:
        head: Of the last stage: computes the loss of the labels that it is given.
        on_exit: Called with the values for the next stage, where the forward of the model ends
            before its end.
    """

    def __init__(
        self,
        model: nn.Module,
        bounds: StageBounds,
        modules: dict[str, nn.Module],
        stage_range: StageRange,
        named_arguments: frozenset[str],
    ) -> None:
        super().__init__()
        # Not a submodule: the stage's parameters are those of `modules` alone.
        object.__setattr__(self, "_model", model)
        self.bounds, self.named_arguments = bounds, named_arguments | {LABELS}
        self._stage_range = stage_range
        self.head: FusedHead | None = None
        self.on_exit: Callable[[Sequence[Any]], None] = lambda values: None
        for name, module in modules.items():
            self.add_module(name.replace(".", "/"), module)

    def forward(self, *values: Any, **arguments: Any) -> Any:
        """Run the stage.

        Args:
            values: Of the stage before; the first stage ignores them.
            arguments: Of the model's forward.
        """
        return self.run(values, (), arguments)

    def run(self, values: Sequence[Any], args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """As `forward`, with positional arguments of the model too."""
        arguments = {
            name: value.of_stage(self.bounds.begin) if isinstance(value, CachePerStage) else value
            for name, value in arguments.items()
        }
        labels = arguments.pop(LABELS, None)
        received = values if self.bounds.begin else None
        with self._stage_range.within(self.bounds.begin, self.bounds.end, received):
            try:
                model = self.__dict__["_model"]
                if self.head is None:
                    return model(*args, **arguments)
                return self.head.call(lambda: model(*args, **arguments), labels, arguments)
            except StageExit as exit_:
                self.on_exit(exit_.values)
                return exit_.values


def cut_into_stages(
    model: nn.Module,
    layout: ModelLayout,
    boundaries: Sequence[int],
    own: Sequence[int],
    *,
    shapes: nn.Module,
    device: torch.device,
    named_arguments: frozenset[str],
) -> list[ModelStage]:
    """Cut `model`, in place: what only stages of other ranks need is replaced by placeholders.

    Args:
        model: The model; what is replaced loses its memory.
        layout: Of the model.
        boundaries: The first block of each stage and, last, the number of blocks.
        own: The numbers of this rank's stages.
        shapes: The `meta_copy` of the model, made before anything was changed.
        device: Of the zeros that placeholders give.
        named_arguments: The names of the arguments of the model's forward.

    Returns:
        All stages; those of other ranks have no modules.
    """
    bounds = stage_bounds(boundaries)
    needed = [layout.modules_of(each.begin, each.end) for each in bounds]
    modules = dict(model.named_modules(remove_duplicate=False))
    own_names = {name for stage in own for name in needed[stage]}
    # Every stage runs the code around the blocks, and a recomputation must draw what was drawn.
    blocks = tuple(f"{name}." for name, _ in layout.blocks())
    dropouts = {
        name: module
        for name, module in modules.items()
        if hasattr(module, "set_dropout_state") and not f"{name}.".startswith(blocks)
    }
    splits = {name: SplitTokens.of(modules[name]) for name, _ in layout.blocks()}
    replace_foreign(model, own_names, shapes, device, blocks=[name for name, _ in layout.blocks()])
    stage_range = StageRange()
    for index, (name, record) in enumerate(layout.blocks()):
        BlockGate(model.get_submodule(name), index, record, stage_range, splits[name])
    return [
        ModelStage(
            model,
            each,
            {**dropouts, **{name: modules[name] for name in needed[number]}}
            if number in own
            else {},
            stage_range,
            named_arguments,
        )
        for number, each in enumerate(bounds)
    ]


def replace_foreign(
    model: nn.Module,
    own: set[str],
    shapes: nn.Module,
    device: torch.device,
    *,
    blocks: Collection[str] = (),
) -> None:
    """Put a placeholder in the place of each module with parameters that this rank does not need.

    What is around blocks, such as a whole encoder, stays: its code makes masks of the values that
    it is given, which a placeholder does not have.

    Args:
        model: Changed in place.
        own: The names of the modules that this rank needs.
        shapes: The `meta_copy` of the model.
        device: Of the placeholders' zeros.
        blocks: The names of the blocks of all stages.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = {id(p) for name in own for p in modules[name].parameters()}
    # By its first name all ranks know a parameter that several modules have.
    first = {name: p for name, p in model.named_parameters() if id(p) in kept}
    needed = own | {name.rpartition(".")[0] for name in first}
    replaced: dict[int, Placeholder] = {}
    waiting = [("", model)]
    while waiting:
        prefix, parent = waiting.pop()
        for key, child in list(parent._modules.items()):
            name = f"{prefix}.{key}" if prefix else key
            if child is None or name in own or next(child.parameters(), None) is None:
                continue
            around = next(child.parameters(recurse=False), None) is None and any(
                each.startswith(f"{name}.") for each in blocks
            )
            if around or any(each.startswith(f"{name}.") for each in needed):
                waiting.append((name, child))
                continue
            tied = {k: first[f"{name}.{k}"] for k in child._parameters if f"{name}.{k}" in first}
            if id(child) not in replaced:
                made = replaced[id(child)] = Placeholder(shapes.get_submodule(name), device, tied)
                placements = getattr(child, "placements", {})
                made.placements = {k: placements[k] for k in tied if k in placements}
            parent._modules[key] = replaced[id(child)]
