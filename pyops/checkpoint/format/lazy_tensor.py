"""Tensors of a checkpoint that are still on the disk: read whole, or the part that a rank needs,
however they were stored.

stored | range 0 (file of rank 0) | range 1 (file of rank 1) | range 2 (rank 0) |   or boxes, or
                                                                                    a whole tensor
wanted                     | a range, a box, or all of it |
read                       |bytes|          bytes         |   and the rest of their blocks, to
                                                              compare these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pyops.checkpoint.format.boxes import views
from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.format.tensor_file import TensorFile, bytes_of
from pyops.flat import Box, Shard, ShardElsewhere, Shards, boxes_of_range, meeting
from pyops.ops.memory import memory_problem

__all__ = ["LazyTensor", "Part"]

PIECE = 4 << 20  # bytes that are read at a time where they can't be read to where they belong
Target = Tensor | Shard | Shards


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory: no dimension's stride may be less than what the
    smaller ones take."""
    taken = 1
    for stride, size in sorted(
        (st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    ):
        if stride < taken:
            return tensor.numel() > 0
        taken = stride * (size - 1) + taken
    return False


@dataclass(frozen=True)
class Part:
    """A stored piece of a tensor: `name` in a file that is opened when it is needed; a number of
    `offset` per dim, or one for a range of the flattened tensor."""

    open: Callable[[], TensorFile]
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class LazyTensor:
    """A tensor of a checkpoint. shape, dtype: the whole tensor's.

    Args:
        name: Its path in the state. `explain` makes the CheckpointError of a file that is damaged.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[Part],
        *,
        explain: Callable[[TensorFile, Exception], CheckpointError],
    ) -> None:
        self.name, self.shape, self.dtype, self.parts = name, tuple(shape), dtype, tuple(parts)
        self._explain = explain

    def __repr__(self) -> str:
        return (
            f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"parts={len(self.parts)})"
        )

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def read(self) -> Tensor:
        """The whole tensor, in new CPU memory.

        Raises:
            CheckpointError: For a damaged file.
        """
        self.compare()
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(whole)
        return whole

    def compare(self, target: Target | None = None) -> None:
        """Compare the blocks that hold the target's elements (None: all) with their checksums.
        CheckpointError."""
        if target is None:
            for part in self.parts:
                file = part.open()
                entry = file.entries[part.name]
                with self._explained(file):
                    file.compare(entry.start, entry.stop)
            return
        self.check(target)
        for file, place, shape, box, _ in self._meetings(target):
            low, high = _span(shape, box, self.dtype.itemsize)
            with self._explained(file):
                file.compare(place + low, place + high)

    def check(self, target: Target) -> None:
        """CheckpointError unless the target is this tensor or a part of it, in memory, and of a
        dtype that it can become."""
        for part in target if isinstance(target, Shards) else (target,):
            if isinstance(part, ShardElsewhere):
                raise CheckpointError(
                    f"{self.name} is not in memory here and can't be filled; give what "
                    "load(folder, lazy=True) "
                    "returns to load_state_dict"
                )
            tensor = part.tensor if isinstance(part, Shard) else part
            shape = tuple(part.global_shape) if isinstance(part, Shard) else tuple(part.shape)
            if shape != self.shape:
                raise CheckpointError(
                    f"{self.name} has shape {list(self.shape)} in the checkpoint, "
                    f"{list(shape)} here; build the model that was "
                    "saved"
                )
            if tensor.dtype != self.dtype and not (
                tensor.is_floating_point() and self.dtype.is_floating_point
            ):
                raise CheckpointError(
                    f"{self.name} is {self.dtype} in the checkpoint, {tensor.dtype} "
                    "here; convert it by hand"
                )
            if tensor.is_meta:
                raise CheckpointError(
                    f"{self.name} is on the meta device here; give it memory first "
                    "(to_empty, empty_like)"
                )
            if tensor.layout != torch.strided:
                raise CheckpointError(
                    f"{self.name} has layout {tensor.layout} here; give a dense tensor to fill"
                )
            if (problem := memory_problem(tensor)) is not None:
                raise CheckpointError(f"{self.name} {problem}")
            if _overlaps(tensor):
                raise CheckpointError(
                    f"{self.name} has shape {list(tensor.shape)} and strides "
                    f"{list(tensor.stride())} here, so that elements "
                    "share memory; give a tensor whose elements lie apart, such as clone() of it"
                )

    @torch.no_grad()
    def read_into(self, target: Target) -> None:
        """Fill the tensor, or the part of it that a shard is, on any device; floating dtypes are
        converted.

        Blocks are compared before their bytes are taken, and `compare(target)` compares all before
        any is.
        """
        self.check(target)
        for file, place, shape, box, tensor in self._meetings(target):
            with self._explained(file):
                _read_box(file, place, shape, box, tensor, self.dtype)

    @contextmanager
    def _explained(self, file: TensorFile) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise self._explain(file, error) from None

    def _meetings(
        self, target: Target
    ) -> list[tuple[TensorFile, int, tuple[int, ...], Box, Tensor]]:
        """Where the target meets stored boxes: (file, first byte of the stored box, its shape, box
        within it, view)."""
        some = target.parts if isinstance(target, Shards) else (target,)
        flat = all(len(part.offset) == 1 for part in self.parts) and all(
            part.is_range if isinstance(part, Shard) else part.is_contiguous() for part in some
        )
        wanted = views(target, flat=flat)
        found = []
        for part in self.parts:
            for box, ahead in self._boxes_of(part, flat=flat):
                for wanted_box, view in wanted:
                    if (common := meeting(box, wanted_box)) is None:
                        continue
                    offset, size = common
                    here = view[
                        tuple(
                            slice(o - w, o - w + n)
                            for o, w, n in zip(offset, wanted_box[0], size, strict=True)
                        )
                    ]
                    inner = tuple(o - b for o, b in zip(offset, box[0], strict=True))
                    file = part.open()
                    found.append(
                        (file, file.entries[part.name].start + ahead, box[1], (inner, size), here)
                    )
        return found

    def _boxes_of(self, part: Part, *, flat: bool) -> list[tuple[Box, int]]:
        """The boxes of a part, and how many bytes lie ahead of each in it."""
        if flat or len(part.offset) == len(self.shape):
            return [((part.offset, part.shape), 0)]
        found, ahead = [], 0
        for box in boxes_of_range(self.shape, part.offset[0], part.offset[0] + prod(part.shape)):
            found.append((box, ahead))
            ahead += prod(box[1]) * self.dtype.itemsize
        return found


def _span(shape: tuple[int, ...], box: Box, itemsize: int) -> tuple[int, int]:
    """The bytes from a box's first element to its last, in a row-major tensor of this shape."""
    first = last = 0
    for n, offset, size in zip(shape, *box, strict=True):
        first, last = first * n + offset, last * n + offset + size - 1
    return first * itemsize, (last + 1) * itemsize


def _read_box(
    file: TensorFile,
    place: int,
    shape: tuple[int, ...],
    box: Box,
    target: Tensor,
    dtype: torch.dtype,
) -> None:
    """Read a box of the tensor of `shape` whose first byte is at `place`; a piece at a time where
    it can't be read in place."""
    (low, high), itemsize = _span(shape, box, dtype.itemsize), dtype.itemsize
    in_one_piece = high - low == prod(box[1]) * itemsize
    if (
        in_one_piece
        and target.dtype == dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and not target.is_neg()  # such a view has another tensor's memory
    ):
        file.read(place + low, bytes_of(target))
        return
    if high - low <= PIECE:
        read = torch.empty((high - low) // itemsize, dtype=dtype, device="cpu")
        file.read(place + low, bytes_of(read))
        target.copy_(read.as_strided(box[1], [prod(shape[i + 1 :]) for i in range(len(shape))]))
        return
    row = prod(shape[1:]) * itemsize
    step = max(1, PIECE // row)
    for i in range(0, box[1][0], step):
        n = min(step, box[1][0] - i)
        if n == 1:  # perhaps longer than a piece: go into it
            _read_box(
                file,
                place + (box[0][0] + i) * row,
                shape[1:],
                (box[0][1:], box[1][1:]),
                target[i],
                dtype,
            )
        else:
            _read_box(
                file,
                place,
                shape,
                ((box[0][0] + i, *box[0][1:]), (n, *box[1][1:])),
                target[i : i + n],
                dtype,
            )
