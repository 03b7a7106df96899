"""find_layout: a small copy of a model is run once, to see how its blocks are called, and is then
cut, to see that nothing was overlooked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pyops.parallel.stages.block_record import record_blocks
from pyops.parallel.stages.cut_check import check_cut
from pyops.parallel.stages.model_layout import BlockList, ModelLayout
from pyops.pipeline.runtime.stage import named_arguments
from pyops.tensor_parallel.convert.check.example_inputs import examples
from pyops.tensor_parallel.convert.check.trial_copy import trial_copy

__all__ = ["find_layout"]

# Of blocks that are alike: the first of a list, one after it, and one that shows whether that one
# gets what the first gave.
ALIKE = 3


def find_layout(model: nn.Module, lists: Sequence[str], example_inputs: Any = None) -> ModelLayout:
    """Run a copy of `model` with few blocks on a few rows, and cut another.

    Args:
        model: The model; its parameters may be on the meta device, its buffers not.
        lists: The names of its lists of blocks.
        example_inputs: Arguments of its forward; None: made up from the model's config.

    Raises:
        ValueError: The model can't be run, or can't be cut between its blocks, with the reason.
    """
    reasons, around = [], None
    for args, kwargs in examples(model, example_inputs):
        if "use_cache" in named_arguments(model):
            kwargs = {**kwargs, "use_cache": False}
        try:
            small = trial_copy(model, torch.float32, list(lists), alike=ALIKE)
            layout, around = _record(model, small, lists, args, kwargs)
            of_small = _with_lengths(layout, small)
            check_cut(small, of_small, args, kwargs)
        except ValueError as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            return layout
    if around is not None:
        raise ValueError(
            f"{type(model).__name__} can't be cut into pipeline stages: {around}, as in a loop "
            "x = x + block(x), and a stage that begins with a block is sent what the block takes, "
            "for the block alone; let the block return the sum (class Block: def forward(self, x): "
            "return x + self.inner(x)), write the model as a pyops.parallel.LayeredModel, or set "
            "pp to 1"
        )
    raise ValueError(
        f"{type(model).__name__} can't be cut into pipeline stages: {reasons[0][:600]}; give "
        "example_inputs= (a mapping of arguments' names) if the forward takes others, or set pp to "
        "1"
    )


def _with_lengths(layout: ModelLayout, model: nn.Module) -> ModelLayout:
    """The layout for a model with other numbers of blocks."""
    lists = tuple(
        BlockList(each.name, _length(model, each.name), each.first, each.later)
        for each in layout.lists
    )
    return ModelLayout(lists, layout.slots)


def _length(model: nn.Module, name: str) -> int:
    return len(list(model.get_submodule(name).children()))


def _record(
    model: nn.Module,
    small: nn.Module,
    lists: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[ModelLayout, str | None]:
    """How the model calls its blocks, and what it does around them."""
    blocks = [
        (f"{name}.{key}", block)
        for name in lists
        for key, block in small.get_submodule(name).named_children()
    ]
    calls = _SlotCalls(small, blocks, lists)
    with calls.watching():
        recorded = record_blocks(small, blocks, lambda: small(*args, **kwargs))
    records = recorded.records
    if missing := [name for name, _ in blocks if name not in records]:
        raise ValueError(f"a forward does not call {missing[0]}")
    order = list(dict.fromkeys(name.rpartition(".")[0] for name in records))
    found = []
    for name in order:
        each = [record for key, record in records.items() if key.rpartition(".")[0] == name]
        if any(record != each[-1] for record in each[1:]):
            raise ValueError(
                f"the blocks of {name} do not hand on the same values: "
                f"{[len(record.carried) for record in each]} of them"
            )
        found.append(BlockList(name, _length(model, name), each[0], each[-1]))
    return ModelLayout(tuple(found), calls.slots(order)), recorded.used_around


class _SlotCalls:
    """Notes in which slot each module outside of the blocks is called.

    Args:
        model: A small copy.
        blocks: (name, block) of all its blocks.
        lists: The names of the lists.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], lists: Sequence[str]
    ) -> None:
        self._blocks = list(blocks)
        inside = {id(m) for _, block in blocks for m in block.modules()}
        self._others = [
            (name, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if id(module) not in inside and any(p is not None for p in module._parameters.values())
        ]
        self._lengths = {name: len(model.get_submodule(name)) for name in lists}  # type: ignore[arg-type]
        self._entered: list[str] = []
        self._calls: dict[str, list[str]] = {name: [] for name, _ in self._others}
        self._handles: list[Any] = []

    def watching(self) -> _SlotCalls:
        """A context within which calls are noted."""
        return self

    def __enter__(self) -> None:
        for name, block in self._blocks:
            self._handles.append(
                block.register_forward_pre_hook(lambda _, __, name=name: self._entered.append(name))
            )
        for name, module in self._others:
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda _, __, name=name: self._calls[name].append((self._entered or [""])[-1])
                )
            )

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def slots(self, order: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """By module.

        Args:
            order: The names of the lists, in the order of their calls.

        Raises:
            ValueError: A module with parameters is called between two blocks of one list.
        """
        found: dict[str, tuple[int, ...]] = {}
        for name, calls in self._calls.items():
            slots = set()
            for block in calls:
                if not block:
                    slots.add(0)
                    continue
                of, _, number = block.rpartition(".")
                if int(number) != self._lengths[of] - 1:
                    raise ValueError(
                        f"{name} has parameters and is called between two blocks of {of}"
                    )
                slots.add(order.index(of) + 1)
            found[name] = tuple(sorted(slots))
        return found
