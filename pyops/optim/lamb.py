"""LAMB: AdamW whose step is scaled, layer by layer, to the size of the layer.

    LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_grad_norm=1.0)
    LAMB([{"params": matrices}, {"params": biases_and_norms, "trust_ratio": False, "weight_decay": 0.0}], lr=2e-3)
    LAMB([FlatBuffer(model.named_parameters()).parameter], lr=2e-3)        each tensor of the buffer is a layer

The formula is that of pyops/ops/optimizers/lamb.py. You et al., arXiv:1904.00962, algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.lamb import lamb_, lamb_from_table_
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.protocols import ParamGroup

__all__ = ["LAMB"]


class LAMB(LayerwiseOptimizer):
    """LAMB with bias correction and decoupled weight decay inside the update, fused; a parameter is
    a layer.

    trust_ratio: whether the step is scaled by ||p|| / ||update||; False in a group (biases, norms)
    leaves AdamW's step,
        bit for bit.
    min_ratio, max_ratio: bounds of that ratio, which is 1 where either norm is 0. The paper has
    none (0 and infinity);
        0.01 and 10 are common.
    A parameter with a `flat_layout` (FlatBuffer.parameter) is stepped tensor by tensor, with the
    bits that separate parameters would have; its padding is left alone. betas, eps, weight_decay,
    maximize and what follows: see Adam.

    Raises ValueError or TypeError for what can't be stepped, naming it, before anything is changed.
    """

    _table_op = "lamb_from_table_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        trust_ratio: bool = True,
        min_ratio: float = 0.0,
        max_ratio: float = math.inf,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        zero_grad: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_ratio": trust_ratio,
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "seed": seed,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            max_grad_norm=max_grad_norm,
            zero_grad=zero_grad,
        )

    def _check_group(self, group: ParamGroup) -> None:
        super()._check_group(group)
        who, least, most = type(self).__name__, group["min_ratio"], group["max_ratio"]
        for key, value in (("min_ratio", least), ("max_ratio", most)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"{who}: {key}={value!r} must be a number, got a {type(value).__name__}"
                )
        if not 0.0 <= least <= most or math.isinf(least):
            raise ValueError(
                f"{who}: min_ratio={least} and max_ratio={most} must satisfy 0 <= "
                "min_ratio <= max_ratio, min_ratio finite"
            )

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", None

    def _layer_step(
        self,
        group: ParamGroup,
        work: Tensor | list[list[Tensor]],
        norms: Tensor,
        *device_scalars: Tensor | None,
        passes: int,
        offsets: list[int],
    ) -> None:
        beta1, beta2 = group["betas"]
        scalars: dict[str, Any] = {
            "lr": 0.0 if device_scalars[0] is not None else float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "min_ratio": float(group["min_ratio"]),
            "max_ratio": float(group["max_ratio"]),
            "trust_ratio": group["trust_ratio"],
            "maximize": group["maximize"],
            "passes": passes,
            "zero_grads": self.zeroes_gradients,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": group["seed"],
        }
        if isinstance(work, Tensor):
            lamb_from_table_(work, norms, *device_scalars, **scalars)
        else:
            params, grads, exp_avgs, exp_avg_sqs, _, masters, copies, steps = work
            lamb_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                masters,
                copies,
                steps,
                norms,
                *device_scalars,
                **scalars,
                offsets=offsets,
            )
