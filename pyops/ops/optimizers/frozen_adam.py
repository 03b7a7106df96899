"""Adam in two halves, for optimizers that average the momentum over ranks and keep the variance as
it was at some step.

    momentum_       m = m + (1 - beta) * (g * grad_factor - m)
    frozen_adam_    p = p * (1 - lr * wd) - lr * m / (sqrt(v) + eps)
                    the last term only where v is not 0

Tang et al., 1-bit Adam, arXiv:2102.02888, algorithm 1. An element whose variance is 0 never had a
gradient: Adam leaves it but for its decay, and so does frozen_adam_, whatever its momentum. Bytes
per fp32 element: 12 (m, g read, m written) and 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.step import (
    Operands,
    StepContext,
    Tensors,
    nothing,
    reference_step,
    rounded,
)
from pyops.ops.optimizers.table import EXP_AVG, EXP_AVG_SQ, GRAD, PARAM

__all__ = ["frozen_adam_", "frozen_adam_reference", "momentum_", "momentum_reference"]


def frozen_adam_(
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors = (),
    copies: Tensors = (),
    lr_tensor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Move params by `exp_avgs / (sqrt(exp_avg_sqs) + eps)`, which are only read and are used as
    they are (no bias correction).

    Lists of one length; the tensors of a row have one shape, one dense layout, and are fp32, bf16
    or fp16, both moments alike.

    Args:
        masters, copies: as of `adam_`; each may be empty, and an empty tensor in it means none for
            this row.
        lr_tensor: one fp32 or float64 number on the device, instead of `lr`.
        found_inf: one fp32 number; when not 0, nothing changes.
    """
    torch.ops.pyops.frozen_adam_.default(
        params,
        exp_avgs,
        exp_avg_sqs,
        masters,
        copies,
        lr_tensor,
        found_inf,
        lr=lr,
        eps=eps,
        weight_decay=weight_decay,
    )


def momentum_(
    exp_avgs: Tensors,
    grads: Tensors,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    beta: float,
    zero_grads: bool = False,
) -> None:
    """Take the gradients into the running means, with the bits of `adam_`'s exp_avg.

    Args:
        grad_factor: one fp32 number, times every gradient.
        found_inf: one fp32 number; when not 0, nothing changes, except that zero_grads still zeroes
            the gradients. Lists and tensors as of `frozen_adam_`.
    """
    torch.ops.pyops.momentum_.default(
        exp_avgs, grads, grad_factor, found_inf, beta=beta, zero_grads=zero_grads
    )


def frozen_adam_reference(
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors = (),
    copies: Tensors = (),
    lr_tensor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The meaning of `frozen_adam_` in plain torch."""

    def rule(o: Operands, step: int, lr: float) -> None:
        update = torch.where(
            o.v == 0, torch.zeros_like(o.m), o.m / (o.v.sqrt() + rounded(eps, o.v))
        )
        o.p = o.p * rounded(1 - lr * weight_decay, o.p) - rounded(lr, o.p) * update

    lists: Sequence[Tensors] = (params, [], exp_avgs, exp_avg_sqs, [], masters, copies, [])
    reference_step(
        lists,
        rule,
        StepContext(lr=lr, lr_tensor=lr_tensor, found_inf=found_inf),
        required=(PARAM, EXP_AVG, EXP_AVG_SQ),
    )


def momentum_reference(
    exp_avgs: Tensors,
    grads: Tensors,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    beta: float,
    zero_grads: bool = False,
) -> None:
    """The meaning of `momentum_` in plain torch."""

    def rule(o: Operands, step: int, lr: float) -> None:
        o.p = o.p + (o.g - o.p) * rounded(1 - beta, o.p)

    reference_step(
        (exp_avgs, grads, [], [], [], [], [], []),
        rule,
        StepContext(lr=0.0, grad_factor=grad_factor, found_inf=found_inf, zero_grads=zero_grads),
        required=(PARAM, GRAD),
    )


define(
    "frozen_adam_(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, "
    "Tensor(b!)[] masters, Tensor(c!)[] copies, "
    "Tensor? lr_tensor, Tensor? found_inf, *, float lr, float eps, float weight_decay) -> ()",
    reference=frozen_adam_reference,
    fake=nothing,
)
define(
    "momentum_(Tensor(a!)[] exp_avgs, Tensor(b!)[] grads, Tensor? grad_factor, Tensor? "
    "found_inf, *, float beta, "
    "bool zero_grads) -> ()",
    reference=momentum_reference,
    fake=nothing,
)
