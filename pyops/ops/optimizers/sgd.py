"""SGD, with and without momentum, over any number of parameters in one pass.

    g = grad * grad_factor                       unscale and clip       (g = -g when maximize)
    g = g + wd * p
    b = momentum * b + (1 - dampening) * g       b = g in a row's first step
    g = b                                        g + momentum * b with nesterov
    p = p - lr * g

Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013,
section 2; dampening and the first step as torch.optim.SGD has them. Bytes per fp32 element: 12 (p,
g read, p written), and with momentum 20.
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

__all__ = ["sgd_", "sgd_from_table_", "sgd_from_table_reference", "sgd_reference"]


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] = (),
) -> None:
    """One step of SGD over every row of the lists, as the module's docstring writes it.

    Everything else is as of `adam_`.

    Args:
        momentum_buffers: may be empty when momentum is 0, and then is left alone. The first step of
            a row, by `steps`, keeps nothing of its buffer.
    """
    torch.ops.pyops.sgd_.default(
        params,
        grads,
        momentum_buffers,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def sgd_from_table_(
    table: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """`sgd_` on an `optimizer_table` whose exp_avgs are the momentum buffers. Eager only; no
    version counters."""
    torch.ops.pyops.sgd_from_table_.default(
        table,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def sgd_reference(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    **step_options: Any,
) -> None:
    """The meaning of `sgd_` in plain torch: within rounding of it, and with the same random
    bits."""

    def rule(o: Operands, step: int, lr: float) -> None:
        g = o.g + o.p * rounded(weight_decay, o.p) if weight_decay != 0 else o.g
        if momentum != 0:
            first = step == 1
            keep, add = (
                rounded(0.0 if first else momentum, g),
                rounded(1.0 if first else 1 - dampening, g),
            )
            o.m = o.m * keep + g * add
            g = g + o.m * rounded(momentum, g) if nesterov else o.m
        o.p = o.p - g * rounded(lr, g)

    lists: Sequence[Tensors] = (params, grads, momentum_buffers, [], [], masters, copies, steps)
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
        required=(*OF_ANY_RULE, EXP_AVG) if momentum else OF_ANY_RULE,
    )


sgd_from_table_reference = table_reference(
    sgd_reference, (PARAM, GRAD, EXP_AVG, MASTER, COPY, STEP)
)

_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, Tensor(d!)[] masters, "
    "Tensor(e!)[] copies, Tensor(f!)[] steps"
)
_SCALARS = (
    "float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool "
    f"maximize, {STEP_SCALARS}"
)
define(
    f"sgd_({_LISTS}, {DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()",
    reference=sgd_reference,
    fake=nothing,
)
define(
    f"sgd_from_table_(Tensor table, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=sgd_from_table_reference,
    fake=hidden_operands("sgd_from_table_", "sgd.sgd_"),
)
