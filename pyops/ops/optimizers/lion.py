"""Lion over any number of parameters in one pass.

    g = grad * grad_factor                       unscale and clip       (g = -g when maximize)
    u = sign(beta1 * m + (1 - beta1) * g)        0 where the sum is 0; a nan stays
    p = p * (1 - lr * wd) - lr * u
    m = beta2 * m + (1 - beta2) * g

Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2. Bytes per
fp32 element: 20 (p, g, m read, p, m written).
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
    EXP_AVG,
    GRAD,
    MASTER,
    OF_ANY_RULE,
    PARAM,
    STEP,
    hidden_operands,
)
from pyops.ops.random import signed64

__all__ = ["lion_", "lion_from_table_", "lion_from_table_reference", "lion_reference"]


def lion_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] = (),
) -> None:
    """One step of Lion over every row of the lists, as the module's docstring writes it.

    Everything else is as of `adam_`.

    Args:
        exp_avgs: the momentum m.
    """
    torch.ops.pyops.lion_.default(
        params,
        grads,
        exp_avgs,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def lion_from_table_(
    table: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """`lion_` on an `optimizer_table` with exp_avgs. Eager only; no version counters."""
    torch.ops.pyops.lion_from_table_.default(
        table,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def lion_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    **step_options: Any,
) -> None:
    """The meaning of `lion_` in plain torch: within rounding of it, and with the same random
    bits."""

    def rule(o: Operands, step: int, lr: float) -> None:
        direction = o.m * rounded(beta1, o.m) + o.g * rounded(1 - beta1, o.g)
        u = torch.where(direction.isnan(), direction, direction.sign())
        o.m = o.m * rounded(beta2, o.m) + o.g * rounded(1 - beta2, o.g)
        o.p = o.p * rounded(1 - lr * weight_decay, o.p) - u * rounded(lr, u)

    lists: Sequence[Tensors] = (params, grads, exp_avgs, [], [], masters, copies, steps)
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
        required=(*OF_ANY_RULE, EXP_AVG),
    )


lion_from_table_reference = table_reference(
    lion_reference, (PARAM, GRAD, EXP_AVG, MASTER, COPY, STEP)
)

_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] masters, "
    "Tensor(e!)[] copies, Tensor(f!)[] steps"
)
_SCALARS = f"float lr, float beta1, float beta2, float weight_decay, bool maximize, {STEP_SCALARS}"
define(
    f"lion_({_LISTS}, {DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()",
    reference=lion_reference,
    fake=nothing,
)
define(
    f"lion_from_table_(Tensor table, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=lion_from_table_reference,
    fake=hidden_operands("lion_from_table_", "lion.lion_"),
)
