"""Placement: where one rank's tensor stands in a parameter that a group of ranks shares.

    whole [7, 4], cut along dim 0 over 3 ranks        rank 0   rows 0 1 2
                                                      rank 1   rows 3 4 5
                                                      rank 2   row  6 and two rows of padding

    whole [4, 6], cut along both over 2 x 2 ranks     rank 0 | rank 1     a rank holds a box: the
                                                      -------+-------     product of one range for
                                                      rank 2 | rank 3     each dim that is cut

Every module that holds such a parameter says so in its attribute `placements`, {parameter's name in
the module: Placement}; a parameter without an entry is whole and the same on every rank.
Initialisation, the sum of partial gradients, the gradient's norm, checkpoints and weight import all
go by this one record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat.shard import Box, Shard, Shards, boxes_of_range, meeting, whole_of_boxes
from pyops.protocols import HasPlacements

__all__ = ["Cut", "Placement"]


@dataclass(frozen=True)
class Cut:
    """A range of one dimension of a tensor.

    Attributes:
        dim: Which dimension.
        start, stop: The elements of it that the rank holds.
        length: How many its tensor has; those beyond stop - start are padding, zero for ever.
    """

    dim: int
    start: int
    stop: int
    length: int

    @classmethod
    def equal(cls, shape: Sequence[int], *, dim: int, rank: int, ranks: int, unit: int = 1) -> Cut:
        """An equal part for each rank, in whole units; the last ranks' are padded where it does not
        divide.

        Args:
            shape: Of the whole tensor.
            dim: Which dimension is cut.
            rank, ranks: Which part of how many.
            unit: Elements that are not cut apart.

        Raises:
            ValueError: When `dim` is not made of whole units, or there is no such part.
        """
        if not 0 <= dim < len(shape):
            raise ValueError(f"dim {dim} is none of {tuple(shape)}; give 0 to {len(shape) - 1}")
        if not 0 <= rank < ranks:
            raise ValueError(f"part {rank} of {ranks}: give a number from 0 to {ranks - 1}")
        units, rest = divmod(shape[dim], unit)
        if rest:
            raise ValueError(f"dim {dim} of {tuple(shape)} must be a multiple of {unit}")
        each = -(-units // ranks)
        start, stop = (min(n * each, units) * unit for n in (rank, rank + 1))
        return cls(dim, start, stop, each * unit)


@dataclass(frozen=True)
class Placement:
    """What a rank holds of a parameter of `global_shape`.

    Attributes:
        cuts: One for each dimension that is cut, in ascending order; of the others a rank holds
            all.
        copies: On how many ranks of the group the same elements are.
        first: Whether this is the first of those.
        partial: The gradient that backward leaves on a rank is a part of the whole one; the copies'
            parts must be summed.
        index: Which of the different parts this is, from 0; the copies' is the same.

    Raises:
        ValueError: For cuts that are not in ascending order, or not within the whole.
    """

    global_shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    copies: int = 1
    first: bool = True
    partial: bool = False
    index: int = 0

    def __post_init__(self) -> None:
        dims = [cut.dim for cut in self.cuts]
        if dims != sorted(set(dims)) or any(not 0 <= d < len(self.global_shape) for d in dims):
            raise ValueError(
                f"cuts along dims {dims} of {self.global_shape}; give one for each dim, in "
                "ascending order"
            )
        for cut in self.cuts:
            inside = 0 <= cut.start <= cut.stop <= self.global_shape[cut.dim]
            if not inside or cut.stop - cut.start > cut.length:
                raise ValueError(f"{cut} does not fit {self.global_shape}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a pickled placement, also one from before there were several cuts."""
        state = dict(state)
        old = [state.pop(name, None) for name in ("dim", "start", "stop", "length")]
        if "cuts" not in state:
            state["cuts"] = () if old[0] is None else (Cut(*old),)  # type: ignore[arg-type]
            # Equal parts of old placements lie one after the other.
            state["index"] = old[1] // max(old[3] or 0, 1) if old[0] is not None else 0
        self.__dict__.update(state)

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
        if ranks % copies or shape[dim] % unit:
            raise ValueError(
                f"dim {dim} of {tuple(shape)} must be a multiple of {unit}, and {ranks} "
                f"ranks one of {copies} copies"
            )
        index = rank // copies
        cut = Cut.equal(shape, dim=dim % len(shape), rank=index, ranks=ranks // copies, unit=unit)
        return cls(tuple(shape), (cut,), copies, rank % copies == 0, copies > 1, index)

    @classmethod
    def grid(
        cls,
        shape: Sequence[int],
        *,
        parts: Mapping[int, tuple[int, int]],
        units: Mapping[int, int] | None = None,
        copy: int = 0,
        copies: int = 1,
        partial: bool = False,
    ) -> Placement:
        """A box of a tensor that is cut along several dims into equal parts.

        Args:
            parts: {dim: (which part, of how many)}; the parts are numbered with the last dim
                running fastest.
            units: {dim: elements that are not cut apart}; 1 where a dim is not named.
            copy: Which of the copies this rank has.
            copies: How many ranks hold the same box.
            partial: Whether each of the copies has only a part of the gradient.

        Raises:
            ValueError: When a dim is not made of whole units, or there is no such part or copy.
        """
        if not 0 <= copy < copies:
            raise ValueError(f"copy {copy} of {copies}: give a number from 0 to {copies - 1}")
        cuts, index = [], 0
        for dim in sorted(parts):
            rank, ranks = parts[dim]
            unit = (units or {}).get(dim, 1)
            cuts.append(Cut.equal(shape, dim=dim, rank=rank, ranks=ranks, unit=unit))
            index = index * ranks + rank
        return cls(tuple(shape), tuple(cuts), copies, copy == 0, partial and copies > 1, index)

    @property
    def only_cut(self) -> Cut | None:
        """The cut of a tensor that is cut along one dim at most; None where it is whole.

        Raises:
            ValueError: It is cut along several.
        """
        if len(self.cuts) > 1:
            raise ValueError(
                f"a tensor of {self.global_shape} is cut along dims "
                f"{[cut.dim for cut in self.cuts]}; what asks for one range of it takes tensors "
                "that are cut along one dim"
            )
        return self.cuts[0] if self.cuts else None

    @property
    def dim(self) -> int | None:
        """Along which it is cut; None: every rank holds all of it. See `only_cut`."""
        return cut.dim if (cut := self.only_cut) else None

    @property
    def start(self) -> int:
        """The first element of `dim` that this rank holds. See `only_cut`."""
        return cut.start if (cut := self.only_cut) else 0

    @property
    def stop(self) -> int:
        """The element of `dim` behind the last one that this rank holds. See `only_cut`."""
        return cut.stop if (cut := self.only_cut) else 0

    @property
    def length(self) -> int:
        """How many elements this rank's tensor has along `dim`, padding included. See
        `only_cut`."""
        return cut.length if (cut := self.only_cut) else 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor, padding included."""
        found = list(self.global_shape)
        for cut in self.cuts:
            found[cut.dim] = cut.length
        return tuple(found)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole, a number for each dim."""
        found = [0] * len(self.global_shape)
        for cut in self.cuts:
            found[cut.dim] = cut.start
        return tuple(found)

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this rank's part without the padding."""
        found = list(self.global_shape)
        for cut in self.cuts:
            found[cut.dim] = cut.stop - cut.start
        return tuple(found)

    @property
    def box(self) -> Box:
        """This rank's part of the whole."""
        return self.offset, self.size

    def part(self, local: Tensor) -> Tensor:
        """A view of this rank's tensor without the padding."""
        for cut in self.cuts:
            local = local.narrow(cut.dim, 0, cut.stop - cut.start)
        return local

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """A view of what this rank holds of the whole tensor.

        Raises:
            ValueError: It is of another shape.
        """
        if tuple(whole.shape) != self.global_shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} is not the whole of {self.global_shape}"
            )
        for cut in self.cuts:
            whole = whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tensor, cut from the whole one and padded with zeros; a new tensor."""
        found = self.part_of_whole(whole)
        local = whole.new_zeros(self.local_shape)
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

    def joined(self, parts: Sequence[Tensor], places: Sequence[Placement] | None = None) -> Tensor:
        """The whole parameter.

        Args:
            parts: Each rank's tensor, padding included, in rank order.
            places: Each rank's placement; None for a parameter of one cut whose equal parts lie in
                rank order.

        Raises:
            ValueError: The parts do not cover the whole once.
        """
        if places is None:
            dim = self.dim
            assert dim is not None
            whole = torch.cat(list(parts[:: self.copies]), dim)
            return whole.narrow(dim, 0, self.global_shape[dim])
        first = [
            (place.box, place.part(part))
            for place, part in zip(places, parts, strict=True)
            if place.first
        ]
        return whole_of_boxes(first, self.global_shape)

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
