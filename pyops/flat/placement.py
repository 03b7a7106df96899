"""Placement: where one rank's tensor stands in a parameter that a tensor-parallel group shares.

    whole [7, 4], cut along dim 0 over 3 ranks        rank 0   rows 0 1 2
                                                      rank 1   rows 3 4 5
                                                      rank 2   row  6 and two rows of padding

Every module that holds such a parameter says so in its attribute `placements`, {parameter's name in
the module: Placement}; a parameter without an entry is whole and the same on every rank.
Initialisation, the sum of partial gradients, the gradient's norm, checkpoints and weight import all
go by this one record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from pyops.flat.shard import Box, Shard, Shards, boxes_of_range, meeting
from pyops.protocols import HasPlacements

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """What a rank holds of a parameter of `global_shape`.

    Attributes:
        dim: Along which it is cut; None: every rank holds all of it.
        start, stop: The elements of `dim` that this rank holds.
        length: How many its tensor has along `dim`; those beyond stop - start are padding, zero for
            ever.
        copies: On how many ranks of the group the same elements are.
        first: Whether this is the first of those.
        partial: The gradient that backward leaves on a rank is a part of the whole one; the copies'
            parts must be summed.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    length: int = 0
    copies: int = 1
    first: bool = True
    partial: bool = False

    @classmethod
    def whole(
        cls, shape: Sequence[int], *, rank: int, ranks: int, partial: bool = False
    ) -> Placement:
        """The same on every rank.

        Args:
            partial: Where each rank's gradient comes from its own tokens only.
        """
        return cls(tuple(shape), copies=ranks, first=rank == 0, partial=partial and ranks > 1)

    @classmethod
    def cut(
        cls,
        shape: Sequence[int],
        *,
        dim: int,
        rank: int,
        ranks: int,
        unit: int = 1,
        copies: int = 1,
    ) -> Placement:
        """An equal part for each rank, in whole units of `unit` elements; the last ranks' are
        padded where it does not divide.

        Args:
            copies: That many neighbouring ranks hold the same part, and each only a part of its
                gradient.

        Raises:
            ValueError: When `dim` is not made of whole units, or `ranks` not of whole copies.
        """
        units, rest = divmod(shape[dim], unit)
        if rest or ranks % copies:
            raise ValueError(
                f"dim {dim} of {tuple(shape)} must be a multiple of {unit}, and {ranks} "
                f"ranks one of {copies} copies"
            )
        parts, index = ranks // copies, rank // copies
        each = -(-units // parts)
        start, stop = (min(n * each, units) * unit for n in (index, index + 1))
        return cls(
            tuple(shape), dim, start, stop, each * unit, copies, rank % copies == 0, copies > 1
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor, padding included."""
        if self.dim is None:
            return self.global_shape
        return (*self.global_shape[: self.dim], self.length, *self.global_shape[self.dim + 1 :])

    @property
    def offset(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole, a number for each dim."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.global_shape)))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this rank's part without the padding."""
        return tuple(
            self.stop - self.start if d == self.dim else n for d, n in enumerate(self.global_shape)
        )

    def part(self, local: Tensor) -> Tensor:
        """A view of this rank's tensor without the padding."""
        return local if self.dim is None else local.narrow(self.dim, 0, self.stop - self.start)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tensor, cut from the whole one and padded with zeros; a new tensor."""
        if tuple(whole.shape) != self.global_shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} is not the whole of {self.global_shape}"
            )
        local = whole.new_zeros(self.local_shape)
        found = (
            whole
            if self.dim is None
            else whole.narrow(self.dim, self.start, self.stop - self.start)
        )
        self.part(local).copy_(found.detach())
        return local

    def shards(self, elements: Tensor, *, start: int = 0, copy: bool = False) -> Shards:
        """Elements [start, start + n) of this rank's flattened tensor as parts of the whole, for a
        checkpoint: views.

        Args:
            copy: Another rank of the same place among the group's has them too, and writes them.
        """
        mine: Box = ((0,) * len(self.global_shape), self.size)
        found, at = [], 0
        for box in boxes_of_range(self.local_shape, start, start + elements.numel()):
            piece = elements[at : at + prod(box[1])].view(box[1])
            at += piece.numel()
            inner = meeting(mine, box)
            if inner is None:
                continue  # padding
            where = tuple(
                slice(low - o, low - o + n)
                for low, o, n in zip(inner[0], box[0], inner[1], strict=True)
            )
            offset = tuple(low + o for low, o in zip(inner[0], self.offset, strict=True))
            found.append(
                Shard(self.global_shape, offset, piece[where], copy=copy or not self.first)
            )
        return Shards(tuple(found))

    @staticmethod
    def of(model: nn.Module) -> dict[str, Placement]:
        """{qualified name: Placement} of the model's parameters that have one; a shared parameter
        under its first name."""
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        found: dict[str, Placement] = {}
        for prefix, module in model.named_modules():
            placements = module.placements if isinstance(module, HasPlacements) else {}
            for name, placement in placements.items():
                parameter = module.get_parameter(name)
                if tuple(parameter.shape) != placement.local_shape and parameter.numel():
                    raise ValueError(
                        f"{prefix}.{name} is of shape {tuple(parameter.shape)}, its "
                        f"placement is for {placement.local_shape}"
                    )
                found.setdefault(first[id(parameter)], placement)
        return found
