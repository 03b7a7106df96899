"""PowerSGD: each gradient matrix as a product of two thin ones that all ranks share, by two exact
collectives.

    U = gradient + error             [n, m], each rank's own; M is the mean of U over the ranks
    P = mean of U Q                  [n, r]     collective 1, with the tensors too small to gain
    P = orthonormal(P)
    Q = mean of U^T P                [m, r]     collective 2
    out = P Q^T,  error = U - out    out is M projected onto the columns of P

The Q of one step, its columns scaled to length 1, is where the next begins: one power iteration a
step, so P turns to the strongest directions of the gradients. Vogels, Karimireddy, Jaggi, PowerSGD,
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyops.comm.collectives import two_shot
from pyops.comm.collectives.transport import Transport
from pyops.comm.compression.codec import Codec, check_whole
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.power_sgd.low_rank import (
    Family,
    families,
    fresh_basis,
    orthonormal,
    pieces,
    product,
    squared_lengths,
    unit_columns,
    whole_batches,
)
from pyops.flat import FlatLayout, Shard

__all__ = ["PowerSGD", "PowerSGDMemory", "low_rank_mean"]

SEGMENT = 1 << 18  # elements of a slice of the exact collectives
SMALL = 1 << 12  # elements up to which everyone sends all of them to everyone


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Matrices as products of rank `rank`; a tensor [n, ...] is the matrix [n, numel / n].

    Vectors, and matrices that would not shrink by half, travel in fp32, exactly. A matrix costs
    rank * (n + m) numbers in place of n * m. It needs the shapes of the tensors, so
    `compressed_all_reduce` takes it with error=PowerSGDMemory(layout, ...) only, as DataParallel
    and ddp_hook do; there is no payload of a piece, nor a compressed reduce-scatter or all-gather.

    Attributes:
        seed: Of the first directions.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.rank, name="rank", example="4")
        check_whole(self.seed, name="seed", example="0")
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a product of matrices needs rank 1 or more")

    @property
    def name(self) -> str:
        return f"power_sgd(rank={self.rank}, seed={self.seed})"

    @property
    def memory(self) -> type[PowerSGDMemory]:
        """The class that keeps the factors and what was left out of each matrix."""
        return PowerSGDMemory

    def all_reduce(self, flat: Tensor, *, error: Any, transport: Transport, scale: float) -> None:
        """flat = scale * (sum over ranks of flat + error) at low rank, in place.

        Args:
            flat: The tensor, flat and contiguous.
            error: The memory of this tensor, a PowerSGDMemory.
            transport: What carries the messages.
            scale: A factor of the sum.

        Raises:
            ValueError: Without a memory that fits.
        """
        self.check_memory(error, numel=flat.numel(), rank=transport.rank, size=transport.size)

        def exchange(x: Tensor) -> None:
            if (
                transport.size == 2 or x.numel() <= SMALL
            ):  # as many bytes, or so few that the messages decide
                two_shot.sum_of_whole(
                    x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size
                )
            else:
                two_shot.all_reduce(
                    x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size
                )

        low_rank_mean(flat, error, exchange=exchange, factor=scale * transport.size)

    def check_memory(self, error: Any, *, numel: int, rank: int, size: int) -> None:
        """ValueError unless `error` is a memory of this codec and rank for so many numbers.

        Args:
            error: What was given as memory.
            numel: Elements of the tensor.
            rank: This rank.
            size: The number of ranks.
        """
        if not isinstance(error, PowerSGDMemory):
            raise ValueError(
                f"{self.name} needs the shapes of the tensors; pass "
                "error=PowerSGDMemory(layout, codec=codec, ...)"
            )
        if (error.codec, error.rank, error.size, error.numel) != (self, rank, size, numel):
            raise ValueError(
                f"error is for {error.numel} elements with {error.codec.name} on rank "
                f"{error.rank} of {error.size}; this call "
                f"has {numel} with {self.name} on rank {rank} of {size}"
            )

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self.name} writes whole matrices, not pieces; use it with "
            "compressed_all_reduce and a PowerSGDMemory"
        )

    def payload_bytes(self, n: int) -> int:
        self._refuse()

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        scale: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        self._refuse()

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        self._refuse()

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        self._refuse()


class PowerSGDMemory:
    """What PowerSGD keeps from one step to the next for the tensors of `layout`, one rank of
    `size`.

    worker: this rank's error, fp32 [layout.numel]; zero where tensors travel exactly. bases: Q of
    each family of matrices, [members, r, m], the same bits on all ranks. overflowed: fp32 [1], 1
    once a sum was not finite.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        codec: PowerSGD,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.numel, self.codec, self.rank, self.size = (
            layout,
            layout.numel,
            codec,
            rank,
            size,
        )
        self.families, self.whole = families(layout, rank=codec.rank)
        self.batches = [whole_batches(layout, family) for family in self.families]
        self.pieces = [
            [piece for batch in batches for piece in pieces(batch)] for batches in self.batches
        ]
        self.scratch = max(
            (p.numel for cut in self.pieces for p in cut if p.family.rank > 1), default=0
        )
        self._cuts, self._exact = _cuts([layout.slice_at(i) for i in self.whole], layout.numel)
        self.worker = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.overflowed = torch.zeros(1, dtype=torch.float32, device=device)
        self.bases = [self._fresh(family) for family in self.families]
        self.rounds = 0
        self.starts = [0] * (
            size + 1
        )  # no rank keeps errors for all, as the owners of an elementwise codec's chunks do
        self.server = self.worker[:0]

    def _fresh(self, family: Family) -> Tensor:
        return fresh_basis(family, self.layout.names, seed=self.codec.seed).to(self.worker.device)

    def zero_(self) -> None:
        """Forget the errors and the directions."""
        self.worker.zero_()
        self.bases = [self._fresh(family) for family in self.families]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "rounds", "worker": {name: Shard of [size, *shape]}, "basis": {name: Q [r,
        m]}}."""
        worker = {
            name: Shard(
                (self.size, *shape), (self.rank, *(0 for _ in shape)), self._part(i).view(1, *shape)
            )
            for i, (name, shape) in enumerate(
                zip(self.layout.names, self.layout.shapes, strict=True)
            )
        }
        basis = {
            self.layout.names[i]: q
            for family, batch in zip(self.families, self.bases, strict=True)
            for i, q in zip(family.members, batch, strict=True)
        }
        return {"codec": self.codec.name, "rounds": self.rounds, "worker": worker, "basis": basis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or the whole tensors that a checkpoint has in place of
        shards.

        From another number of ranks every rank gets the mean of the errors.

        Raises:
            ValueError: Before anything is changed, for another codec, other tensors, or rows of
                another number of ranks of which some are missing.
        """
        errors = ErrorFeedback(
            self.layout, codec=self.codec, rank=self.rank, size=self.size, device=self.worker.device
        )
        errors.load_state_dict(
            {
                **state,
                "server": {name: self.worker.new_zeros(numel) for name, numel in self._sizes()},
            }
        )
        bases = [
            torch.stack([self._basis(state, i, family) for i in family.members])
            for family in self.families
        ]
        self.worker.copy_(errors.worker)
        self.bases, self.rounds = [b.to(self.worker.device) for b in bases], errors.rounds

    def _sizes(self) -> list[tuple[str, int]]:
        return [
            (name, prod(shape))
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        ]

    def _basis(self, state: Mapping[str, Any], index: int, family: Family) -> Tensor:
        name = self.layout.names[index]
        found = state.get("basis", {}).get(name)
        if not isinstance(found, Tensor) or found.shape != (family.rank, family.columns):
            has = tuple(found.shape) if isinstance(found, Tensor) else "none"
            raise ValueError(
                f"the state's directions for {name!r} are {has}; expected "
                f"({family.rank}, {family.columns})"
            )
        return found

    def take_basis(self, name: str, other: PowerSGDMemory) -> None:
        """Copy a matrix's directions from another memory of it."""
        where, source = self._place(name), other._place(name)
        if where is not None and source is not None:
            self.bases[where[0]][where[1]] = other.bases[source[0]][source[1]]

    def _place(self, name: str) -> tuple[int, int] | None:
        index = self.layout.names.index(name)
        return next(
            (
                (i, f.members.index(index))
                for i, f in enumerate(self.families)
                if index in f.members
            ),
            None,
        )

    def _part(self, index: int) -> Tensor:
        return self.worker[self.layout.slice_at(index)]

    def exact_parts(self, flat: Tensor) -> list[Tensor]:
        """Views of what travels as it is; tensors that lie side by side are one."""
        parts = flat.split_with_sizes(self._cuts) if self._exact else []
        return [parts[i] for i in self._exact]


