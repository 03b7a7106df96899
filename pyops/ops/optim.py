"""Adam and AdamW over any number of parameters in one pass, together with everything around the step.

    g = grad * grad_factor                      unscale and clip          (g = -g when maximize)
    g = g + wd * p                              L2, when not decoupled
    p = p * (1 - lr * wd)                       when decoupled
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g         vmax = max(vmax, v) with amsgrad
    p = p - lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps),   bc1 = 1 - beta1^step, bc2 = 1 - beta2^step

Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; as torch.optim computes
them. Parameter, gradient, moments, master and copy are fp32, bf16 or fp16, each on its own; the arithmetic is fp32, with
hyper-parameters rounded to it once from float64. Bytes per element, everything fp32: 28 (p, g, m, v read, p, m, v written),
and 4 more for a zeroed gradient, 2 for a bf16 copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.random import philox_words, signed64
from pyops.ops.table import (
    COLUMNS,
    COPY,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    MASTER,
    MAX,
    OF_ANY_RULE,
    OFFSET,
    PARAM,
    STEP,
    hidden_operands,
    table_of,
    tensor_at,
)

__all__ = [
    "adam_",
    "adam_from_table_",
    "adam_from_table_reference",
    "adam_reference",
    "round_stochastically",
]

Tensors = Sequence[Tensor]
ADAM_COLUMNS = (*OF_ANY_RULE, EXP_AVG, EXP_AVG_SQ)


def adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, masters: Tensors,
    copies: Tensors, steps: Tensors, lr_tensor: Tensor | None = None, grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    decoupled: bool, maximize: bool, zero_grads: bool, stochastic_rounding: bool, seed: int, offsets: Sequence[int],
) -> None:  # fmt: skip
    """One step of Adam over every row of the lists, as the module's docstring writes it.

    Each list has one tensor per parameter. `max_exp_avg_sqs` (amsgrad), `masters` and `copies` may be empty, and a tensor
    with no elements in them means "none for this parameter". The tensors of a row have one shape and one dense layout.

    steps: one fp32 number per row, on the parameter's device; incremented here.
    masters: computed on instead of the parameter, which receives the rounded master.
    copies: receive the rounded parameter (say, bf16 weights for the next forward pass).
    lr_tensor: one fp32 or float64 number on the device, instead of `lr`. grad_factor: one fp32 number, times every gradient.
    found_inf: one fp32 number; when not 0, nothing changes, except that zero_grads still zeroes the gradients.
    stochastic_rounding: 16-bit moments, and 16-bit parameters without master, are rounded up or down at random, unbiased.
        The random bits depend on (seed, step, param/exp_avg/exp_avg_sq, offsets[row] + element in memory order) alone: not on
        threads, and not on how a parameter is cut into shards whose offsets say where they start.
    offsets: one number per row, or empty for zeros.
    """
    torch.ops.pyops.adam_.default(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps, lr_tensor, grad_factor, found_inf,
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, maximize=maximize,
        zero_grads=zero_grads, stochastic_rounding=stochastic_rounding, seed=signed64(seed), offsets=offsets,
    )  # fmt: skip


def adam_from_table_(
    table: Tensor, lr_tensor: Tensor | None = None, grad_factor: Tensor | None = None, found_inf: Tensor | None = None, *,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool,
    zero_grads: bool, stochastic_rounding: bool, seed: int,
) -> None:  # fmt: skip
    """`adam_` on an `optimizer_table`: one call whose cost does not grow with the number of tensors.

    Eager only; no version counters. A table without moments raises on the CPU; on CUDA its rows are passed over.
    """
    torch.ops.pyops.adam_from_table_.default(
        table, lr_tensor, grad_factor, found_inf, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
        decoupled=decoupled, maximize=maximize, zero_grads=zero_grads, stochastic_rounding=stochastic_rounding,
        seed=signed64(seed),
    )  # fmt: skip


def _memory_order(t: Tensor) -> Tensor:
    """A flat view of a dense tensor in the order of its memory."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset())


def round_stochastically(value: Tensor, dtype: torch.dtype, *, seed: int, step: int, stream: int, offset: int) -> Tensor:
    """Round flat fp32 to bf16 or fp16, up with the probability of the part cut off (16 random bits); inf and nan stay.

    Element i has the global index j = offset + i and takes half-word j % 8 of Philox(key=seed, counter=(j // 8, step, stream)).
    """
    index = offset + torch.arange(value.numel(), dtype=torch.int64, device=value.device)
    words = philox_words(index >> 3, key=seed, high=(step, stream))
    word = words.gather(-1, ((index >> 1) & 3).unsqueeze(-1)).squeeze(-1)
    random = (word >> (16 * (index & 1))) & 0xFFFF
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == torch.bfloat16:
        rounded = (magnitude + random) >> 16
    else:
        normal = (((magnitude + (random >> 3)) >> 13) - (112 << 10)).clamp(max=0x7C00)
        tiny = ((value.abs().clamp(max=2.0**-14) * 2.0**40).to(torch.int64) + random) >> 16
        rounded = torch.where(magnitude >= 0x38800000, normal, tiny)
    out = (rounded | sign).to(torch.int16).view(dtype)
    return torch.where(value.isfinite(), out, value.to(dtype))


