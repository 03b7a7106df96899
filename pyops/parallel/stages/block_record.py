"""What goes from one block of a model to the next, found by running a small copy of it once.

    block 0  ->  hidden_states, position_bias  ->  block 1        these two are carried to the next
                 attention_mask                                   stage; the mask depends on the
                                                                  inputs alone, and each stage
                                                                  computes it again

A value is carried where it has a gradient, or where an earlier block returned it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyEntry, tree_flatten_with_path, tree_map_with_path

__all__ = ["BlockRecord", "RecordedCalls", "record_blocks"]

KeyPath = tuple[KeyEntry, ...]


@dataclass(frozen=True)
class BlockRecord:
    """How one block is called, and what it returns."""

    carried: tuple[KeyPath, ...]
    """Where in (args, kwargs) of a call the values stand that a stage which begins with this block
    is sent, the hidden states first."""

    output: Any
    """What the block returns, with `HIDDEN` in the place of the hidden states and None in that of
    every other value: what a block of another stage returns in its place."""

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The carried values of a call."""
        found = dict(tree_flatten_with_path((args, kwargs))[0])
        return tuple(found[path] for path in self.carried)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with `values` in the place of the carried ones."""
        new = dict(zip(self.carried, values, strict=True))
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_with_path(
            lambda path, value: new.get(path, value), (args, kwargs)
        )
        return replaced

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block of another stage returns: the hidden states as they came."""
        hidden = self.taken(args, kwargs)[0]
        return _with_hidden(self.output, hidden)


@dataclass(frozen=True)
class RecordedCalls:
    """What one run of a model shows."""

    records: dict[str, BlockRecord]
    """By the block's name, in the order of their calls."""

    used_around: str | None
    """What a model does with the hidden states around a block, in words: where they go on past the
    block, a stage that begins with it does not have them. None: nothing of the sort."""


class Marker(Enum):
    """Stands in a template for a value that is filled in later; the same object after pickling."""

    HIDDEN = "hidden states"


HIDDEN = Marker.HIDDEN


def _with_hidden(template: Any, hidden: Tensor) -> Any:
    return tree_map_with_path(lambda _, leaf: hidden if leaf is HIDDEN else leaf, template)


def record_blocks(
    model: nn.Module, blocks: Iterable[tuple[str, nn.Module]], run: Callable[[], Any]
) -> RecordedCalls:
    """Run the model once and see how its blocks are called.

    Args:
        model: A small copy of the model. Its parameters are made to require gradients.
        blocks: (name, block) of those that are watched.
        run: Calls the model.

    Returns:
        The calls.

    Raises:
        ValueError: A block is called twice, or takes and returns no hidden states.
    """
    calls = _BlockCalls()
    handles = []
    for name, block in blocks:
        handles.append(
            block.register_forward_pre_hook(partial(calls.before, name), with_kwargs=True)
        )
        handles.append(block.register_forward_hook(partial(calls.after, name), with_kwargs=True))
    try:
        model.requires_grad_(True)
        with torch.enable_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return RecordedCalls(calls.records, calls.used_around)


def _reaches(result: Tensor, source: Tensor, *, past: Iterable[Tensor]) -> bool:
    """Whether `result` was computed from `source` by a way that goes through none of `past`."""
    wanted = source.grad_fn
    walls = {tensor.grad_fn for tensor in past if tensor is not source} - {wanted}
    waiting, seen = [result.grad_fn], {None, *walls}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node is wanted:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


class _BlockCalls:
    """Hooks that note the arguments and results of blocks."""

    def __init__(self) -> None:
        self.records: dict[str, BlockRecord] = {}
        self._carried: dict[str, list[tuple[KeyPath, Tensor]]] = {}
        # Kept, so that the id of a result stays its own.
        self._returned: dict[int, Tensor] = {}
        self.used_around: str | None = None
        # Of the last block: its name, and the hidden states that it took.
        self._last: tuple[str, Tensor] | None = None

    def before(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Of a block that is called."""
        if name in self._carried:
            raise ValueError(
                f"block {name} is called twice in one forward: its two calls may belong to two "
                "stages, but its weights can lie in one"
            )
        tensors = [
            (path, leaf)
            for path, leaf in tree_flatten_with_path((args, kwargs))[0]
            if isinstance(leaf, Tensor)
        ]
        self._carried[name] = [
            (path, leaf)
            for path, leaf in tensors
            if leaf.requires_grad or id(leaf) in self._returned
        ]
        if not self._carried[name] and not self._returned:  # the first block may take the batch
            self._carried[name] = [each for each in tensors if each[1].is_floating_point()][:1]
        if not self._carried[name]:
            raise ValueError(f"block {name} takes no hidden states that have a gradient")
        hidden = self._carried[name][0][1]
        if self._last is not None and self.used_around is None:
            before, taken = self._last
            if _reaches(hidden, taken, past=self._returned.values()):
                self.used_around = (
                    f"what {name} takes is computed from what {before} returned and from what "
                    f"{before} was given"
                )
        self._last = name, hidden

    def after(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Of a block that returns."""
        carried = self._carried[name]
        shape, seen = carried[0][1].shape, False

        def template(_: KeyPath, leaf: Any) -> Any:
            nonlocal seen
            if not isinstance(leaf, Tensor):
                return None
            self._returned[id(leaf)] = leaf
            if seen or leaf.shape != shape:
                return None
            seen = True
            return HIDDEN

        made = tree_map_with_path(template, output)
        if not seen:
            raise ValueError(
                f"block {name} takes hidden states of shape {tuple(shape)} and returns none of "
                "that shape"
            )
        self.records[name] = BlockRecord(tuple(path for path, _ in carried), made)
