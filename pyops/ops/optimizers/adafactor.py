"""Adafactor over any number of tensors: the second moment of a matrix from the means of its rows
and columns.

    g = grad * grad_factor                        unscale and clip          (g = -g when maximize)
    w = step^beta2_decay
    row = (1 - w) row + w mean_columns(g^2)       of the last two dimensions
    col = (1 - w) col + w mean_rows(g^2)
    V = row col / max(mean(row), eps1)            a vector: V = (1 - w) V + w g^2
    u = g / max(sqrt(V), eps1)
    alpha = max(eps2, rms(p)) * min(lr, 1 / sqrt(step))
    p = p * (1 - lr * wd) - alpha / max(1, rms(u) / d) * u

Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, as torch.optim.Adafactor computes it:
rms(p) is that before the decay, and both are over the whole tensor. Sums are float64 in an order
that depends on shapes alone. Bytes per fp32 element of a matrix: 24 in three passes (p, g read; g
read; p, g read, p written).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.layer import SECOND_PASS, primary, reference_rows, squared
from pyops.ops.optimizers.step import (
    DEVICE_SCALARS,
    STEP_SCALARS,
    Operands,
    StepContext,
    Tensors,
    nothing,
    reference_step,
    rounded,
)
from pyops.ops.optimizers.table import table_of
from pyops.ops.random import signed64

__all__ = ["adafactor_", "adafactor_reference"]


def adafactor_(
    params: Tensors,
    grads: Tensors,
    row_vars: Tensors,
    col_vars: Tensors,
    variances: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta2_decay: float,
    eps1: float,
    eps2: float,
    d: float,
    weight_decay: float,
    maximize: bool,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """One step of Adafactor over every tensor of the lists, as the module's docstring writes it;
    nothing is read to the host.

    params, and with them all of a row, are contiguous.

    Args:
        row_vars, col_vars: fp32, contiguous, [..., rows, 1] and [..., 1, columns] for each
            parameter of two or more dimensions.
        variances: fp32 of the parameter's shape for each other; an empty tensor for the rest.
        eps1: below 0 it stands for the eps of the dtype that is stepped (the master's, where there
            is one).

    The other lists and scalars are those of `adam_`; only parameters are rounded stochastically.
    """
    torch.ops.pyops.adafactor_.default(
        params,
        grads,
        row_vars,
        col_vars,
        variances,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta2_decay=beta2_decay,
        eps1=eps1,
        eps2=eps2,
        d=d,
        weight_decay=weight_decay,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
        offsets=offsets,
    )


def _check(params: Tensors, row_vars: Tensors, col_vars: Tensors, variances: Tensors) -> None:
    for i, p in enumerate(params):
        if not p.is_contiguous():
            raise ValueError(
                f"params[{i}] with strides {p.stride()} must be contiguous: rows and "
                "columns need it"
            )
        wanted = [("variances", variances, p.numel())]
        if p.dim() > 1 and p.numel():
            wanted = [
                ("row_vars", row_vars, p.numel() // p.shape[-1]),
                ("col_vars", col_vars, p.numel() // p.shape[-2]),
            ]
        for name, tensors, numel in wanted if p.numel() else []:
            t = tensors[i]
            if t.dtype != torch.float32 or t.numel() != numel or not t.is_contiguous():
                raise ValueError(
                    f"{name}[{i}] must be a contiguous float32 tensor of {numel} "
                    f"elements, got {tuple(t.shape)}"
                )


def _roots(
    p: Tensor, g: Tensor, row: Tensor, col: Tensor, variance: Tensor, weight: float, eps1: float
) -> Tensor:
    """The variances moved in place, and max(sqrt(V), eps1)."""
    square = g.double().square()
    if p.dim() > 1:
        square = square.view(p.shape)
        row.copy_(torch.lerp(row.double(), square.mean(-1).view(row.shape), weight))
        col.copy_(torch.lerp(col.double(), square.mean(-2).view(col.shape), weight))
        rows = row.view(*p.shape[:-1], 1)
        divisor = rows.double().mean(-2, keepdim=True).clamp(min=eps1)
        root = (rows.double() / divisor).sqrt().float() * col.view(
            *p.shape[:-2], 1, p.shape[-1]
        ).sqrt()
    else:
        variance.copy_(torch.lerp(variance.double(), square.view(variance.shape), weight))
        root = variance.sqrt()
    return root.clamp(min=eps1).reshape(-1)


def adafactor_reference(
    params: Tensors,
    grads: Tensors,
    row_vars: Tensors,
    col_vars: Tensors,
    variances: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta2_decay: float,
    eps1: float,
    eps2: float,
    d: float,
    weight_decay: float,
    maximize: bool,
    zero_grads: bool,
    stochastic_rounding: bool,
    seed: int,
    offsets: Sequence[int],
) -> None:
    """The meaning of `adafactor_` in plain torch: within rounding of it, and with the same random
    bits."""
    lists: list[Tensors] = [params, grads, [], [], [], masters, copies, steps]
    table_of(lists, offsets)
    _check(params, row_vars, col_vars, variances)
    for i, row in reference_rows(lists, passes=SECOND_PASS, found_inf=found_inf):
        stepped = primary(params, masters, i)
        least = torch.finfo(stepped.dtype).eps if eps1 < 0 else eps1
        rms_p = float(squared(stepped) / max(stepped.numel(), 1)) ** 0.5

        def rule(
            o: Operands,
            step: int,
            lr: float,
            i: int = i,
            least: float = least,
            rms_p: float = rms_p,
        ) -> None:
            root = _roots(
                params[i], o.g, row_vars[i], col_vars[i], variances[i], step**beta2_decay, least
            )
            u = o.g / root
            alpha = max(eps2, rms_p) * min(lr, step**-0.5)
            rms_u = float(squared(u) / u.numel()) ** 0.5
            o.p = (
                o.p * rounded(1 - lr * weight_decay, o.p)
                - rounded(alpha / max(1.0, rms_u / d), u) * u
            )

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
        )


define(
    "adafactor_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] row_vars, "
    "Tensor(d!)[] col_vars, "
    "Tensor(e!)[] variances, Tensor(f!)[] masters, Tensor(g!)[] copies, Tensor(h!)[] steps, "
    f"{DEVICE_SCALARS}, *, float lr, float beta2_decay, float eps1, float eps2, float d, "
    "float weight_decay, bool maximize, "
    f"{STEP_SCALARS}, int[] offsets) -> ()",
    reference=adafactor_reference,
    fake=nothing,
)
