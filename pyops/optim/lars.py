"""LARS: SGD with momentum whose gradient is scaled, layer by layer, to the size of the layer.

    LARS(model.parameters(), lr=4.0, momentum=0.9, weight_decay=1e-4)
    LARS([{"params": matrices},
          {"params": biases_and_norms, "trust_ratio": False, "weight_decay": 0.0}], lr=4.0)

The formula is that of pyops/ops/optimizers/lars.py. You, Gitman and Ginsburg, arXiv:1708.03888,
algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.lars import lars_, lars_from_table_
from pyops.optim.fused.input_checks import check_hyperparameters
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.optim.fused.options import LayerwiseOptions, chosen_options, shows_options
from pyops.protocols import ParamGroup

__all__ = ["LARS"]


class LARS(LayerwiseOptimizer):
    """LARS with the momentum of torch.optim.SGD, fused.

    A parameter is a layer. One with a `flat_layout` is stepped tensor by tensor: see LAMB.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        momentum: see SGD, as for dampening, weight_decay and nesterov.
        dampening: see SGD.
        weight_decay: L2 coefficient, part of the layer's rate.
        nesterov: see SGD.
        trust_coefficient: eta of the paper, the factor of the layer's rate.
        eps: added to the denominator of the layer's rate.
        **options: see LayerwiseOptions.

    Param groups and errors: see Adam.
    """

    _table_op = "lars_from_table_"

    @shows_options(LayerwiseOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        **options: Unpack[LayerwiseOptions],
    ) -> None:
        chosen = chosen_options(self, LayerwiseOptions, options)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "trust_ratio": chosen["trust_ratio"],
            "maximize": chosen["maximize"],
            "foreach": chosen["foreach"],
            "fused": chosen["fused"],
            "capturable": chosen["capturable"],
            "differentiable": chosen["differentiable"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

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
