"""LAMB: AdamW whose step is scaled, layer by layer, to the size of the layer.

    LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_grad_norm=1.0)
    LAMB([{"params": matrices},
          {"params": biases_and_norms, "trust_ratio": False, "weight_decay": 0.0}], lr=2e-3)
    LAMB([FlatBuffer(model.named_parameters()).parameter], lr=2e-3)
                                                        each tensor of the buffer is a layer

The formula is that of pyops/ops/optimizers/lamb.py. You et al., arXiv:1904.00962, algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.lamb import lamb_, lamb_from_table_
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.optim.fused.options import LayerwiseOptions, chosen_options, shows_options
from pyops.protocols import ParamGroup

__all__ = ["LAMB"]


class LAMB(LayerwiseOptimizer):
    """LAMB with bias correction and decoupled weight decay inside the update, fused.

    A parameter is a layer. One with a `flat_layout` (FlatBuffer.parameter) is stepped tensor by
    tensor, with the bits that separate parameters would have; its padding is not touched.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: its product with the weights is added to the update.
        min_ratio: least value of ||p|| / ||update||, by which a layer's step is scaled; the ratio
            is 1 where either norm is 0. The paper has no bound; 0.01 is common.
        max_ratio: largest value of the ratio. The paper has no bound; 10 is common.
        **options: see LayerwiseOptions.

    Param groups and errors: see Adam.
    """

    _table_op = "lamb_from_table_"

    @shows_options(LayerwiseOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        min_ratio: float = 0.0,
        max_ratio: float = math.inf,
        **options: Unpack[LayerwiseOptions],
    ) -> None:
        chosen = chosen_options(self, LayerwiseOptions, options)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_ratio": chosen["trust_ratio"],
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
            "maximize": chosen["maximize"],
            "foreach": chosen["foreach"],
            "fused": chosen["fused"],
            "capturable": chosen["capturable"],
            "differentiable": chosen["differentiable"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

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
