"""Grids of ranks in two, two and a half and three dimensions, and how they cut a matrix.

    2d    q x q       rank = q i + j            rows of X over i, columns over j
    2.5d  d x q x q   rank = (k q + i) q + j    rows of X over (k, i), columns over j; weights have
                                                a copy on each of the d layers k
    3d    l x l x l   rank = (w l + i) l + o    rows of X over (w, i), columns over o, and behind a
                                                linear layer rows over (w, o), columns over i

    2d, q = 2      X  | X00 X01 |  row 0: ranks 0 1      3d, l = 2         w=0         w=1
                      | X10 X11 |  row 1: ranks 2 3                     i=0  i=1    i=0  i=1
                   W  | W00 W01 |                                  o=0  X00  X10    X20  X30
                      | W10 W11 |                                  o=1  X01  X11    X21  X31

(2d: Xu et al., "Optimus", arXiv:2104.05343; 2.5d: Wang et al., "Tesseract", arXiv:2105.14500; 3d:
Bian et al., arXiv:2105.14450.) `Cuts` says over which axes a tensor between the layers is cut. It
is a value that goes along with the tensor: nothing global is switched from layer to layer.

A width is padded with zeros to a multiple of `Grid.unit`, so that every cut of it is into equal
parts. Rows are cut by whole sequences, so that attention stays on one rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import check_same
from pyops.comm.collectives.transport import ProcessGroupTransport, Transport
from pyops.flat import Cut, Placement
from pyops.mesh import ALONE
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.grids.line import Line, Traffic

__all__ = ["MODES", "Cuts", "Grid", "grid_shape"]

MODES: dict[str, tuple[str, ...]] = {
    "2d": ("row", "column"),
    "2.5d": ("depth", "row", "column"),
    "3d": ("weight", "input", "output"),
}
_DTYPE_BYTES = 32  # a dtype's name, with blanks behind it
_TAG = 0x67726964  # keeps the messages of grids apart from those of other transports of a group


@dataclass(frozen=True)
class Cuts:
    """Over which axes of a grid a matrix between the layers is cut."""

    rows: tuple[str, ...]
    """Axes over which its rows are cut, the last one running fastest."""
    columns: str
    """The axis over which its columns are cut."""

    def __str__(self) -> str:
        return f"rows over {' and '.join(self.rows)}, columns over {self.columns}"


def grid_shape(ranks: int, mode: str, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """The sizes of a grid's axes.

    Args:
        ranks: How many ranks the grid has.
        mode: "2d", "2.5d" or "3d".
        shape: The sizes, (rows, columns), (depth, q, q) or (l, l, l); None: q x q, l x l x l, and
            for "2.5d" the largest q x q of which there are two layers or more.

    Raises:
        ValueError: There is no such grid of so many ranks; the message names the nearest.
    """
    if mode not in MODES:
        raise ValueError(f"grid is {mode!r}; choose one of {', '.join(MODES)}")
    if shape is None:
        return _usual_shape(ranks, mode)
    found = tuple(shape)
    axes = MODES[mode]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in found)
    if len(found) != len(axes) or not whole:
        raise ValueError(
            f"shape is {found}; a {mode} grid has a size of 1 or more for each of {', '.join(axes)}"
        )
    if math.prod(found) != ranks:
        raise ValueError(
            f"shape {found} is a grid of {math.prod(found)} ranks, but there are {ranks}; give "
            f"sizes whose product is {ranks}, or start as many ranks"
        )
    if mode == "3d" and len(set(found)) > 1:
        raise ValueError(f"shape is {found}; a 3d grid is l x l x l, such as {_cubes(ranks)}")
    if mode == "2.5d" and found[1] != found[2]:
        raise ValueError(f"shape is {found}; the layers of a 2.5d grid are q x q")
    return found


def _usual_shape(ranks: int, mode: str) -> tuple[int, ...]:
    if mode == "2d":
        q = math.isqrt(ranks)
        if q * q == ranks:
            return (q, q)
        divisor = next(n for n in range(q, 0, -1) if ranks % n == 0)
        raise ValueError(
            f"{ranks} ranks are no square, which grid = '2d' takes: the nearest are {q * q} and "
            f"{(q + 1) ** 2}; or give shape=({divisor}, {ranks // divisor})"
        )
    if mode == "2.5d":
        fitting = [q for q in range(1, math.isqrt(ranks) + 1) if ranks % (q * q) == 0]
        layered = [q for q in fitting if q > 1 and ranks > q * q]
        if not layered and max(fitting) == 1 and ranks > 1:
            low = max(4, ranks // 4 * 4)
            raise ValueError(
                f"{ranks} ranks are no d x q x q with q of 2 or more, which grid = '2.5d' takes: "
                f"the nearest are {low} and {low + 4}; or give shape=({ranks}, 1, 1)"
            )
        q = max(layered or fitting)
        return (ranks // (q * q), q, q)
    side = round(ranks ** (1 / 3))
    if side**3 != ranks:
        raise ValueError(
            f"{ranks} ranks are no cube, which grid = '3d' takes: the nearest are {_cubes(ranks)}"
        )
    return (side,) * 3


def _cubes(ranks: int) -> str:
    low = max(1, math.floor(ranks ** (1 / 3) + 1e-9))
    return (
        f"{low} x {low} x {low} = {low**3} and {low + 1} x {low + 1} x {low + 1} = {(low + 1) ** 3}"
    )


class Grid:
    """Ranks in two or three dimensions. `Grid.of` makes one over a process group.

    Args:
        transport: Over all ranks of the grid, such as a `VirtualTransport`; None for one rank.
        mode: "2d", "2.5d" or "3d".
        shape: See `grid_shape`.

    Raises:
        ValueError: There is no such grid of so many ranks.
    """

    def __init__(
        self, transport: Transport | None, *, mode: str, shape: Sequence[int] | None = None
    ) -> None:
        self.size = 1 if transport is None else transport.size
        self.rank = 0 if transport is None else transport.rank
        sizes = grid_shape(self.size, mode, shape)
        self.mode, self.shape = mode, sizes
        self.axes = dict(zip(MODES[mode], sizes, strict=True))
        self.traffic = Traffic()
        self._transport = transport
        self._lines: dict[tuple[str, ...], Line] = {}
        self._dtypes: set[torch.dtype] = set()  # that all ranks are known to have
        self.position = self._position(self.rank)
        self.ranks = Ranks(ALONE, self.rank, self.size)
        """Of the grid; their group is that which `of` was given."""

    @classmethod
    def of(
        cls, group: RanksLike = None, *, mode: str = "2d", shape: Sequence[int] | None = None
    ) -> Grid:
        """The grid of the ranks of a group; see `RanksLike`. A collective: every rank of it makes
        the same one.

        Args:
            group: The ranks, numbered with the last axis running fastest.
            mode: "2d", "2.5d" or "3d".
            shape: See `grid_shape`.

        Raises:
            ValueError: On every rank, where there is no such grid of so many ranks, or ranks were
                given others.
        """
        ranks = Ranks.of(group)
        given = {"mode": str(mode), "shape": str(None if shape is None else tuple(shape))}
        check_same(given, group=ranks.group, who="Grid.of")
        grid_shape(ranks.size, mode, shape)
        if ranks.size == 1:
            return cls(None, mode=mode, shape=shape)
        transport = ProcessGroupTransport(ranks.process_group, tag=_TAG)
        found = cls(transport, mode=mode, shape=shape)
        found.ranks = ranks
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        return self  # a copy of a layer communicates with the same ranks

    @property
    def flat(self) -> bool:
        """Whether weights are cut as in two dimensions."""
        return self.mode != "3d"

    @property
    def cuts(self) -> Cuts:
        """Of the tensors between the blocks of a model."""
        if self.mode == "3d":
            return Cuts(("weight", "input"), "output")
        return Cuts(("row",) if self.mode == "2d" else ("depth", "row"), "column")

    def behind(self, cuts: Cuts) -> Cuts:
        """The cuts of what a linear layer makes of a matrix that is cut so: in three dimensions the
        axis of the columns and the last one of the rows change places."""
        self.check(cuts)
        if self.flat:
            return cuts
        return Cuts((cuts.rows[0], cuts.columns), cuts.rows[1])

    def check(self, cuts: Cuts) -> None:
        """ValueError for cuts that a matrix of this grid never has."""
        allowed = [self.cuts]
        if not self.flat:
            allowed.append(Cuts(("weight", "output"), "input"))
        if cuts not in allowed:
            raise ValueError(
                f"a {self.mode} grid has no tensors with {cuts}; it has "
                f"{' or '.join(str(each) for each in allowed)}"
            )

    def check_dtype(self, x: Tensor) -> None:
        """Refuse a dtype that other ranks do not have. A collective where this grid meets the dtype
        for the first time.

        Args:
            x: What this rank multiplies, at the same place as the others.

        Raises:
            ValueError: On every rank, with the dtype of each.
        """
        if self.size == 1 or x.dtype in self._dtypes:
            return
        name = str(x.dtype).ljust(_DTYPE_BYTES).encode()
        own = torch.tensor(list(name), dtype=torch.uint8, device=x.device)
        line = Line(self._transport, list(range(self.size)), tuple(self.axes), Traffic())
        found = [
            bytes(each.tolist()).decode().strip()
            for each in line.gather(own, dim=0).split(_DTYPE_BYTES)
        ]
        if len(set(found)) > 1:
            other = next(rank for rank, each in enumerate(found) if each != found[0])
            raise ValueError(
                f"rank 0 of {self.mode} grid {' x '.join(map(str, self.shape))} multiplies "
                f"matrices of {found[0]}, rank {other} of {found[other]}; give the layers and "
                "their input one dtype on all ranks, and autocast on all or on none"
            )
        self._dtypes.add(x.dtype)

    @property
    def unit(self) -> int:
        """What widths are padded to multiples of."""
        if self.flat:
            return math.lcm(self.axes["row"], self.axes["column"])
        return self.axes["weight"] * self.axes["input"]

    def padded(self, width: int) -> int:
        """The width with its padding."""
        return -(-width // self.unit) * self.unit

    def count(self, axes: Sequence[str]) -> int:
        """Number of ranks along some axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> int:
        """This rank's number along some axes, the last one running fastest."""
        found = 0
        for axis in axes:
            found = found * self.axes[axis] + self.position[axis]
        return found

    def line(self, *axes: str) -> Line:
        """The ranks that differ from this one along these axes alone."""
        if axes not in self._lines:
            spots = itertools.product(*(range(self.axes[axis]) for axis in axes))
            members = [
                self._rank({**self.position, **dict(zip(axes, spot, strict=True))})
                for spot in spots
            ]
            self._lines[axes] = Line(
                self._transport if len(members) > 1 else None, members, axes, self.traffic
            )
        return self._lines[axes]

    def opposite(self) -> int:
        """The number along ("row", "column") of the rank with row and column exchanged."""
        return self.position["column"] * self.axes["column"] + self.position["row"]

    def rows(self, batch: int, cuts: Cuts | None = None) -> tuple[int, int, int]:
        """(start, stop, length): this rank's of so many sequences, and how many its tensor has; the
        last ranks' are padded."""
        cuts = cuts or self.cuts
        parts, index = self.count(cuts.rows), self.index(cuts.rows)
        each = -(-batch // parts)
        return min(batch, index * each), min(batch, (index + 1) * each), each

    def columns(self, width: int, cuts: Cuts | None = None) -> Cut:
        """This rank's columns of so many, as a cut of a tensor's only dimension."""
        axis = (cuts or self.cuts).columns
        return self._cut(0, width, self.position[axis], self.axes[axis])

    def take_rows(self, x: Tensor, cuts: Cuts | None = None, *, fill: float = 0) -> Tensor:
        """This rank's rows of x, which is the same on every rank.

        Args:
            x: [B, ...].
            cuts: Of the result; None: those between blocks.
            fill: What the last ranks' rows are padded with.
        """
        start, stop, each = self.rows(len(x), cuts)
        found = x[start:stop]
        if stop - start == each:
            return found
        more = x.new_full((each - (stop - start), *x.shape[1:]), fill)
        return torch.cat([found, more])

    def take(self, x: Tensor, cuts: Cuts | None = None) -> Tensor:
        """This rank's block of x [B, ..., width], which is the same on every rank."""
        columns = self.columns(x.shape[-1], cuts)
        found = self.take_rows(x, cuts)[..., columns.start : columns.stop]
        return nn.functional.pad(found, (0, columns.length - (columns.stop - columns.start)))

    def whole(self, x: Tensor, *, batch: int, width: int, cuts: Cuts | None = None) -> Tensor:
        """The tensor of which every rank has its block, on every rank; without a gradient."""
        cuts = cuts or self.cuts
        found = self.line(cuts.columns).gather(x.detach().contiguous(), dim=x.dim() - 1)
        found = self.line(*cuts.rows).gather(found.contiguous(), dim=0)
        return found[:batch, ..., :width]

    def weight_place(
        self, out_features: int, in_features: int, cuts: Cuts, *, form: str = "ab", stacked: int = 0
    ) -> Placement:
        """Where this rank's part of a weight [out, in], or [stacked, out, in], lies, of a layer
        whose input is cut so.

                   2d and 2.5d                    3d, cuts (w, p), q
            "ab"   out over column, in over row   out over p, in over (q, w)
            "abt"  out over row, in over column   out over (p, w), in over q

        Args:
            out_features: Rows of the whole weight.
            in_features: Its columns.
            cuts: Of the layer's input.
            form: Of the product; see `product`.
            stacked: How many matrices lie in the weight; 0: one of two dimensions.
        """
        self.check(cuts)
        out: tuple[str, ...] = ("column",)
        inner: tuple[str, ...] = ("row",)
        if self.flat and form == "abt":
            out, inner = inner, out
        elif not self.flat:
            p, q = cuts.rows[1], cuts.columns
            out, inner = ((p,), (q, "weight")) if form == "ab" else ((p, "weight"), (q,))
        lead = (stacked,) if stacked else ()
        return self.place(
            (*lead, out_features, in_features),
            {len(lead): out, len(lead) + 1: inner},
            copied=[axis for axis in ("depth",) if axis in self.axes],
        )

    def width_place(self, width: int, cuts: Cuts, *, stacked: int = 0) -> Placement:
        """Where this rank's part of a bias, or a norm's weight, lies, of the columns of a tensor
        that is cut so; ranks with other rows have copies."""
        self.check(cuts)
        lead = (stacked,) if stacked else ()
        return self.place((*lead, width), {len(lead): (cuts.columns,)}, copied=cuts.rows)

    def place(
        self,
        shape: Sequence[int],
        axes: Mapping[int, Sequence[str]],
        *,
        copied: Sequence[str],
    ) -> Placement:
        """A box of a parameter.

        Args:
            shape: Of the whole.
            axes: {dim: the axes over which it is cut, the last one running fastest}.
            copied: The axes along which other ranks have the same box.
        """
        cuts, index = [], 0
        for dim in sorted(axes):
            part, parts = self.index(axes[dim]), self.count(axes[dim])
            cuts.append(self._cut(dim, shape[dim], part, parts))
            index = index * parts + part
        copies = self.count(copied)
        first = self.index(copied) == 0
        return Placement(tuple(shape), tuple(cuts), copies, first, False, index)

    def _cut(self, dim: int, width: int, part: int, parts: int) -> Cut:
        each = self.padded(width) // parts
        return Cut(dim, min(width, part * each), min(width, (part + 1) * each), each)

    def _position(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis] = divmod(rank, self.axes[axis])
        return {axis: found[axis] for axis in self.axes}

    def _rank(self, position: Mapping[str, int]) -> int:
        found = 0
        for axis, size in self.axes.items():
            found = found * size + position[axis]
        return found

    def __repr__(self) -> str:
        return f"Grid({self.mode}, {' x '.join(map(str, self.shape))}, rank {self.rank})"
