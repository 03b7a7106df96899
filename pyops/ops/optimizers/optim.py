"""Adam and AdamW over any number of parameters in one pass, together with everything around the
step.

    g = grad * grad_factor                      unscale and clip          (g = -g when maximize)
    g = g + wd * p                              L2, when not decoupled
    p = p * (1 - lr * wd)                       when decoupled
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g         vmax = max(vmax, v) with amsgrad
    p = p - lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps),   bc1 = 1 - beta1^step, bc2 = 1 - beta2^step

Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101, algorithm 2;
as torch.optim computes them. Parameter, gradient, moments, master and copy are fp32, bf16 or fp16,
each on its own; the arithmetic is fp32, with hyper-parameters rounded to it once from float64.
Bytes per element, everything fp32: 28 (p, g, m, v read, p, m, v written), and 4 more for a zeroed
gradient, 2 for a bf16 copy.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from pyops.ops.optimizers.table import EXP_AVG, EXP_AVG_SQ, OF_ANY_RULE, STEP, hidden_operands
from pyops.ops.random import signed64

__all__ = [
    "adam_",
    "adam_from_table_",
    "adam_from_table_reference",
    "adam_reference",
]

ADAM_COLUMNS = (*OF_ANY_RULE, EXP_AVG, EXP_AVG_SQ)


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
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
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """One step of Adam over every row of the lists, as the module's docstring writes it.

    Each list has one tensor per parameter. `max_exp_avg_sqs` (amsgrad), `masters` and `copies` may
    be empty, and a tensor with no elements in them means "none for this parameter". The tensors of
    a row have one shape and one dense layout.

    Args:
        steps: one fp32 number per row, on the parameter's device; incremented here.
        masters: computed on instead of the parameter, which receives the rounded master.
        copies: receive the rounded parameter (say, bf16 weights for the next forward pass).
        lr_tensor: one fp32 or float64 number on the device, instead of `lr`.
        grad_factor: one fp32 number, times every gradient.
        found_inf: one fp32 number; when not 0, nothing changes, except that zero_grads still zeroes
            the gradients.
        stochastic_rounding: 16-bit moments, and 16-bit parameters without master, are rounded up or
            down at random, unbiased. The random bits depend on (seed, step,
            param/exp_avg/exp_avg_sq, offsets[row] + element in memory order) alone: not on threads,
            and not on how a parameter is cut into shards whose offsets say where they start.
        offsets: one number per row, or empty for zeros.
    """
    torch.ops.pyops.adam_.default(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def adam_from_table_(
    table: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
) -> None:
    """`adam_` on an `optimizer_table`: one call whose cost does not grow with the number of
    tensors.

    Eager only; no version counters. A table without moments raises on the CPU; on CUDA its rows are
    passed over.
    """
    torch.ops.pyops.adam_from_table_.default(
        table,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def adam_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
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
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """The meaning of `adam_` in plain torch: within rounding of it, and with the same random
    bits."""

    def rule(o: Operands, step: int, lr: float) -> None:
        g, p, m, v = o.g, o.p, o.m, o.v
        if weight_decay != 0 and not decoupled:
            g = g + p * rounded(weight_decay, p)
        if decoupled:
            p = p * rounded(1 - lr * weight_decay, p)
        o.m = m + (g - m) * rounded(1 - beta1, m)
        o.v = largest = v * rounded(beta2, v) + g * g * rounded(1 - beta2, v)
        if o.top.numel():
            o.top = largest = torch.maximum(o.top, o.v)
        denominator = largest.sqrt() * rounded((1 - beta2**step) ** -0.5, v) + rounded(eps, v)
        o.p = p - rounded(lr / (1 - beta1**step), p) * (o.m / denominator)

    reference_step(
        (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps),
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
            offsets=offsets,
        ),
        required=ADAM_COLUMNS,
    )


adam_from_table_reference = table_reference(adam_reference, range(STEP + 1))

_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, Tensor(g!)[] copies, Tensor(h!)[] steps"
)
_SCALARS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
    f"bool maximize, {STEP_SCALARS}"
)
define(
    f"adam_({_LISTS}, {DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()",
    reference=adam_reference,
    fake=nothing,
)
define(
    f"adam_from_table_(Tensor table, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=adam_from_table_reference,
    fake=hidden_operands("adam_from_table_", "optim.adam_"),
)
