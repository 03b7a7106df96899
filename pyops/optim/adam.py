"""Adam and AdamW: torch.optim's signatures and numbers, in one launch per param group.

    AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)        clip inside the step
    AdamW(model.bfloat16().parameters(), master_weights=True)                      float32 masters and moments
    AdamW(model.bfloat16().parameters(), state_dtype=torch.bfloat16, stochastic_rounding=True)     14 bytes per parameter

The formulas are those of pyops/ops/optimizers/optim.py.
Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.optim import adam_, adam_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["Adam", "AdamW"]


class Adam(FusedOptimizer):
    """torch.optim.Adam (L2 weight decay, added to the gradient), fused.

    The arguments up to `fused` are torch.optim.Adam's. foreach and fused are accepted and change
    nothing: the step is always fused. differentiable=True raises ValueError. capturable=True allows
    capture in a CUDA graph.

    master_weights: keep a float32 master of each 16-bit parameter in state["master"]; the parameter
    is its rounding. state_dtype: dtype of the moments: torch.float32, bfloat16 or float16.
    stochastic_rounding: round 16-bit moments, and 16-bit parameters without a master, up or down at
    random and unbiased,
        keyed by `seed`, the parameter's step and the element's number, so that a resumed or a sharded run draws the same.
    max_grad_norm: clip gradients, all groups together, to this 2-norm inside the step;
    `optimizer.grad_norm` then holds
        the norm before clipping. Gradients with an inf or a nan skip the step. `.grad` itself is left as it is.
    zero_grad: zero the gradients in the same pass; they stay allocated. Also when the step is
    skipped.
    seed: of stochastic_rounding; saved in param_groups.

    A param group may carry `copies`: for each parameter None or a tensor of the same shape that
    receives the rounded parameter in the same pass (16-bit weights for the next forward pass); and
    `offsets`: for each parameter the
    number of its first element, where it is a shard of something larger.

    Raises ValueError or TypeError for what can't be stepped, naming it, before anything is changed.
    """

    _table_op = "adam_from_table_"
    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": decoupled_weight_decay or self._decoupled,
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._decoupled:  # a state_dict of older torch has no such key, one of Adam says False
            for group in self.param_groups:
                group["decoupled_weight_decay"] = True

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        scalars = self._scalars(group, lr) | {
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "decoupled": group["decoupled_weight_decay"],
        }
        if isinstance(work, Tensor):
            adam_from_table_(work, lr, factor, skip, **scalars)
        else:
            params, grads, exp_avgs, exp_avg_sqs, largest, masters, copies, steps = work.columns
            adam_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                largest,
                masters,
                copies,
                steps,
                lr,
                factor,
                skip,
                **scalars,
                offsets=work.offsets,
            )


class AdamW(Adam):
    """torch.optim.AdamW (weight decay apart from the gradient), fused. Arguments: see Adam."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            max_grad_norm=max_grad_norm,
            zero_grad=zero_grad,
            seed=seed,
        )
