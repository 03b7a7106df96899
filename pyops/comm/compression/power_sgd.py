"""PowerSGD: each gradient matrix as a product of two thin ones that all ranks share, by two exact collectives.

    U = gradient + error                      [n, m], each rank's own; M is the mean of U over the ranks
    P = mean of U Q                           [n, r]     collective 1, with the tensors too small to gain
    P = orthonormal(P)
    Q = mean of U^T P                         [m, r]     collective 2
    out = P Q^T,  error = U - out             out is M projected onto the columns of P

The Q of one step, its columns scaled to length 1, is where the next begins: one power iteration a step, so P turns to the
strongest directions of the gradients. Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2.
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
from pyops.comm.compression.low_rank import Family, families, fresh_basis, orthonormal, product, unit_columns
from pyops.flat import FlatLayout, Shard

__all__ = ["PowerSGD", "PowerSGDMemory", "low_rank_mean"]

SEGMENT = 1 << 18  # elements of a slice of the exact collectives
SMALL = 1 << 12  # elements up to which everyone sends all of them to everyone
BAND = 1 << 16  # elements of a matrix that are worked on at a time


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Matrices as products of rank `rank`; a tensor [n, ...] is the matrix [n, numel / n]. seed: of the first directions.

    Vectors, and matrices that would not shrink by half, travel in fp32, exactly. A matrix costs rank * (n + m) numbers in
    place of n * m. It needs the shapes of the tensors, so `compressed_all_reduce` takes it with error=PowerSGDMemory(layout,
    ...) only, as DataParallel and ddp_hook do; there is no payload of a piece, nor a compressed reduce-scatter or all-gather.
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
        return PowerSGDMemory

    def all_reduce(self, flat: Tensor, *, error: Any, transport: Transport, scale: float) -> None:
        """flat = scale * (sum over ranks of flat + error) at low rank, in place. ValueError without a memory that fits."""
        self.check_memory(error, numel=flat.numel(), rank=transport.rank, size=transport.size)

        def exchange(x: Tensor) -> None:
            if transport.size == 2 or x.numel() <= SMALL:  # as many bytes, or so few that the messages decide
                two_shot.sum_of_whole(x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size)
            else:
                two_shot.all_reduce(x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size)

        low_rank_mean(flat, error, exchange=exchange, factor=scale * transport.size)

    def check_memory(self, error: Any, *, numel: int, rank: int, size: int) -> None:
        """ValueError unless `error` is a memory of this codec and rank for so many numbers."""
        if not isinstance(error, PowerSGDMemory):
            raise ValueError(
                f"{self.name} needs the shapes of the tensors; pass error=PowerSGDMemory(layout, codec=codec, ...)"
            )
        if (error.codec, error.rank, error.size, error.numel) != (self, rank, size, numel):
            raise ValueError(
                f"error is for {error.numel} elements with {error.codec.name} on rank {error.rank} of {error.size}; this call "
                f"has {numel} with {self.name} on rank {rank} of {size}"
            )

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self.name} writes whole matrices, not pieces; use it with compressed_all_reduce and a PowerSGDMemory"
        )

    def payload_bytes(self, n: int) -> int:
        self._refuse()

    def encode(
        self, x: Tensor, payload: Tensor, *, error: Tensor | None = None, flag: Tensor | None = None,
        scale: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        self._refuse()

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        self._refuse()

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        self._refuse()


class PowerSGDMemory:
    """What PowerSGD keeps from one step to the next for the tensors of `layout`, one rank of `size`.

    worker: this rank's error, fp32 [layout.numel]; zero where tensors travel exactly. bases: Q of each family of matrices,
    [members, r, m], the same bits on all ranks. overflowed: fp32 [1], 1 once a sum was not finite.
    """

    def __init__(
        self, layout: FlatLayout, *, codec: PowerSGD, rank: int, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.numel, self.codec, self.rank, self.size = layout, layout.numel, codec, rank, size
        self.families, self.whole = families(layout, rank=codec.rank)
        self.worker = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.overflowed = torch.zeros(1, dtype=torch.float32, device=device)
        self.bases = [self._fresh(family) for family in self.families]
        self.rounds = 0
        self.starts = [0] * (size + 1)  # no rank keeps errors for all, as the owners of an elementwise codec's chunks do
        self.server = self.worker[:0]

    def _fresh(self, family: Family) -> Tensor:
        return fresh_basis(family, self.layout.names, seed=self.codec.seed).to(self.worker.device)

    def zero_(self) -> None:
        """Forget the errors and the directions."""
        self.worker.zero_()
        self.bases = [self._fresh(family) for family in self.families]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "rounds", "worker": {name: Shard of [size, *shape]}, "basis": {name: Q [r, m]}}."""
        worker = {
            name: Shard((self.size, *shape), (self.rank, *(0 for _ in shape)), self._part(i).view(1, *shape))
            for i, (name, shape) in enumerate(zip(self.layout.names, self.layout.shapes, strict=True))
        }
        basis = {
            self.layout.names[i]: q
            for family, batch in zip(self.families, self.bases, strict=True)
            for i, q in zip(family.members, batch, strict=True)
        }
        return {"codec": self.codec.name, "rounds": self.rounds, "worker": worker, "basis": basis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or the whole tensors that a checkpoint has in place of shards.

        From another number of ranks every rank gets the mean of the errors. ValueError, before anything is changed, for
        another codec, other tensors, or rows of another number of ranks of which some are missing.
        """
        errors = ErrorFeedback(self.layout, codec=self.codec, rank=self.rank, size=self.size, device=self.worker.device)
        errors.load_state_dict({**state, "server": {name: self.worker.new_zeros(numel) for name, numel in self._sizes()}})
        bases = [torch.stack([self._basis(state, i, family) for i in family.members]) for family in self.families]
        self.worker.copy_(errors.worker)
        self.bases, self.rounds = [b.to(self.worker.device) for b in bases], errors.rounds

    def _sizes(self) -> list[tuple[str, int]]:
        return [(name, prod(shape)) for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)]

    def _basis(self, state: Mapping[str, Any], index: int, family: Family) -> Tensor:
        name = self.layout.names[index]
        found = state.get("basis", {}).get(name)
        if not isinstance(found, Tensor) or found.shape != (family.rank, family.columns):
            has = tuple(found.shape) if isinstance(found, Tensor) else "none"
            raise ValueError(f"the state's directions for {name!r} are {has}; expected ({family.rank}, {family.columns})")
        return found

    def take_basis(self, name: str, other: PowerSGDMemory) -> None:
        """Copy a matrix's directions from another memory of it."""
        where, source = self._place(name), other._place(name)
        if where is not None and source is not None:
            self.bases[where[0]][where[1]] = other.bases[source[0]][source[1]]

    def _place(self, name: str) -> tuple[int, int] | None:
        index = self.layout.names.index(name)
        return next(((i, f.members.index(index)) for i, f in enumerate(self.families) if index in f.members), None)

    def _part(self, index: int) -> Tensor:
        return self.worker[self.layout.slice_at(index)]

    def matrices(self, flat: Tensor, family: Family) -> list[Tensor]:
        """Views of the family's part of a flat tensor, [rows, columns] each."""
        return [flat[self.layout.slice_at(i)].view(family.rows, family.columns) for i in family.members]


def low_rank_mean(flat: Tensor, memory: PowerSGDMemory, *, exchange: Callable[[Tensor], None], factor: float = 1.0) -> None:
    """flat = factor * (mean over ranks of flat + error, at low rank), in place; the error becomes what was left out.

    flat: laid out as memory.layout; padding stays as it is. exchange(x): x = mean of x over the ranks, fp32, the same bits
    everywhere. A matrix whose P or Q is not finite on any rank becomes nan, and its error and directions stay as they were.
    """
    if flat.dtype != torch.float32:
        wide = flat.float()
        low_rank_mean(wide, memory, exchange=exchange, factor=factor)
        flat.copy_(wide)
        return
    slices = [memory.layout.slice_at(i) for i in memory.whole]
    us = [memory.matrices(flat, family) for family in memory.families]  # the gradients' own memory, in place
    errors = [memory.matrices(memory.worker, family) for family in memory.families]
    families = memory.families
    message, parts = _message(
        flat, [*((s.stop - s.start,) for s in slices), *((len(f.members), f.rank, f.rows) for f in families)]
    )
    exact, ps = parts[: len(slices)], parts[len(slices) :]
    for part, place in zip(exact, slices, strict=True):
        part.copy_(flat[place])
    for u_batch, e_batch, q, p in zip(us, errors, memory.bases, ps, strict=True):
        for i, (u, error) in enumerate(zip(u_batch, e_batch, strict=True)):
            for rows in _bands(u):
                torch.mm(q[i], u[rows].add_(error[rows]).t(), out=p[i, :, rows])
    if parts:
        exchange(message)
    ok = [p.isfinite().flatten(1).all(dim=1) for p in ps]
    ps = [orthonormal(torch.where(fine[:, None, None], p, 0.0)) for fine, p in zip(ok, ps, strict=True)]
    message_q, qs = _message(flat, [(len(f.members), f.rank, f.columns) for f in families])
    for u_batch, p, q in zip(us, ps, qs, strict=True):
        for i, u in enumerate(u_batch):
            torch.mm(p[i], u, out=q[i])
    if families:
        exchange(message_q)
    for mean, place in zip(exact, slices, strict=True):
        torch.mul(mean, factor, out=flat[place])
    if slices and not bool(message[: sum(part.numel() for part in exact)].isfinite().all()):
        memory.overflowed.fill_(1.0)
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        fine = ok[i] & q.isfinite().flatten(1).all(dim=1)
        _put_products(us[i], errors[i], p, q, fine=fine.tolist(), factor=factor)
        memory.bases[i] = torch.where(fine[:, None, None], unit_columns(q, fresh=memory.bases[i]), memory.bases[i])
        memory.overflowed.copy_(torch.where(fine.all(), memory.overflowed, 1.0))


def _put_products(us: list[Tensor], errors: list[Tensor], p: Tensor, q: Tensor, *, fine: Sequence[bool], factor: float) -> None:
    """Of each matrix: error = U - P Q^T and U = factor * P Q^T, a band of rows at a time, which stays in the cache."""
    scratch = torch.empty(max(BAND, us[0].shape[1]), device=us[0].device)
    for i, (u, error) in enumerate(zip(us, errors, strict=True)):
        if not fine[i]:
            u.fill_(torch.nan)
            continue
        for rows in _bands(u):
            band = u[rows]
            mean = product(p[i, :, rows], q[i], out=scratch[: band.numel()].view(band.shape))
            torch.sub(band, mean, out=error[rows])
            torch.mul(mean, factor, out=band)


def _bands(matrix: Tensor) -> list[slice]:
    rows, columns = matrix.shape
    many = max(1, BAND // columns)
    return [slice(start, min(start + many, rows)) for start in range(0, rows, many)]


def _message(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """One fp32 tensor for an exchange, and its parts of these shapes as views."""
    sizes = [prod(shape) for shape in shapes]
    message = torch.empty(sum(sizes), dtype=torch.float32, device=like.device)
    return message, [part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)] if sizes else []
