"""Adam and AdamW: torch.optim's signatures and numbers, in one launch per param group.

    AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)    clip inside the step
    AdamW(model.bfloat16().parameters(), master_weights=True)          float32 masters and moments
    AdamW(model.bfloat16().parameters(), state_dtype=torch.bfloat16, stochastic_rounding=True)
                                                                       14 bytes per parameter

The formulas are those of pyops/ops/optimizers/optim.py.
Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.optim import adam_, adam_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.input_checks import number
from pyops.optim.fused.options import AdamOptions, AdamWOptions, chosen_options, shows_options
from pyops.optim.fused.table_rows import PARAM, TableRows, table_rows_of
from pyops.protocols import ParamGroup

__all__ = ["Adam", "AdamW"]


class Adam(FusedOptimizer):
    """torch.optim.Adam, fused: L2 weight decay is added to the gradient.

    All arguments of torch.optim.Adam have its meaning, by position and by keyword.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: L2 coefficient.
        amsgrad: divide by the largest second moment so far (Reddi et al., ICLR 2018).
        **options: see AdamOptions.

    A param group may carry two more lists, one entry for each parameter. `copies`: None or a
    tensor of the parameter's shape that receives the rounded parameter in the same pass, such as
    16-bit weights for the next forward pass. `offsets`: the number of the parameter's first
    element, where it is a shard of something larger.

    Raises:
        TypeError: for a name that is not an option, or a value of the wrong type.
        ValueError: for a value out of range, or a parameter that can't be stepped. Like every
            error of a step, it names the value or parameter, and comes before anything changes.
    """

    _table_op = "adam_from_table_"
    _decoupled = False

    @shows_options(AdamOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[AdamOptions],
    ) -> None:
        chosen = chosen_options(self, AdamOptions, options)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": chosen["maximize"],
            "foreach": chosen["foreach"],
            "fused": chosen["fused"],
            "capturable": chosen["capturable"],
            "differentiable": chosen["differentiable"],
            "decoupled_weight_decay": chosen["decoupled_weight_decay"] or self._decoupled,
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

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

    @torch.no_grad()
    def step_by(self, launch: Callable[..., None]) -> None:
        """A step whose kernel is another's, of a caller that sums gradients in it, say.

        Args:
            launch: Called once for each param group, also for one without gradients, so that
                several ranks launch equally often: launch(lists, lr_tensor, lr=..., beta1=...,
                beta2=..., eps=..., weight_decay=..., decoupled=..., maximize=...), where `lists`
                are those of `adam_` from its params to its steps.
        """
        indices = [
            [i for i, p in enumerate(group["params"]) if p.grad is not None]
            for group in self.param_groups
        ]
        for group, wanted in zip(self.param_groups, indices, strict=True):
            self._check_group(group)
            self._check_rows(group, wanted)
        for group, wanted in zip(self.param_groups, indices, strict=True):
            rows = [row for some in self._gather(group, wanted).values() for row in some]
            lists = (
                table_rows_of(rows, zero_grads=False).columns if rows else [[] for _ in range(8)]
            )
            lr, (beta1, beta2) = group["lr"], group["betas"]
            rate = None
            if isinstance(lr, Tensor) and number(lr) is None and rows:
                rate = lr.reshape(()).to(rows[0].device, torch.float32)
            launch(
                lists,
                rate,
                lr=float(lr) if rate is None else 0.0,
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=group["decoupled_weight_decay"],
                maximize=group["maximize"],
            )
            torch.autograd.graph.increment_version(lists[PARAM])


class AdamW(Adam):
    """torch.optim.AdamW, fused: weights decay apart from the gradient.

    All arguments of torch.optim.AdamW have its meaning, by position and by keyword.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: weights are multiplied by 1 - lr * weight_decay in each step.
        amsgrad: divide by the largest second moment so far.
        **options: see AdamWOptions.

    Param groups and errors: see Adam.
    """

    _decoupled = True

    @shows_options(AdamWOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[AdamWOptions],
    ) -> None:
        chosen_options(self, AdamWOptions, options)  # Adam has one more, which AdamW refuses
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
