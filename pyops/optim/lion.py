"""Lion: sign momentum with one state, in one launch per param group.

    Lion(model.parameters(), lr=1e-4, weight_decay=1.0)            20 bytes per float32 parameter

The formula is that of pyops/ops/optimizers/lion.py: Chen et al., arXiv:2302.06675, algorithm 2.
A learning rate 3 to 10 times smaller than AdamW's and a weight decay larger by as much give steps
of the same size (section 5 there).
"""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.lion import lion_, lion_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.options import AdamWOptions, chosen_options, shows_options
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["Lion"]


class Lion(FusedOptimizer):
    """Lion with decoupled weight decay, fused; torch has none.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        betas: weights of the sum whose sign is the step, and of the momentum that is kept.
        weight_decay: weights are multiplied by 1 - lr * weight_decay in each step.
        **options: see AdamWOptions.

    State: `exp_avg`, of state_dtype, and `step`, which only stochastic rounding reads. Param groups
    and errors: see Adam.
    """

    _table_op = "lion_from_table_"

    @shows_options(AdamWOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[AdamWOptions],
    ) -> None:
        chosen = chosen_options(self, AdamWOptions, options)
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": chosen["maximize"],
            "foreach": chosen["foreach"],
            "capturable": chosen["capturable"],
            "differentiable": chosen["differentiable"],
            "fused": chosen["fused"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

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
