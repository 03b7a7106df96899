"""How a parameter of ours is made of the tensors of a Hugging Face file: which box of it is which
box of which tensor.

                                                 pyops                  the file
    Same("wte.weight")                           [V, D]                 the same
    Transposed("mlp.c_fc.weight")                [F, D]                 [D, F]
    Stacked("gate.weight", "up.weight")          [2, F, D]              [F, D] and [F, D]
    Grouped("q.weight", "k.weight", "v.weight")  | q q k v | q q k v |  q q q q | k k | v v, apart
    Grouped("c_attn.weight", joined=True)        | q q k v | q q k v |  q q q q | k k | v v

A packing is applied to a whole parameter, never to a rank's part: what the rank holds is a box of
it (`Placement`), and meets the boxes listed here. Reading and writing both go by this list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyops.flat import Box

__all__ = [
    "AttentionShape",
    "Grouped",
    "Packing",
    "Piece",
    "Same",
    "Source",
    "Stacked",
    "Transposed",
    "pack",
    "unpack",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionShape:
    """Of an attention: num_heads H queries and num_kv_heads G keys and values, each `width` K
    wide."""

    num_heads: int
    num_kv_heads: int
    width: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """How many rows a group has of queries, keys and values."""
        return self.num_heads // self.num_kv_heads * self.width, self.width, self.width


@dataclass(frozen=True)
class Piece:
    """Box `at` of our whole parameter lies at `offset` of a tensor of the file, turned to our
    orientation."""

    at: Box
    offset: Shape


@dataclass(frozen=True)
class Source:
    """A tensor of the file, the shape that it must have there, and the pieces of our parameter that
    it holds.

    Attributes:
        transposed: The file has its two last dims in the other order. The dims that it lacks, or
            has more, are leading ones of size 1.
        trailing: How many dims of size 1 the file has more behind, as a 1 x 1 convolution has.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    transposed: bool = False
    trailing: int = 0


class Packing(ABC):
    """Of one parameter. `sources` says what a parameter of `shape` is made of."""

    @abstractmethod
    def sources(self, shape: Shape, heads: AttentionShape | None = None) -> list[Source]:
        """The file's tensors that a whole parameter of this shape is made of.

        Args:
            heads: For `Grouped`.
        """


@dataclass(frozen=True)
class Same(Packing):
    """One tensor, as it is.

    Attributes:
        leading: Dims of size 1 that the file has in front.
        trailing: Dims of size 1 that the file has behind.
    """

    name: str
    leading: int = 0
    trailing: int = 0

    def sources(self, shape: Shape, heads: AttentionShape | None = None) -> list[Source]:
        zeros = (0,) * len(shape)
        there = (1,) * self.leading + shape + (1,) * self.trailing
        return [Source(self.name, there, (Piece((zeros, shape), zeros),), trailing=self.trailing)]


@dataclass(frozen=True)
class Transposed(Packing):
    """One matrix, [in, out] in the file."""

    name: str

    def sources(self, shape: Shape, heads: AttentionShape | None = None) -> list[Source]:
        return [Source(self.name, shape[::-1], (Piece(((0, 0), shape), (0, 0)),), transposed=True)]


class Stacked(Packing):
    """Several tensors of one shape, in the order of our leading dim."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def sources(self, shape: Shape, heads: AttentionShape | None = None) -> list[Source]:
        each, zeros = shape[1:], (0,) * len(shape)
        return [
            Source(name, each, (Piece(((i, *zeros[1:]), (1, *each)), zeros),))
            for i, name in enumerate(self.names)
        ]


class Grouped(Packing):
    """Queries, keys and values, or keys and values alone: matrices or biases, dealt out by heads to
    the groups of one of ours.

    Args:
        joined: The file has them one behind the other in one tensor.
        transposed: It has matrices as [in, out].
    """

    def __init__(self, *names: str, joined: bool = False, transposed: bool = False) -> None:
        self.names, self.joined, self.transposed = names, joined, transposed

    def sources(self, shape: Shape, heads: AttentionShape | None = None) -> list[Source]:
        assert heads is not None
        rows = heads.rows if self.joined else heads.rows[-len(self.names) :]
        lengths = [heads.num_kv_heads * n for n in rows]
        assert shape[0] == sum(lengths), (self.names, shape, heads)
        dealt = []
        for i, n in enumerate(rows):
            first, before = sum(lengths[:i]) if self.joined else 0, sum(rows[:i])
            dealt.append(
                [
                    self._piece(shape, n, g * sum(rows) + before, first + g * n)
                    for g in range(heads.num_kv_heads)
                ]
            )
        if self.joined:
            return [
                self._source(self.names[0], shape, [piece for pieces in dealt for piece in pieces])
            ]
        return [
            self._source(name, (length, *shape[1:]), pieces)
            for name, length, pieces in zip(self.names, lengths, dealt, strict=True)
        ]

    def _piece(self, shape: Shape, rows: int, start: int, start_in_file: int) -> Piece:
        rest = (0,) * (len(shape) - 1)
        return Piece(((start, *rest), (rows, *shape[1:])), (start_in_file, *rest))

    def _source(self, name: str, shape: Shape, pieces: Sequence[Piece]) -> Source:
        transposed = self.transposed and len(shape) == 2
        return Source(name, shape[::-1] if transposed else shape, tuple(pieces), transposed)


def unpack(whole: Tensor, source: Source) -> Tensor:
    """The file's tensor from our whole parameter.

    Args:
        whole: Ours.
        source: Of the file.
    """
    turned = source.shape[::-1] if source.transposed else source.shape
    found = whole.new_empty(turned)
    for ours, there in _boxes(source):
        found[there] = whole[ours].reshape(found[there].shape)
    return found.T if source.transposed else found


def pack(tensor: Tensor, source: Source, whole: Tensor) -> None:
    """Write a tensor of the file to its places in our whole parameter.

    Args:
        tensor: The file's.
        source: Of the file.
        whole: Ours.
    """
    turned = tensor.T if source.transposed else tensor
    for ours, there in _boxes(source):
        whole[ours] = turned[there].reshape(whole[ours].shape)


def _boxes(source: Source) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Of each piece, where it is in our parameter and in the file's tensor as we turn it."""
    for piece in source.pieces:
        offset, size = piece.at
        surplus = len(size) - len(source.shape)
        start = piece.offset[surplus:] if surplus >= 0 else (0,) * -surplus + piece.offset
        there = tuple(size[surplus:]) if surplus >= 0 else (1,) * -surplus + tuple(size)
        yield _slices(offset, size), _slices(start, there)


def _slices(offset: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
