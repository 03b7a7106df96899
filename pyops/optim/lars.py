"""LARS: SGD with momentum whose gradient is scaled, layer by layer, to the size of the layer.

    LARS(model.parameters(), lr=4.0, momentum=0.9, weight_decay=1e-4)
    LARS([{"params": matrices}, {"params": biases_and_norms, "trust_ratio": False, "weight_decay": 0.0}], lr=4.0)

The formula is that of pyops/ops/optimizers/lars.py. You, Gitman and Ginsburg, arXiv:1708.03888,
algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.lars import lars_, lars_from_table_
from pyops.optim.fused.input_checks import check_hyperparameters
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.protocols import ParamGroup

__all__ = ["LARS"]


class LARS(LayerwiseOptimizer):
    """LARS with the momentum of torch.optim.SGD, fused; a parameter is a layer.

    trust_coefficient: eta of the paper. eps: added to the denominator of the layer's rate.
    trust_ratio: False in a group (biases, norms) leaves torch.optim.SGD's step.
    momentum, dampening, weight_decay, nesterov, maximize: as of torch.optim.SGD. Flat parameters:
    see LAMB.
    What follows: see Adam.

    Raises ValueError or TypeError for what can't be stepped, naming it, before anything is changed.
    """

    _table_op = "lars_from_table_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        trust_ratio: bool = True,
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
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "trust_ratio": trust_ratio,
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
        who = type(self).__name__
        check_hyperparameters({**group, "betas": (0.0, 0.0)}, who=who)
        for key in ("momentum", "dampening", "trust_coefficient"):
            value = group[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"{who}: {key}={value!r} must be a number, got a {type(value).__name__}"
                )
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{who}: {key}={value} must be a finite number >= 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{who}: nesterov=True needs momentum > 0 and dampening = 0, got "
                f"momentum={group['momentum']} and "
                f"dampening={group['dampening']}"
            )

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return "momentum_buffer" if group["momentum"] else None, None, None

    def _layer_step(
        self,
        group: ParamGroup,
        work: Tensor | list[list[Tensor]],
        norms: Tensor,
        *device_scalars: Tensor | None,
        passes: int,
        offsets: list[int],
    ) -> None:
        names = (
            "momentum",
            "dampening",
            "weight_decay",
            "trust_coefficient",
            "eps",
            "nesterov",
            "trust_ratio",
            "maximize",
            "seed",
        )
        scalars: dict[str, Any] = {
            "lr": 0.0 if device_scalars[0] is not None else float(group["lr"]),
            **{name: group[name] for name in names},
            "passes": passes,
            "zero_grads": self.zeroes_gradients,
            "stochastic_rounding": self.stochastic_rounding,
        }
        if isinstance(work, Tensor):
            lars_from_table_(work, norms, *device_scalars, **scalars)
        else:
            params, grads, buffers, _, _, masters, copies, steps = work
            lars_(
                params,
                grads,
                buffers,
                masters,
                copies,
                steps,
                norms,
                *device_scalars,
                **scalars,
                offsets=offsets,
            )
