"""Order: which tokens of a row each rank holds, as an index that everything goes by.

    4 ranks, 16 tokens                            causal pairs of each rank
    contiguous   0000 1111 2222 3333              10 26 42 58
    striped      0123 0123 0123 0123              28 32 36 40
    zigzag       00 11 22 33 33 22 11 00          34 34 34 34      rank r: chunks r and 2 N - 1 - r
    balanced     chunks of documents, by their work

    tokens, targets, positions, rows of rotary tables or learned positions: x[:, order.index(rank)]

Targets are shifted before they are shared out: the last token of a chunk predicts the first of one
that another rank holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["ORDERS", "Order", "pad_tokens"]

ORDERS = ("zigzag", "contiguous", "striped", "balanced")
CHUNKS = 8  # of each rank, where documents are balanced
PADDING = -1  # the document of padding


@dataclass(frozen=True, eq=False)
class Order:
    """The places of a row's tokens that each rank holds: equally many on each, every one once.

    Raises:
        ValueError: For places that are not each of 0, 1, 2, ... once; TypeError for another dtype.
    """

    places: Tensor
    """int64 [ranks, tokens of a rank], on the CPU; ascending stretches cost least."""

    def __post_init__(self) -> None:
        places = self.places
        if places.dtype != torch.int64 or places.device.type != "cpu":
            raise TypeError(
                f"places of an Order must be torch.int64 on the CPU, got {places.dtype} on "
                f"{places.device}"
            )
        if places.dim() != 2 or not places.numel():
            raise ValueError(
                f"places of an Order have the shape {list(places.shape)}; give [ranks, tokens of a "
                "rank], of 1 or more each"
            )
        count = torch.bincount(places.flatten().clamp(0), minlength=places.numel())
        if int(places.min()) < 0 or len(count) > places.numel() or not bool((count == 1).all()):
            raise ValueError(
                f"places of an Order must be each of 0 to {places.numel() - 1} once; a rank holds "
                "no token twice, and none is left out"
            )

    @classmethod
    def of(cls, name: str, *, length: int, ranks: int, documents: Tensor | None = None) -> Order:
        """An order by its name.

        Args:
            name: "zigzag": equal work under a causal mask. "contiguous": for attention to all, and
                for windows. "striped". "balanced": equal work where documents stand side by side.
            length: Tokens of a row.
            ranks: That share it.
            documents: int [T] or [B, T], of "balanced": the document of each token, -1 for padding.

        Raises:
            ValueError: For another name, or a length that the order can't share out equally: the
                message says to which one to pad.
        """
        if name not in ORDERS:
            raise ValueError(f"order is {name!r}; choose one of {', '.join(ORDERS)}")
        if ranks < 1 or length < 1:
            raise ValueError(f"{length} tokens over {ranks} ranks; give 1 or more of each")
        wanted = cls.padded_length(name, length=length, ranks=ranks)
        if wanted != length:
            raise ValueError(
                f"{length} tokens can't be shared out {name} over {ranks} ranks: pad the row to "
                f"{wanted} with pad_tokens, {wanted - length} more, targets of -100 and documents "
                "of -1"
            )
        places = torch.arange(length, device="cpu")
        if name == "contiguous":
            return cls(places.view(ranks, -1))
        if name == "striped":
            return cls(places.view(-1, ranks).t().contiguous())
        if name == "zigzag":
            chunks = places.view(2 * ranks, -1)
            return cls(torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim=1))
        if documents is None:
            raise ValueError("order 'balanced' goes by documents; give documents=, int [B, T]")
        return cls(_balanced(documents, length, ranks))

    @staticmethod
    def padded_length(name: str, *, length: int, ranks: int) -> int:
        """The least length, from `length` on, that the order shares out equally.

        Args:
            name: Of the order.
            length: Tokens of a row.
            ranks: That share it.
        """
        unit = ranks * {"zigzag": 2, "balanced": CHUNKS}.get(name, 1)
        return -(-length // unit) * unit

    @property
    def ranks(self) -> int:
        """That share the row."""
        return int(self.places.shape[0])

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.places.numel()

    @property
    def tokens_of_a_rank(self) -> int:
        """How many each rank holds."""
        return int(self.places.shape[1])

    @cached_property
    def mark(self) -> int:
        """A number that differs where the places do."""
        return zlib.crc32(self.places.contiguous().numpy().tobytes())

    def index(self, rank: int, *, device: torch.device | str | None = None) -> Tensor:
        """The places that a rank holds: int64 [tokens of a rank].

        Args:
            rank: Its number among those that share the row.
            device: Where the index is to be; None: on the CPU.
        """
        return self.places[rank].to(device or "cpu")

    def shard(self, x: Tensor, *, rank: int, dim: int = 1) -> Tensor:
        """A rank's tokens of x.

        Args:
            x: Of the whole row; `length` along `dim`.
            rank: Which rank's.
            dim: That of the tokens.

        Raises:
            ValueError: x has another number of tokens.
        """
        if x.shape[dim] != self.length:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim}, and the order is for "
                f"{self.length}; give the whole row"
            )
        return x.index_select(dim, self.index(rank, device=x.device))

    def unshard(self, parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
        """The whole row.

        Args:
            parts: Each rank's, in rank order.
            dim: That of the tokens.

        Raises:
            ValueError: There are more or fewer parts than ranks, or of another number of tokens.
        """
        sizes = [part.shape[dim] for part in parts]
        if sizes != [self.tokens_of_a_rank] * self.ranks:
            raise ValueError(
                f"parts of {sizes} tokens; the order has {self.ranks} ranks of "
                f"{self.tokens_of_a_rank}"
            )
        joined = torch.cat(list(parts), dim)
        inverse = self.places.flatten().argsort()
        return joined.index_select(dim, inverse.to(joined.device))

    def causal_pairs(self, documents: Tensor | None = None) -> list[int]:
        """How many pairs of a query and a key that it sees each rank computes, under a causal mask.

        Args:
            documents: int [T] or [B, T]: a query sees its own document; None: the row is one.
        """
        if documents is None:
            documents = torch.zeros(self.length, dtype=torch.int64, device="cpu")
        work = _seen(documents)
        return [int(work[places].sum()) for places in self.places]


def pad_tokens(x: Tensor, length: int, *, value: float, dim: int = 1) -> Tensor:
    """x with further tokens at the end.

    Args:
        x: Of any dtype.
        length: How many tokens it is to have.
        value: Of the further ones: -100 for targets, -1 for documents, any for tokens.
        dim: That of the tokens.

    Raises:
        ValueError: x has more already.
    """
    more = length - x.shape[dim]
    if more < 0:
        raise ValueError(f"x has {x.shape[dim]} tokens, more than {length}; give a larger length")
    if not more:
        return x
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, x.new_full(shape, value)], dim)


def _seen(documents: Tensor) -> Tensor:
    """int64 [T]: how many keys the query at each place sees, causally, over all rows."""
    rows = documents.reshape(-1, documents.shape[-1]).cpu()
    places = torch.arange(rows.shape[1], device="cpu").expand(rows.shape)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    first = torch.where(begins, places, 0).cummax(1).values
    return torch.where(rows == PADDING, 0, places - first + 1).sum(0)


def _balanced(documents: Tensor, length: int, ranks: int) -> Tensor:
    """Chunks of equal length, the one with the most work first to the rank that has the least and
    still has room."""
    if documents.shape[-1] != length:
        raise ValueError(
            f"documents are of {documents.shape[-1]} tokens, and the order is for {length}; give "
            "those of the whole row"
        )
    work = _seen(documents).view(ranks * CHUNKS, -1)
    load, chosen = [0] * ranks, [[] for _ in range(ranks)]  # type: list[int], list[list[int]]
    weights = work.sum(1).tolist()
    for chunk in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min((r for r in range(ranks) if len(chosen[r]) < CHUNKS), key=lambda r: (load[r], r))
        chosen[rank].append(chunk)
        load[rank] += weights[chunk]
    places = torch.arange(length, device="cpu").view(ranks * CHUNKS, -1)
    return torch.stack([places[sorted(chunks)].flatten() for chunks in chosen])
