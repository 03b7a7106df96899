"""Lion: sign momentum with one state, in one launch per param group.

    Lion(model.parameters(), lr=1e-4, weight_decay=1.0)            20 bytes per float32 parameter

The formula is that of pyops/ops/optimizers/lion.py: Chen et al., arXiv:2302.06675, algorithm 2.
A learning rate 3 to 10 times smaller than
AdamW's and a weight decay larger by as much give steps of the same size (section 5 there).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.lion import lion_, lion_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["Lion"]


class Lion(FusedOptimizer):
    """Lion with decoupled weight decay, fused; torch has none.

    betas: of the sum whose sign is the step, and of the momentum that is kept. maximize, foreach,
    capturable, differentiable, fused, and the arguments after it are those of Adam (see there), and
    so is everything else: copies and offsets in param groups, `grad_norm`, what is refused.

    State: `exp_avg`, of state_dtype, and `step`, which only stochastic rounding reads.
    """

    _table_op = "lion_from_table_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
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

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return "exp_avg", None, None

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        scalars = self._scalars(group, lr) | {"beta1": float(beta1), "beta2": float(beta2)}
        if isinstance(work, Tensor):
            lion_from_table_(work, lr, factor, skip, **scalars)
        else:
            params, grads, exp_avgs, _, _, masters, copies, steps = work.columns
            lion_(
                params,
                grads,
                exp_avgs,
                masters,
                copies,
                steps,
                lr,
                factor,
                skip,
                **scalars,
                offsets=work.offsets,
            )
