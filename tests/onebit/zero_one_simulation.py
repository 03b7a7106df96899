"""All ranks of 0/1 Adam in one process, in plain torch of any dtype, written from the formulas of
pyops.onebit's docstrings.

ZeroOneRanks(params, ranks=2, schedule=RoundSchedule(7, 1, 3, 4), dtype=torch.float64).step([of rank
0, of rank 1])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.onebit.steps.round_schedule import RoundSchedule
from tests.onebit.simulation import OneBitAdamRanks, Wire

__all__ = ["ZeroOneRanks"]


class ZeroOneRanks(OneBitAdamRanks):
    """block=0: exact communication; one weight decay. ps, ws, squares: of each rank; c: per layer,
    at the last exact round."""

    def __init__(
        self, params: Sequence[Tensor], *, ranks: int, schedule: RoundSchedule, **options: Any
    ) -> None:
        super().__init__(params, ranks=ranks, warmup=0, **options)
        self.schedule = schedule
        self.ps, self.ws, self.squares, self.sums = (
            [self.flat(()) for _ in range(ranks)] for _ in range(4)
        )
        self.ps = [self.p.clone() for _ in range(ranks)]
        self.means, self.owns, self.c = ([0.0] * len(params) for _ in range(3))
        self.root = self.flat(())
        self.dead = torch.ones(self.numel, dtype=torch.bool)
        self.anchor, self.length, self.kept = self.p.clone(), 0.0, torch.ones_like(self.p)
        self.last_length = 0.0
        if self.block != 0:
            self.wire = Wire(
                self.numel,
                ranks,
                block=self.block,
                rule=self.rule,
                dead=self.dead,
                dtype=self.dtype,
            )

    def params(self, rank: int = 0) -> list[Tensor]:
        self.p = self.ps[rank]
        return super().params()

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        times = self.ranks if self.op == "sum" else 1
        g = torch.stack([times * self.flat(each) for each in gradients])
        g = g * self._clip(g.square().sum(1).mean().sqrt())
        self.t += 1
        kind = self.schedule.kind(self.t)
        if self.t <= self.schedule.var_freeze_step:
            d = 0.0 if self.t <= 2 else min(1 - 2 / self.t, max(0.995, self.betas[1]))
            self.squares = [
                d * s + (1 - d) * each * each for s, each in zip(self.squares, g, strict=True)
            ]
        if kind == "exact":
            self._new_variance(g)
        b1 = self.betas[0]
        new = (1 - b1) / (1 - b1**self.t)
        keep = 1 - self.lr * self.decay
        mine = [torch.where(self.dead, 0.0, each / self.root) for each in g]
        self.ws = [(1 - new) * w + new * each for w, each in zip(self.ws, mine, strict=True)]
        self.ps = [p * keep - self.lr * w for p, w in zip(self.ps, self.ws, strict=True)]
        self.sums = [s * keep + self.lr * w for s, w in zip(self.sums, self.ws, strict=True)]
        self.length, self.kept = self.length * float(keep.min()) + self.lr, self.kept * keep
        if kind != "local":
            mean = [s / self.length for s in self.sums]
            if self.wire is not None:
                self.wire.workers = [
                    e * (self.last_length / self.length) for e in self.wire.workers
                ]
                self.wire.server = self.wire.server * (self.last_length / self.length)
            self.last_length = self.length
            out = self.wire.mean(mean) if self.wire is not None else torch.stack(mean).mean(0)
            self.anchor = self.anchor * self.kept - self.length * out
            self.ws, self.ps = [out.clone() for _ in mean], [self.anchor.clone() for _ in mean]
            self.sums, self.length, self.kept = (
                [torch.zeros_like(out) for _ in mean],
                0.0,
                torch.ones_like(out),
            )

    def _new_variance(self, g: Tensor) -> None:
        v = torch.stack(list(self.squares)).mean(0)
        for i, (offset, shape) in enumerate(zip(self.offsets, self.shapes, strict=True)):
            layer = slice(offset, offset + shape.numel())
            self.means[i] = self.means[i] / 2 + g[:, layer].mean(0).square().sum()
            self.owns[i] = self.owns[i] / 2 + g[:, layer].square().sum(1).mean()
            self.c[i] = self.means[i] / self.owns[i]
            noise = (1 - 2 / math.pi) * (self.c[i] + 1 / self.ranks) if self.block else 0.0
            v[layer] *= self.c[i] + noise
        alive = v > 0
        root = torch.where(alive, v.sqrt() + self.eps, 1.0)
        ratio = torch.where(alive & ~self.dead, self.root / root, 0.0)
        self.v, self.root, self.dead = v, root, ~alive
        self.ws = [w * ratio for w in self.ws]
        if self.wire is not None:
            self.wire.dead = self.dead
            self.wire.workers = [e * ratio for e in self.wire.workers]
            self.wire.server = self.wire.server * ratio