def _cuts(places: Sequence[slice], numel: int) -> tuple[list[int], list[int]]:
    """(lengths that cut `numel` elements at the ends of the places, numbers of the cuts that are
    places)"""
    spans: list[list[int]] = []
    for place in sorted((p.start, p.stop) for p in places if p.stop > p.start):
        if spans and spans[-1][1] == place[0]:
            spans[-1][1] = place[1]
        else:
            spans.append(list(place))
    lengths, wanted, at = [], [], 0
    for start, stop in spans:
        if start > at:
            lengths.append(start - at)
        wanted.append(len(lengths))
        lengths.append(stop - start)
        at = stop
    return [*lengths, *([numel - at] if numel > at else [])], wanted


def low_rank_mean(
    flat: Tensor, memory: PowerSGDMemory, *, exchange: Callable[[Tensor], None], factor: float = 1.0
) -> None:
    """flat = factor * (mean over ranks of flat + error, at low rank), in place; the error becomes
    what was left out.

    Args:
        flat: Laid out as memory.layout; padding stays as it is. exchange(x): x = mean of x over the
            ranks, fp32, the same bits everywhere. A matrix whose P or Q is not finite on any rank
            becomes nan, and its error and directions stay as they were.
    """
    if flat.dtype != torch.float32:
        wide = flat.float()
        low_rank_mean(wide, memory, exchange=exchange, factor=factor)
        flat.copy_(wide)
        return
    families, exact = memory.families, memory.exact_parts(flat)
    lengths = [part.numel() for part in exact]
    message, (mean, *ps) = _message(
        flat, [(sum(lengths),), *((len(f.members), f.rank, f.rows) for f in families)]
    )
    if exact:
        torch.cat(exact, out=mean)
    for q, p, cut in zip(memory.bases, ps, memory.pieces, strict=True):
        for piece in cut:
            u = piece.matrices(flat).add_(
                piece.matrices(memory.worker)
            )  # the gradients' own memory, in place
            torch.bmm(piece.right(q), u.transpose(1, 2), out=piece.left(p))
    if message.numel():
        exchange(message)
    # What is not finite here makes all of its matrix's Q nan.
    ps = [orthonormal(p) for p in ps]
    message_q, qs = _message(flat, [(len(f.members), f.rank, f.columns) for f in families])
    for p, q, batches in zip(ps, qs, memory.batches, strict=True):
        for batch in batches:
            torch.bmm(batch.left(p), batch.matrices(flat), out=batch.right(q))
    if families:
        exchange(message_q)
    if exact:
        if not bool(mean.isfinite().all()):
            memory.overflowed.fill_(1.0)
        torch._foreach_copy_(exact, mean.mul_(factor).split(lengths))
    _put_products(flat, memory, ps, qs, scratch=message.new_empty(memory.scratch), factor=factor)


