"""Adagrad: torch.optim.Adagrad's signature and numbers, in one launch per param group.

    Adagrad(model.parameters(), lr=1e-2, lr_decay=1e-4)            20 bytes per float32 parameter

The formula is that of pyops/ops/optimizers/adagrad.py: Duchi et al., JMLR 12 (2011), section 1.1,
as torch has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.adagrad import adagrad_, adagrad_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.options import AdagradOptions, chosen_options, shows_options
from pyops.optim.fused.param_state import complete_state
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    """torch.optim.Adagrad, fused; for dense gradients only.

    All arguments of torch.optim.Adagrad have its meaning, by position and by keyword.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        lr_decay: the rate of step t is lr / (1 + (t - 1) * lr_decay).
        weight_decay: L2 coefficient.
        initial_accumulator_value: first value of the sums of squares.
        eps: added to the root of the sum.
        foreach: torch.optim's, without effect.
        **options: see AdagradOptions.

    State: `sum`, of state_dtype, and `step`. As in torch, parameters that are given to the
    constructor have them from the start. A sum in 16 bits stops growing once the squares are small
    beside it, unless stochastic_rounding is on. Param groups and errors: see Adam.
    """

    _table_op = "adagrad_from_table_"

    @shows_options(AdagradOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        **options: Unpack[AdagradOptions],
    ) -> None:
        chosen = chosen_options(self, AdagradOptions, options)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": chosen["maximize"],
            "differentiable": chosen["differentiable"],
            "fused": chosen["fused"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)
        for group in self.param_groups:
            for param in group["params"]:
                self._begin(group, param, self.state[param])

    def _begin(self, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> None:
        """Make what is missing but for a master, which must be the parameter at the first step."""
        if "sum" not in state:
            state["sum"] = torch.full_like(
                param,
                group["initial_accumulator_value"],
                dtype=self.state_dtype,
                memory_format=torch.preserve_format,
            ).detach()
        complete_state(state, param, moments=["sum"], state_dtype=self.state_dtype, master=False)

    def _complete(self, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> None:
        self._begin(group, param, state)
        super()._complete(group, param, state)

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return None, "sum", None

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        scalars = self._scalars(group, lr) | {"lr_decay": group["lr_decay"], "eps": group["eps"]}
        if isinstance(work, Tensor):
            adagrad_from_table_(work, lr, factor, skip, **scalars)
        else:
            params, grads, _, sums, _, masters, copies, steps = work.columns
            adagrad_(
                params,
                grads,
                sums,
                masters,
                copies,
                steps,
                lr,
                factor,
                skip,
                **scalars,
                offsets=work.offsets,
            )