def _store(target: Tensor, value: Tensor, random: dict[str, int] | None) -> None:
    if random is None or target.dtype == torch.float32:
        target.copy_(value)
    else:
        target.copy_(round_stochastically(value, target.dtype, **random))


def _at(tensors: Tensors, i: int) -> Tensor | None:
    return _memory_order(tensors[i]) if tensors and tensors[i].numel() else None


def _number(value: float, like: Tensor) -> Tensor:
    """A float64 hyper-parameter, rounded once to the arithmetic's dtype."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _step_row(
    row: list[Tensor | None], step: int, offset: int, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, factor: Tensor, stochastic_rounding: bool, seed: int,
) -> None:  # fmt: skip
    param, grad, exp_avg, exp_avg_sq, vmax, master, copy = row
    assert param is not None
    assert grad is not None
    assert exp_avg is not None
    assert exp_avg_sq is not None
    p = (param if master is None else master).float()
    g, m, v = grad.float() * factor, exp_avg.float(), exp_avg_sq.float()
    if weight_decay != 0 and not decoupled:
        g = g + p * _number(weight_decay, p)
    if decoupled:
        p = p * _number(1 - lr * weight_decay, p)
    m = m + (g - m) * _number(1 - beta1, m)
    v = v * _number(beta2, v) + g * g * _number(1 - beta2, v)
    largest = v if vmax is None else torch.maximum(vmax.float(), v)
    denominator = largest.sqrt() * _number((1 - beta2**step) ** -0.5, v) + _number(eps, v)
    p = p - _number(lr / (1 - beta1**step), p) * (m / denominator)
    streams = [{"seed": seed, "step": step, "stream": s, "offset": offset} if stochastic_rounding else None for s in range(3)]
    _store(exp_avg, m, streams[1])
    _store(exp_avg_sq, v, streams[2])
    if vmax is not None:  # one rounding decides both, so that vmax >= v stays true
        _store(vmax, largest, streams[2])
    if master is not None:
        master.copy_(p)
        param.copy_(master)
    else:
        _store(param, p, streams[0])
    if copy is not None:
        copy.copy_(param)


def adam_reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, masters: Tensors,
    copies: Tensors, steps: Tensors, lr_tensor: Tensor | None = None, grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    decoupled: bool, maximize: bool, zero_grads: bool, stochastic_rounding: bool, seed: int, offsets: Sequence[int],
) -> None:  # fmt: skip
    """The meaning of `adam_` in plain torch: within rounding of it, and with the same random bits."""
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps]
    table_of(lists, offsets, ADAM_COLUMNS)
    for name, scalar in (("lr_tensor", lr_tensor), ("grad_factor", grad_factor), ("found_inf", found_inf)):
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype not in (torch.float32, torch.float64)):
            raise ValueError(f"{name} must be one float32 number, got {tuple(scalar.shape)} of {scalar.dtype}")
    skipped = found_inf is not None and bool(found_inf.item())
    rate = float(lr_tensor.item()) if lr_tensor is not None else lr
    for i, param in enumerate(params):
        if not skipped:
            steps[i].add_(1)
        if param.numel() and not skipped:
            factor = _number(1.0, param) if grad_factor is None else grad_factor.reshape(())
            _step_row(
                [_at(tensors, i) for tensors in lists[:STEP]], int(steps[i].item()), offsets[i] if offsets else 0, lr=rate,
                beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled,
                factor=-factor if maximize else factor, stochastic_rounding=stochastic_rounding, seed=seed,
            )  # fmt: skip
        if zero_grads:
            grads[i].zero_()


def adam_from_table_reference(
    table: Tensor, lr_tensor: Tensor | None = None, grad_factor: Tensor | None = None, found_inf: Tensor | None = None,
    **scalars: Any,
) -> None:  # fmt: skip
    """The meaning of `adam_from_table_` in plain torch; CPU tables only."""
    if table.device.type != "cpu":
        raise RuntimeError("without kernels a table works on the CPU only; call adam_ instead")
    if table.dim() != 2 or table.shape[1] != COLUMNS:
        raise ValueError(f"table must be [n, {COLUMNS}], made by optimizer_table; got {tuple(table.shape)}")
    none = torch.empty(0)
    rows = table.tolist()
    lists: list[Any] = [[found if (found := tensor_at(row, column)) is not None else none for row in rows] for column in
             (PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX, MASTER, COPY, STEP)]  # fmt: skip
    arguments = [*lists, lr_tensor, grad_factor, found_inf]
    adam_reference(*arguments, **scalars, offsets=[row[OFFSET] for row in rows])


def _fake(*_: object, **__: object) -> None:
    return None


_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, Tensor(g!)[] copies, Tensor(h!)[] steps"
)
_DEVICE_SCALARS = "Tensor? lr_tensor, Tensor? grad_factor, Tensor? found_inf"
_SCALARS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, bool zero_grads, "
    "bool stochastic_rounding, int seed"
)
define(f"adam_({_LISTS}, {_DEVICE_SCALARS}, *, {_SCALARS}, int[] offsets) -> ()", reference=adam_reference, fake=_fake)
define(
    f"adam_from_table_(Tensor table, {_DEVICE_SCALARS}, *, {_SCALARS}) -> ()",
    reference=adam_from_table_reference,
    fake=hidden_operands("adam_from_table_", "optim.adam_"),
)