def _put_products(
    flat: Tensor,
    memory: PowerSGDMemory,
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
    *,
    scratch: Tensor,
    factor: float,
) -> None:
    """flat = factor * P Q^T of every family; errors become what that leaves out, and Q the next
    directions."""
    squares = [squared_lengths(q) for q in qs]
    fine = bool(torch.cat([each.flatten() for each in squares]).isfinite().all()) if qs else True
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        rescued = [] if fine else _not_finite(flat, memory, i, squares[i])
        for piece in memory.pieces[i]:
            u, error = piece.matrices(flat), piece.matrices(memory.worker)
            _put_product(u, error, piece.left(p), piece.right(q), scratch=scratch, factor=factor)
        basis = unit_columns(q, fresh=memory.bases[i], squares=squares[i])
        for member, u, error, before in rescued:
            u.fill_(torch.nan)
            error.copy_(before)
            basis[member] = memory.bases[i][member]
            memory.overflowed.fill_(1.0)
        memory.bases[i] = basis


def _not_finite(
    flat: Tensor, memory: PowerSGDMemory, number: int, squares: Tensor
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Of each matrix of a family whose P or Q is not finite: its number there, U, error, and a copy
    of the error."""
    ruined = (~squares.isfinite()).any(dim=1).nonzero().flatten().tolist()
    places = [(i, memory.layout.slice_at(memory.families[number].members[i])) for i in ruined]
    return [
        (i, flat[place], memory.worker[place], memory.worker[place].clone()) for i, place in places
    ]


def _put_product(
    u: Tensor, error: Tensor, p: Tensor, q: Tensor, *, scratch: Tensor, factor: float
) -> None:
    """error = U - P Q^T and U = factor * P Q^T, of a piece: U [k, n, m], P [k, r, n], Q [k, r,
    m]."""
    if p.shape[1] == 1:  # the product is as fast made twice as kept
        column = p.transpose(1, 2)
        torch.addcmul(u, column, q, value=-1.0, out=error)
        torch.mul(column, q if factor == 1.0 else q * factor, out=u)
    else:
        mean = product(p, q, out=scratch[: u.numel()].view(u.shape))
        torch.sub(u, mean, out=error)
        torch.mul(mean, factor, out=u)


def _message(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """One fp32 tensor for an exchange, and its parts of these shapes as views."""
    sizes = [prod(shape) for shape in shapes]
    message = torch.empty(sum(sizes), dtype=torch.float32, device=like.device)
    return message, [
        part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)
    ] if sizes else []
