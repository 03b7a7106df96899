"""LAMB over any number of layers in two passes: a row of the lists is a layer, with norms of its
own.

    g = grad * grad_factor                       unscale and clip          (g = -g when maximize)
    m = m + (1 - beta1) * (g - m)                                          first pass
    v = beta2 * v + (1 - beta2) * g * g
    u = m / bc1 / (sqrt(v) / sqrt(bc2) + eps) + wd * p
        with bc1 = 1 - beta1^step, bc2 = 1 - beta2^step
    ratio = min(max(||p|| / ||u||, min_ratio), max_ratio), and 1 where either norm is 0
    p = p - lr * ratio * u                       second pass, u computed anew

You et al., arXiv:1904.00962, algorithm 2, with bias correction and phi the identity. With
trust_ratio=False the step is AdamW's, bit for bit. Norms are float64 sums in an order that depends
on the row's length alone, of the moments as they are stored. Bytes per element, everything fp32: 24
in the first pass (p, g, m, v read, m, v written), 16 in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from pyops.ops.optimizers.optim import adam_reference
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
    EXP_AVG_SQ,
    GRAD,
    MASTER,
    OF_ANY_RULE,
    PARAM,
    STEP,
    hidden_operands,
)
from pyops.ops.random import signed64

__all__ = ["lamb_", "lamb_from_table_", "lamb_from_table_reference", "lamb_reference"]

LAMB_COLUMNS = (*OF_ANY_RULE, EXP_AVG, EXP_AVG_SQ)


def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    min_ratio: float,
    max_ratio: float,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """One step of LAMB over every row of the lists, as the module's docstring writes it; nothing is
    read back to the host.

    The lists, lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed and offsets
    are those of `adam_`.

    Args:
        norms: float64 [rows, 2], receives ||p||^2 and ||u||^2 of each row (when trust_ratio).
        passes: 1 for the first pass alone, 2 for the second with the norms given (made by the
            first, summed over the processes that hold a row's shards), 3 for both. `steps` are
            incremented by the second.
    """
    torch.ops.pyops.lamb_.default(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        masters,
        copies,
        steps,
        norms,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        min_ratio=min_ratio,
        max_ratio=max_ratio,
        trust_ratio=trust_ratio,
        maximize=maximize,
        passes=passes,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def lamb_from_table_(
    table: Tensor,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    min_ratio: float,
    max_ratio: float,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
) -> None:
    """`lamb_` on an `optimizer_table`. Eager only; no version counters."""
    torch.ops.pyops.lamb_from_table_.default(
        table,
        norms,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        min_ratio=min_ratio,
        max_ratio=max_ratio,
        trust_ratio=trust_ratio,
        maximize=maximize,
        passes=passes,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )


def _update(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    denominator = v.sqrt() * rounded((1 - beta2**step) ** -0.5, v) + rounded(eps, v)
    return m / denominator * rounded(1 / (1 - beta1**step), m) + p * rounded(weight_decay, p)


def lamb_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    norms: Tensor,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    min_ratio: float,
    max_ratio: float,
    trust_ratio: bool,
    maximize: bool,
    passes: int = BOTH,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """The meaning of `lamb_` in plain torch: within rounding of it, and with the same random
    bits."""
    lists: list[Tensors] = [params, grads, exp_avgs, exp_avg_sqs, [], masters, copies, steps]
    check_layers(lists, norms, passes, offsets=offsets, required=LAMB_COLUMNS)
    step_options: dict[str, Any] = {
        "lr_tensor": lr_tensor,
        "found_inf": found_inf,
        "stochastic_rounding": stochastic_rounding,
        "seed": seed,
    }
    if not trust_ratio:
        if passes & SECOND_PASS:
            columns: list[Any] = [*lists, lr_tensor, grad_factor, found_inf]
            adam_reference(
                *columns,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                decoupled=True,
                maximize=maximize,
                zero_grads=zero_grads,
                stochastic_rounding=stochastic_rounding,
                seed=seed,
                offsets=offsets,
            )
        return
    of_update = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}

    def moments(o: Operands, step: int, lr: float) -> None:
        o.m = o.m + (o.g - o.m) * rounded(1 - beta1, o.m)
        o.v = o.v * rounded(beta2, o.v) + o.g * o.g * rounded(1 - beta2, o.v)

    for i, row in reference_rows(lists, passes=passes, found_inf=found_inf):
        numbers = offsets[i : i + 1]
        if passes & FIRST_PASS:
            first = [*row[:6], [], [steps[i].clone()]]
            reference_step(
                first,
                moments,
                StepContext(
                    lr=lr,
                    grad_factor=grad_factor,
                    maximize=maximize,
                    zero_grads=zero_grads,
                    offsets=numbers,
                    **step_options,
                ),
                required=LAMB_COLUMNS,
            )
            if not is_skipped(found_inf):
                p, m, v = (
                    primary(params, masters, i).float(),
                    exp_avgs[i].float(),
                    exp_avg_sqs[i].float(),
                )
                u = _update(p, m, v, step=int(first[7][0].item()), **of_update)
                norms[i] = torch.stack([squared(p), squared(u)])
        if passes & SECOND_PASS:
            ratio = (
                1.0
                if norms[i].min() == 0
                else min(max(float((norms[i, 0] / norms[i, 1]).sqrt()), min_ratio), max_ratio)
            )

            def apply(o: Operands, step: int, lr: float, ratio: float = ratio) -> None:
                update = _update(o.p, o.m, o.v, step=step, **of_update)
                o.p = o.p - update * rounded(lr * ratio, o.p)

            reference_step(
                row,
                apply,
                StepContext(lr=lr, offsets=numbers, **step_options),
                required=LAMB_COLUMNS,
            )


lamb_from_table_reference = table_reference(
    lamb_reference, (PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, COPY, STEP)
)

_SCALARS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, float min_ratio, "
    "float max_ratio, bool trust_ratio, "
    "bool maximize, int passes, " + STEP_SCALARS
)
define(
    "lamb_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] "
    "exp_avg_sqs, Tensor(e!)[] masters, "
    f"Tensor(f!)[] copies, Tensor(g!)[] steps, Tensor(h!) norms, {DEVICE_SCALARS}, *, "
    f"{_SCALARS}, int[] offsets) -> ()",
    reference=lamb_reference,
    fake=nothing,
)
define(
    f"lamb_from_table_(Tensor table, Tensor(a!) norms, {DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=lamb_from_table_reference,
    fake=hidden_operands("lamb_from_table_", "lamb.lamb_"),
)
