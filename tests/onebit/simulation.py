"""All ranks of a 1-bit optimizer in one process, in plain torch of any dtype, written from the
papers' formulas.

    OneBitAdamRanks(params, ranks=3, dtype=torch.float64).step([gradients of rank 0, of rank 1, of
    rank 2])

In float64 it is the reference; in float32 it is what plain torch would make of the same formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OneBitAdamRanks", "Wire", "random_gradients", "random_parameters"]

ALIGNMENT = 64
SHAPES = ((5, 13), (130,), (7, 3, 11))


def random_parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def random_gradients(
    steps: int, ranks: int, shapes: Sequence[tuple[int, ...]] = SHAPES, *, seed: int = 1
) -> list[list[list[Tensor]]]:
    """gradients[step][rank][parameter]: a direction that ranks share, and noise of their own; sizes
    differ between elements."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.rand(shape, generator=generator) + 0.1 for shape in shapes]
    shared = [torch.randn(shape, generator=generator) for shape in shapes]
    return [
        [
            [
                size * (s + torch.randn(size.shape, generator=generator))
                for size, s in zip(sizes, shared, strict=True)
            ]
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def quantised(u: Tensor, *, block: int | None, rule: str) -> Tensor:
    """What one bit per element and a scale per block say of u."""
    out = torch.empty_like(u)
    width = max(1, u.numel()) if block is None else block
    for start in range(0, u.numel(), width):
        x = u[start : start + width]
        scale = x.abs().mean() if rule == "l1" else x.square().mean().sqrt()
        out[start : start + width] = torch.where(x >= 0, scale, -scale)
    return out


class Wire:
    """Two shots with error feedback: each rank's tensor to the owners of its chunks, the owners'
    sums to all."""

    def __init__(
        self,
        numel: int,
        ranks: int,
        *,
        block: int | None,
        rule: str,
        dead: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.block, self.rule, self.dead, self.ranks = block, rule, dead, ranks
        self.workers = [torch.zeros(numel, dtype=dtype) for _ in range(ranks)]
        self.server = torch.zeros(numel, dtype=dtype)
        multiple = block or ALIGNMENT
        each = -(-numel // (ranks * multiple)) * multiple
        self.starts = [min(numel, each * rank) for rank in range(ranks + 1)]

    def mean(self, tensors: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(self.server)
        for tensor, error in zip(tensors, self.workers, strict=True):
            u = torch.where(self.dead, 0.0, tensor + error)
            said = quantised(u, block=self.block, rule=self.rule)
            error.copy_(torch.where(self.dead, 0.0, u - said))
            total += said
        c = total / self.ranks + self.server
        out = torch.cat(
            [
                quantised(c[a:b], block=self.block, rule=self.rule)
                for a, b in zip(self.starts, self.starts[1:], strict=False)
            ]
        )
        self.server.copy_(torch.where(self.dead, 0.0, c - out))
        return torch.where(self.dead, 0.0, out)


class OneBitAdamRanks:
    """OneBitAdam over `ranks` ranks. block=0 stands for exact communication. flat: m and v of all
    parameters in one tensor."""

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        ranks: int,
        warmup: int,
        dtype: torch.dtype,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 0.0,
        block: int | None = 2048,
        rule: str = "l1",
        op: str = "mean",
        max_norm: float | None = None,
        deepspeed: bool = False,
        precondition: bool = True,
        slow: float | None = None,
    ) -> None:
        self.shapes = [p.shape for p in params]
        self.offsets, end = [], 0
        for p in params:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.offsets.append(start)
            end = start + p.numel()
        self.numel, self.ranks, self.dtype = end, ranks, dtype
        self.warmup, self.lr, self.betas, self.eps = warmup, lr, betas, eps
        self.block, self.rule, self.op, self.max_norm, self.deepspeed = (
            block,
            rule,
            op,
            max_norm,
            deepspeed,
        )
        decays = [weight_decay] * len(params) if isinstance(weight_decay, float) else weight_decay
        self.decay = self.flat(
            [torch.full(p.shape, d) for p, d in zip(params, decays, strict=True)]
        )
        self.precondition, self.slow, self.s = precondition and not deepspeed, slow, self.flat(())
        self.p, self.m, self.v = self.flat(params), self.flat(()), self.flat(())
        self.t = 0
        self.wire: Wire | None = None

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.zeros(self.numel, dtype=self.dtype)
        for tensor, offset in zip(tensors, self.offsets, strict=False):
            whole[offset : offset + tensor.numel()] = tensor.flatten()
        return whole

    def params(self) -> list[Tensor]:
        return [
            self.p[o : o + s.numel()].view(s).clone()
            for o, s in zip(self.offsets, self.shapes, strict=True)
        ]

    def _clip(self, norm: Tensor) -> Tensor | float:
        return 1.0 if self.max_norm is None else (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        (self._exact if self.t < self.warmup else self._compressed)(
            [self.flat(g) for g in gradients]
        )
        if self.t == self.warmup:
            self._switch()

    def _exact(self, gradients: Sequence[Tensor]) -> None:
        g = torch.stack(list(gradients)).sum(0) / (self.ranks if self.op == "mean" else 1)
        g = g * self._clip(g.norm())
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        if self.slow is not None:
            self.s = self.slow * self.s + (1 - self.slow) * g * g
        c1, c2 = (1.0, 1.0) if self.deepspeed else (1 - b1**self.t, 1 - b2**self.t)
        self.p = self.p - self.lr * (
            self.m / c1 / ((self.v / c2).sqrt() + self.eps) + self.decay * self.p
        )

    def _switch(self) -> None:
        b1, b2 = self.betas
        if not self.deepspeed:
            self.m, self.v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        if self.slow is not None:
            self.v = self.s / (1 - self.slow**self.t)
        self.dead = self.v == 0
        self.root = torch.where(self.dead, 1.0, self.v.sqrt() + self.eps)
        self.m = self.m / self.root if self.precondition else self.m
        if self.block != 0:
            self.wire = Wire(
                self.numel,
                self.ranks,
                block=self.block,
                rule=self.rule,
                dead=self.dead,
                dtype=self.dtype,
            )

    def _compressed(self, gradients: Sequence[Tensor]) -> None:
        times = self.ranks if self.op == "sum" else 1
        norm = torch.stack([(times * g).square().sum() for g in gradients]).mean().sqrt()
        self.t += 1
        b1 = self.betas[0]
        new = (
            1 - b1 if self.deepspeed else (1 - b1) / (1 - b1**self.t)
        )  # the weight of the last gradient in a corrected mean
        unit = self.root if self.precondition else 1.0
        mine = [(1 - new) * self.m + new * (times * self._clip(norm) * g / unit) for g in gradients]
        self.m = self.wire.mean(mine) if self.wire is not None else torch.stack(mine).mean(0)
        update = torch.where(self.dead, 0.0, self.m if self.precondition else self.m / self.root)
        self.p = self.p - self.lr * (update + self.decay * self.p)
