"""Adagrad over any number of parameters in one pass.

    g = grad * grad_factor                       unscale and clip       (g = -g when maximize)
    g = g + wd * p
    s = s + g * g
    p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

Duchi et al., Adaptive Subgradient Methods, JMLR 12 (2011), section 1.1 (the diagonal form);
lr_decay and weight decay as torch.optim.Adagrad has them. Bytes per fp32 element: 20 (p, g, s read,
p, s written).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.step import (
    DEVICE_SCALARS,
    STEP_SCALARS,
    Operands,
    StepContext,
    Tensors,
    nothing,
    reference_step,
    rounded,
    table_reference,
)
from pyops.ops.optimizers.table import (
    COPY,
    EXP_AVG_SQ,
    GRAD,
    MASTER,
    OF_ANY_RULE,
    PARAM,
    STEP,
    hidden_operands,
)
from pyops.ops.random import signed64

__all__ = ["adagrad_", "adagrad_from_table_", "adagrad_from_table_reference", "adagrad_reference"]


def adagrad_(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] = (),
) -> None:
    """One step of Adagrad over every row of the lists, as the module's docstring writes it.

    Everything else is as of `adam_`.

    Args:
        sums: the sums of squares s; an initial value is the caller's affair.
    """
    torch.ops.pyops.adagrad_.default(
        params,
        grads,
        sums,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def adagrad_from_table_(
    table: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """`adagrad_` on an `optimizer_table` whose exp_avg_sqs are the sums. Eager only; no version
    counters."""
    torch.ops.pyops.adagrad_from_table_.default(
        table,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def adagrad_reference(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    **step_options: Any,
) -> None:
    """The meaning of `adagrad_` in plain torch: within rounding of it, and with the same random
    bits."""

    def rule(o: Operands, step: int, lr: float) -> None:
        g = o.g + o.p * rounded(weight_decay, o.p) if weight_decay != 0 else o.g
        o.v = o.v + g * g
        o.p = o.p - g / (o.v.sqrt() + rounded(eps, g)) * rounded(
            lr / (1 + (step - 1) * lr_decay), g
        )

    lists: Sequence[Tensors] = (params, grads, [], sums, [], masters, copies, steps)
    reference_step(
        lists,
        rule,
        StepContext(
            lr=lr,
            lr_tensor=lr_tensor,
            grad_factor=grad_factor,
            found_inf=found_inf,
            maximize=maximize,
            **step_options,
        ),
        required=(*OF_ANY_RULE, EXP_AVG_SQ),
    )


adagrad_from_table_reference = table_reference(
    adagrad_reference, (PARAM, GRAD, EXP_AVG_SQ, MASTER, COPY, STEP)
)

_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] sums, Tensor(d!)[] masters, "
    "Tensor(e!)[] copies, Tensor(f!)[] steps"
)
_SCALARS = f"float lr, float lr_decay, float weight_decay, float eps, bool maximize, {STEP_SCALARS}"
define(
    f"adagrad_({_LISTS}, {DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()",
    reference=adagrad_reference,
    fake=nothing,
)
define(
    f"adagrad_from_table_(Tensor table, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=adagrad_from_table_reference,
    fake=hidden_operands("adagrad_from_table_", "adagrad.adagrad_"),
)
