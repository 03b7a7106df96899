"""ShardRange: which elements of a parameter a rank has, as checkpoints name them, and how they are
found in a state.

without tensor parallelism   elements [start, stop) of the flattened parameter: one range
with it                      elements [start, stop) of this rank's flattened part of it: boxes of
                             the whole parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.flat import Placement, Shard, ShardElsewhere, Shards, TensorElsewhere

__all__ = ["ShardRange"]


@dataclass(frozen=True)
class ShardRange:
    """Elements [start, stop) of this rank's flattened tensor of `shape`, put into the whole by
    `placement` (None: it is)."""

    shape: tuple[int, ...]
    start: int
    stop: int
    placement: Placement | None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.placement is None else self.placement.global_shape

    def shards(self, elements: Tensor, *, copy: bool = False) -> Shard | Shards:
        """The elements as parts of the whole: views.

        Args:
            copy: Another rank of the data-parallel group writes them.
        """
        if self.placement is None:
            return Shard(self.shape, (self.start,), elements, copy=copy)
        return self.placement.shards(elements, start=self.start, copy=copy)

    def shards_elsewhere(self, there: TensorElsewhere, *, copy: bool = False) -> Shard | Shards:
        """As `shards`, of elements that are read when they are asked for."""
        if self.placement is None:
            return ShardElsewhere(self.shape, (self.start,), there, copy=copy)
        boxes = self.placement.shards(
            torch.empty(self.stop - self.start, dtype=there.dtype, device="meta"), start=self.start
        )
        return Shards(
            tuple(
                ShardElsewhere(
                    box.global_shape, box.offset, _View(there, box.tensor), copy=copy or box.copy
                )
                for box in boxes
            )
        )

    def find(self, value: Any, name: str) -> Callable[[], Tensor]:
        """What gives the elements, out of the whole, a tensor of a checkpoint, or parts; ValueError
        where some are missing.

        What is on disk is compared with its checksum now, and read when it is asked for.
        """
        if hasattr(value, "read_into"):  # a tensor of a checkpoint that is still on disk
            self._check_shape(value.shape, name)
            if self.start < self.stop:
                value.compare(
                    self.shards(
                        torch.empty(self.stop - self.start, dtype=value.dtype, device="cpu")
                    )
                )
            return lambda: self._read(value)
        if isinstance(value, Tensor):
            self._check_shape(value.shape, name)
            local = value if self.placement is None else self.placement.take(value)
            found = local.detach().reshape(-1)[self.start : self.stop]
            return lambda: found
        parts = [value] if isinstance(value, Shard) else list(value)
        mine = (
            self._from_ranges(parts, name)
            if self.placement is None
            else self._from_boxes(parts, name)
        )
        return lambda: mine

    def _read(self, value: Any) -> Tensor:
        mine = torch.zeros(self.stop - self.start, dtype=value.dtype, device="cpu")
        if self.start < self.stop:
            value.read_into(self.shards(mine))
        return mine

    def _check_shape(self, shape: Sequence[int], name: str) -> None:
        if tuple(shape) != self.global_shape:
            raise ValueError(
                f"{name} has shape {tuple(shape)} in the state, here "
                f"{self.global_shape}; it is of another model"
            )

    def _from_ranges(self, parts: Sequence[Shard], name: str) -> Tensor:
        found: list[tuple[int, Tensor]] = []
        for shard in parts:
            if (
                tuple(shard.global_shape) != self.shape
                or len(shard.offset) != 1
                or len(shard.shape) != 1
            ):
                raise ValueError(
                    f"{name} is a shard of {tuple(shard.global_shape)} at {shard.offset} "
                    "in the state; expected ranges of a "
                    f"flattened tensor of {self.shape}: load whole tensors, as "
                    "pyops.checkpoint.load gives them"
                )
            low, high = (
                max(self.start, shard.offset[0]),
                min(self.stop, shard.offset[0] + shard.shape[0]),
            )
            if low < high:
                found.append(
                    (low, shard.tensor.detach()[low - shard.offset[0] : high - shard.offset[0]])
                )
        found.sort(key=lambda pair: pair[0])
        at = self.start
        for low, tensor in found:
            if low != at:
                break
            at += tensor.numel()
        if at != self.stop or sum(t.numel() for _, t in found) != self.stop - self.start:
            raise self._partial(name)
        return (
            found[0][1]
            if len(found) == 1
            else torch.cat([t for _, t in found])
            if found
            else torch.empty(0, device="cpu")
        )

    def _from_boxes(self, parts: Sequence[Shard], name: str) -> Tensor:
        """Of a state that this very layout gave: the boxes are the same."""
        dtype = parts[0].dtype if parts else torch.float32
        mine = torch.zeros(self.stop - self.start, dtype=dtype, device="cpu")
        given = {(tuple(part.offset), part.shape): part for part in parts}
        wanted = self.shards(mine)
        for box in [wanted] if isinstance(wanted, Shard) else wanted:
            part = given.get((tuple(box.offset), box.shape))
            if part is None:
                raise self._partial(name)
            self._check_shape(part.global_shape, name)
            box.tensor.copy_(part.tensor.detach())
        return mine

    def _partial(self, name: str) -> ValueError:
        return ValueError(
            f"the state has only a part of elements {self.start} to {self.stop} of "
            f"{name}, which this rank owns; load whole "
            "tensors, as pyops.checkpoint.load gives them"
        )


class _View:
    """A part of a tensor elsewhere. like: the same view, of a tensor without memory."""

    def __init__(self, there: TensorElsewhere, like: Tensor) -> None:
        self._there, self._like = there, like

    @property
    def shape(self) -> Sequence[int]:
        return self._like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def read(self) -> Tensor:
        return self._there.read().as_strided(
            self._like.shape, self._like.stride(), self._like.storage_offset()
        )
