"""All ranks of 1-bit LAMB in one process, in plain torch: ours, and DeepSpeed's tensor by tensor as
its source has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.onebit.simulation import OneBitAdamRanks, Wire

__all__ = ["DeepSpeedRanks", "OneBitLAMBRanks"]

COEFF_BETA, MIN_COEFF, MAX_COEFF = 0.9, 0.01, 10.0


class OneBitLAMBRanks(OneBitAdamRanks):
    """OneBitLAMB over `ranks` ranks; options as OneBitAdamRanks'. bounds: factor_min, factor_max,
    factor_threshold."""

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        bounds: tuple[float, float, float] = (0.5, 4.0, 0.1),
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.bounds = bounds
        self.layers = [
            slice(o, o + s.numel()) for o, s in zip(self.offsets, self.shapes, strict=True)
        ]
        self.total, self.weight = [0.0] * len(self.layers), [0.0] * len(self.layers)
        self.last = [1.0] * len(self.layers)

    def _exact(self, gradients: Sequence[Tensor]) -> None:
        before = self.p.clone()
        super()._exact(gradients)  # moments, and a step that is undone
        self.p = before
        b1, b2 = self.betas
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        for k, at in enumerate(self.layers):
            u = m[at] / (v[at].sqrt() + self.eps) + self.decay[at] * self.p[at]
            norms = self.p[at].norm(), u.norm()
            ratio = 1.0
            if min(norms) > 0:
                ratio = float((norms[0] / norms[1]).clamp(MIN_COEFF, MAX_COEFF))
                self.total[k] = COEFF_BETA * self.total[k] + (1 - COEFF_BETA) * ratio
                self.weight[k] = COEFF_BETA * self.weight[k] + (1 - COEFF_BETA)
            self.p[at] -= self.lr * ratio * u

    def _switch(self) -> None:
        super()._switch()
        self.fresh = self.v.clone()

    def _compressed(self, gradients: Sequence[Tensor]) -> None:
        parameters, momentum = self.p, self.m
        super()._compressed(gradients)
        self.p = parameters.clone()
        b1 = (1 - self.betas[0]) / (1 - self.betas[0] ** self.t)
        g = (self.m - (1 - b1) * momentum) / b1 * self.root
        b2 = max(self.betas[1], self.slow or 0.0)
        self.fresh = torch.where(self.dead, 0.0, b2 * self.fresh + (1 - b2) * g * g)
        least, most, threshold = self.bounds
        for k, at in enumerate(self.layers):
            u = self.m[at] + self.decay[at] * self.p[at]
            alive = ~self.dead[at]
            quotients = (self.root[at] / (self.fresh[at].sqrt() + self.eps))[alive]
            factor = float(quotients.max()) if alive.any() else 1.0
            rho = min(1.0, float(self.m[at].norm() / u.norm())) if u.norm() > 0 else 1.0
            factor = min(max(factor * rho + 1 - rho, least), most)
            self.last[k] = min(
                max(factor, self.last[k] * (1 - threshold)), self.last[k] * (1 + threshold)
            )
            ratio = self.total[k] / self.weight[k] if self.weight[k] else 1.0
            self.p[at] -= self.lr * ratio * self.last[k] * u


class DeepSpeedRanks:
    """DeepSpeed 0.19.6, runtime/fp16/onebit/lamb.py, for `ranks` ranks, after its first call; names
    are its own."""

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        ranks: int,
        warmup: int,
        dtype: torch.dtype,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-6,
    ) -> None:
        self.p = [p.to(dtype) for p in params]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(p) for p in self.p],
            [torch.zeros_like(p) for p in self.p],
        )
        self.coeff_freeze, self.last_factor = [0.0] * len(params), [1.0] * len(params)
        self.freeze_step, self.step_count, self.ranks = warmup, 0, ranks
        self.lr, self.betas, self.wd, self.eps, self.dtype = lr, betas, weight_decay, eps, dtype
        self.offsets, end = [], 0
        for p in self.p:
            self.offsets.append(-(-end // 64) * 64)
            end = self.offsets[-1] + p.numel()
        self.numel = end

    def params(self) -> list[Tensor]:
        return [p.clone() for p in self.p]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(self.numel, dtype=self.dtype)
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            flat[offset : offset + tensor.numel()] = tensor.flatten()
        return flat

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        self.step_count += 1
        beta1, beta2 = self.betas
        grads = [[g.to(self.dtype) for g in each] for each in gradients]
        if self.step_count <= self.freeze_step:
            for i, p in enumerate(self.p):
                grad = torch.stack([each[i] for each in grads]).mean(0)
                self.exp_avg[i] = beta1 * self.exp_avg[i] + (1 - beta1) * grad
                self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1 - beta2) * grad * grad
                update = self.exp_avg[i] / (self.exp_avg_sq[i].sqrt() + self.eps) + self.wd * p
                coeff = 1.0
                if p.norm() != 0 and update.norm() != 0:
                    coeff = min(max((p.norm() / update.norm()).item(), MIN_COEFF), MAX_COEFF)
                if coeff != 1.0:
                    self.coeff_freeze[i] = (
                        COEFF_BETA * self.coeff_freeze[i] + (1 - COEFF_BETA) * coeff
                    )
                p -= self.lr * coeff * update
            if self.step_count == self.freeze_step:
                self.fresh = [v.clone() for v in self.exp_avg_sq]
                scales = [(m.norm() / m.numel() ** 0.5).item() for m in self.exp_avg]
                self.scaling = [sum(scales) / len(scales) / s for s in scales]
                dead = self._flat([torch.ones_like(p) for p in self.p]) == 0
                self.wire = Wire(
                    self.numel, self.ranks, block=None, rule="rms", dead=dead, dtype=self.dtype
                )
            return
        mine = [
            [
                s * (beta1 * m + (1 - beta1) * g)
                for s, m, g in zip(self.scaling, self.exp_avg, each, strict=True)
            ]
            for each in grads
        ]
        common = self.wire.mean([self._flat(each) for each in mine])
        for i, p in enumerate(self.p):
            last = self.exp_avg[i]
            m = (
                common[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)
                / self.scaling[i]
            )
            self.exp_avg[i] = m
            rebuilt = (m - last * beta1) / (1 - beta1)
            self.fresh[i] = beta2 * self.fresh[i] + (1 - beta2) * rebuilt * rebuilt
            denominator = self.exp_avg_sq[i].sqrt() + self.eps
            prelim = m / denominator
            update = prelim + self.wd * p
            factor = (denominator / (self.fresh[i].sqrt() + self.eps)).max().item()
            if self.wd > 0:
                ratio = min(1.0, (prelim.norm() / update.norm()).item())
                factor = factor * ratio + (1.0 - ratio)
            factor = max(min(factor, 4.0), 0.5)
            factor = min(max(factor, self.last_factor[i] * 0.9), self.last_factor[i] * 1.1)
            self.last_factor[i] = factor
            p -= self.lr * self.coeff_freeze[i] * factor * update
