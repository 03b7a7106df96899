"""LARS over any number of layers: a row of the lists is a layer, whose gradient is scaled by the
norms of the row.

    g = grad * grad_factor                       unscale and clip          (g = -g when maximize)
    local = trust_coefficient * ||p|| / (||g|| + wd * ||p|| + eps), and 1 where either norm is 0
    g = local * (g + wd * p)
    b = momentum * b + (1 - dampening) * g       (b = g in the first step, as torch.optim.SGD)
    p = p - lr * (g + momentum * b  if nesterov, else b)

You, Gitman and Ginsburg, arXiv:1708.03888, algorithm 1, with the momentum of torch.optim.SGD: b
holds no learning rate. With trust_ratio=False, local is 1 and the step is torch.optim.SGD's. Bytes
per element, everything fp32: 8 for the norms, 20 for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.layer import (
    BOTH,
    FIRST_PASS,
    SECOND_PASS,
    check_layers,
    is_skipped,
    primary,
    reference_rows,
    squared,
)
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

__all__ = ["lars_", "lars_from_table_", "lars_from_table_reference", "lars_reference"]


def lars_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    nesterov: bool,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """One step of LARS over every row of the lists, as the module's docstring writes it; nothing is
    read back to the host.

    momentum_buffers may be empty when momentum is 0.

    All else: as of `adam_`.

    Args:
        norms: float64 [rows, 2], receives ||p||^2 and ||grad||^2 (before grad_factor) of each row,
            when trust_ratio.
        passes: as of `lamb_`.
    """
    torch.ops.pyops.lars_.default(
        params,
        grads,
        momentum_buffers,
        masters,
        copies,
        steps,
        norms,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        eps=eps,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
        maximize=maximize,
        passes=passes,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def lars_from_table_(
    table: Tensor,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    nesterov: bool,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
) -> None:
    """`lars_` on an `optimizer_table` whose exp_avg column holds the buffers. Eager only; no
    version counters."""
    torch.ops.pyops.lars_from_table_.default(
        table,
        norms,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        eps=eps,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
        maximize=maximize,
        passes=passes,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def lars_reference(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    nesterov: bool,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """The meaning of `lars_` in plain torch: within rounding of it, and with the same random
    bits."""
    lists: list[Tensors] = [params, grads, momentum_buffers, [], [], masters, copies, steps]
    required = (*OF_ANY_RULE, EXP_AVG) if momentum else OF_ANY_RULE
    check_layers(lists, norms, passes, offsets=offsets, required=required)
    factor = 1.0 if grad_factor is None else abs(float(grad_factor))
    for i, row in reference_rows(lists, passes=passes, found_inf=found_inf):
        if passes & FIRST_PASS and trust_ratio and not is_skipped(found_inf):
            norms[i] = torch.stack([squared(primary(params, masters, i)), squared(grads[i])])
        local = 1.0
        if trust_ratio and norms[i].min() != 0:
            p_norm, g_norm = norms[i].sqrt().tolist()
            local = trust_coefficient * p_norm / (g_norm * factor + weight_decay * p_norm + eps)

        def rule(o: Operands, step: int, lr: float, local: float = local) -> None:
            g = (o.g + o.p * rounded(weight_decay, o.p) if weight_decay else o.g) * rounded(
                local, o.g
            )
            if momentum:
                o.m = (
                    g if step == 1 else o.m * rounded(momentum, o.m) + g * rounded(1 - dampening, g)
                )
                g = g + o.m * rounded(momentum, o.m) if nesterov else o.m
            o.p = o.p - g * rounded(lr, g)

        if passes & SECOND_PASS:
            reference_step(
                row,
                rule,
                StepContext(
                    lr=lr,
                    lr_tensor=lr_tensor,
                    grad_factor=grad_factor,
                    found_inf=found_inf,
                    maximize=maximize,
                    zero_grads=zero_grads,
                    stochastic_rounding=stochastic_rounding,
                    seed=seed,
                    offsets=offsets[i : i + 1],
                ),
                required=required,
            )


lars_from_table_reference = table_reference(
    lars_reference, (PARAM, GRAD, EXP_AVG, MASTER, COPY, STEP)
)

_SCALARS = (
    "float lr, float momentum, float dampening, float weight_decay, float "
    "trust_coefficient, float eps, bool nesterov, "
    "bool trust_ratio, bool maximize, int passes, " + STEP_SCALARS
)
define(
    "lars_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, "
    "Tensor(d!)[] masters, Tensor(e!)[] copies, "
    f"Tensor(f!)[] steps, Tensor(g!) norms, {DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()",
    reference=lars_reference,
    fake=nothing,
)
define(
    f"lars_from_table_(Tensor table, Tensor(a!) norms, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=lars_from_table_reference,
    fake=hidden_operands("lars_from_table_", "lars.lars_"),
)
