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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.comm.low_rank import Family, families, fresh_basis, orthonormal, product, unit_columns
from pyops.flat import FlatLayout, Shard

__all__ = ["PowerSGD", "PowerSGDMemory", "low_rank_mean"]

SEGMENT = 1 << 18  # elements of a slice of the exact collectives


@dataclass(frozen=True)
class PowerSGD:
    """Matrices as products of rank `rank`; a tensor [n, ...] is the matrix [n, numel / n]. seed: of the first directions.

    Vectors, and matrices that would not shrink by half, travel in fp32, exactly. Needs the shapes of the tensors: those of
    the layout of its memory, or of the tensor itself. The wire carries 2 * 4 * rank * (n + m) bytes for 2 * 4 * n * m.
    """

    rank: int = 4
    seed: int = 0
    block = 1
    feedback = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a product of matrices needs rank 1 or more")

    @property
    def name(self) -> str:
        return f"power_sgd(rank={self.rank}, seed={self.seed})"


class PowerSGDMemory:
    """What PowerSGD keeps from one step to the next for the tensors of `layout`, one rank of `size`.

    worker: this rank's error, fp32 [layout.numel]; zero where tensors travel exactly. bases: Q of each family of matrices,
    [members, r, m], the same bits on all ranks. overflowed: fp32 [1], 1 once a sum was not finite.
    """

    def __init__(
        self, layout: FlatLayout, *, codec: PowerSGD, rank: int, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.codec, self.rank, self.size = layout, codec, rank, size
        self.families, self.whole = families(layout, rank=codec.rank)
        self.worker = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.overflowed = torch.zeros(1, dtype=torch.float32, device=device)
        self.bases = [self._fresh(family) for family in self.families]

    def _fresh(self, family: Family) -> Tensor:
        return fresh_basis(family, self.layout.names, seed=self.codec.seed).to(self.worker.device)

    def zero_(self) -> None:
        """Forget the errors and the directions."""
        self.worker.zero_()
        self.bases = [self._fresh(family) for family in self.families]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "worker": {name: Shard of [size, *shape]}, "basis": {name: Q [r, m]}}."""
        worker = {
            name: Shard((self.size, *shape), (self.rank, *(0 for _ in shape)), self._part(i).view(1, *shape))
            for i, (name, shape) in enumerate(zip(self.layout.names, self.layout.shapes, strict=True))
        }
        basis = {
            self.layout.names[i]: q
            for family, batch in zip(self.families, self.bases, strict=True)
            for i, q in zip(family.members, batch, strict=True)
        }
        return {"codec": self.codec.name, "worker": worker, "basis": basis}

    def _part(self, index: int) -> Tensor:
        return self.worker[self.layout.slice_at(index)]

    def matrices(self, flat: Tensor, family: Family) -> Tensor:
        """A copy of the family's part of a flat tensor, fp32 [members, rows, columns]."""
        parts = [flat[self.layout.slice_at(i)] for i in family.members]
        return torch.stack(parts).float().view(-1, family.rows, family.columns)

    def put(self, flat: Tensor, family: Family, matrices: Tensor) -> None:
        """Write [members, rows, columns] back to a flat tensor."""
        for i, matrix in zip(family.members, matrices, strict=True):
            flat[self.layout.slice_at(i)].copy_(matrix.view(-1))


def low_rank_mean(flat: Tensor, memory: PowerSGDMemory, *, exchange: Callable[[Tensor], None], factor: float = 1.0) -> None:
    """flat = factor * (mean over ranks of flat + error, at low rank), in place; the error becomes what was left out.

    flat: laid out as memory.layout; padding stays as it is. exchange(x): x = mean of x over the ranks, fp32, the same bits
    everywhere. A matrix whose P or Q is not finite on any rank becomes nan, and its error and directions stay as they were.
    """
    slices = [memory.layout.slice_at(i) for i in memory.whole]
    us = [memory.matrices(flat, f) + memory.matrices(memory.worker, f) for f in memory.families]
    ps = [torch.bmm(q, u.transpose(1, 2)) for q, u in zip(memory.bases, us, strict=True)]
    means = _together([*(flat[s].float() for s in slices), *ps], exchange)
    exact, ps = means[: len(slices)], means[len(slices) :]
    finite = [p.isfinite().flatten(1).all(dim=1)[:, None, None] for p in ps]
    ps = [orthonormal(torch.where(ok, p, 0.0)) for ok, p in zip(finite, ps, strict=True)]
    qs = _together([torch.bmm(p, u) for p, u in zip(ps, us, strict=True)], exchange)
    for place, mean in zip(slices, exact, strict=True):
        flat[place].copy_(mean * factor)
        memory.overflowed.copy_(torch.where(mean.isfinite().all(), memory.overflowed, 1.0))
    for i, (family, u, p, q) in enumerate(zip(memory.families, us, ps, qs, strict=True)):
        ok = finite[i] & q.isfinite().flatten(1).all(dim=1)[:, None, None]
        out = product(p, q)
        memory.put(memory.worker, family, torch.where(ok, u - out, memory.matrices(memory.worker, family)))
        memory.put(flat, family, torch.where(ok, out * factor, torch.nan))
        memory.bases[i] = torch.where(ok, unit_columns(q, fresh=memory.bases[i]), memory.bases[i])
        memory.overflowed.copy_(torch.where(ok.all(), memory.overflowed, 1.0))


def _together(tensors: list[Tensor], exchange: Callable[[Tensor], None]) -> list[Tensor]:
    """The tensors after one `exchange` of all of them."""
    if not tensors:
        return []
    message = torch.cat([t.flatten() for t in tensors])
    exchange(message)
    return [part.view(t.shape) for part, t in zip(message.split([t.numel() for t in tensors]), tensors, strict=True)]
