"""What surrounds the rule of every elementwise optimizer, and the meaning of a whole step in plain
torch.

    row of tensors -> fp32 -> rule (Adam, SGD, Lion, Adagrad, ...) -> rounded and stored -> copy, zeroed gradient

A rule sees p (the master, where there is one), g (times grad_factor, negated for maximize), m, v
and top, the fp32 values of the columns param, grad, exp_avg, exp_avg_sq and max; it puts new values
in their place. The kernels are csrc/cpu/step.h and csrc/cuda/step.cuh, with the rules of csrc/math.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.ops.optimizers.table import COLUMNS, OF_ANY_RULE, OFFSET, STEP, table_of, tensor_at
from pyops.ops.random import philox_words

__all__ = [
    "AROUND",
    "DEVICE_SCALARS",
    "Operands",
    "Tensors",
    "lists_of",
    "nothing",
    "reference_step",
    "round_stochastically",
    "rounded",
]

Tensors = Sequence[Tensor]

# Of every schema: in this order before and after a rule's own scalars.
DEVICE_SCALARS = "Tensor? lr_tensor, Tensor? grad_factor, Tensor? found_inf"
AROUND = "bool zero_grads, bool stochastic_rounding, int seed"


@dataclass
class Operands:
    """One row as fp32, flat in memory order; a column that the row does not have is an empty
    tensor."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    top: Tensor


Rule = Callable[
    [Operands, int, float], None
]  # operands, the number of this step, the learning rate


def nothing(*_: object, **__: object) -> None:
    """The fake of an op that only writes into its arguments."""


def rounded(value: float, like: Tensor) -> Tensor:
    """A float64 hyper-parameter, rounded once to the arithmetic's dtype."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def round_stochastically(
    value: Tensor, dtype: torch.dtype, *, seed: int, step: int, stream: int, offset: int
) -> Tensor:
    """Round flat fp32 to bf16 or fp16, up with the probability of the part cut off (16 random
    bits); inf and nan stay.

    Element i has the global index j = offset + i and takes half-word j % 8 of Philox(key=seed,
    counter=(j // 8, step, stream)).
    """
    index = offset + torch.arange(value.numel(), dtype=torch.int64, device=value.device)
    words = philox_words(index >> 3, key=seed, high=(step, stream))
    word = words.gather(-1, ((index >> 1) & 3).unsqueeze(-1)).squeeze(-1)
    random = (word >> (16 * (index & 1))) & 0xFFFF
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == torch.bfloat16:
        near = (magnitude + random) >> 16
    else:
        normal = (((magnitude + (random >> 3)) >> 13) - (112 << 10)).clamp(max=0x7C00)
        tiny = ((value.abs().clamp(max=2.0**-14) * 2.0**40).to(torch.int64) + random) >> 16
        near = torch.where(magnitude >= 0x38800000, normal, tiny)
    out = (near | sign).to(torch.int16).view(dtype)
    return torch.where(value.isfinite(), out, value.to(dtype))


def _store(target: Tensor, value: Tensor, random: dict[str, int] | None) -> None:
    if random is None or target.dtype == torch.float32:
        target.copy_(value)
    else:
        target.copy_(round_stochastically(value, target.dtype, **random))


def _at(tensors: Tensors, i: int) -> Tensor | None:
    """A flat view of a dense tensor in the order of its memory; None where there is none."""
    if not tensors or not tensors[i].numel():
        return None
    t = tensors[i].detach()
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def _step_row(
    row: list[Tensor | None],
    rule: Rule,
    step: int,
    lr: float,
    factor: Tensor,
    random: dict[str, int] | None,
) -> None:
    param, grad, exp_avg, exp_avg_sq, vmax, master, copy = row
    assert param is not None
    none = torch.empty(0, device=param.device)
    m, v, top = (none if t is None else t.float() for t in (exp_avg, exp_avg_sq, vmax))
    o = Operands(
        (param if master is None else master).float(),
        none if grad is None else grad.float() * factor,
        m,
        v,
        top,
    )
    rule(o, step, lr)
    streams = [None if random is None else {**random, "step": step, "stream": s} for s in range(3)]
    # One rounding decides v and its maximum both, so that vmax >= v stays true.
    for target, before, now, stream in (
        (exp_avg, m, o.m, 1),
        (exp_avg_sq, v, o.v, 2),
        (vmax, top, o.top, 2),
    ):
        if target is not None and now is not before:  # a rule replaces what it changes
            _store(target, now, streams[stream])
    if master is not None:
        master.copy_(o.p)
        param.copy_(master)
    else:
        _store(param, o.p, streams[0])
    if copy is not None:
        copy.copy_(param)


def reference_step(
    lists: Sequence[Tensors],
    rule: Rule,
    *,
    lr: float,
    required: Sequence[int] = OF_ANY_RULE,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    zero_grads: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] = (),
) -> None:
    """One step of `rule` over the rows of the eight lists of a table, in its order; what does not
    fit raises ValueError.

    required: columns that the rule works on. The number of a step is steps[row], incremented here,
    or 0 without steps.
    """
    table_of(lists, offsets, required)
    for name, scalar in (
        ("lr_tensor", lr_tensor),
        ("grad_factor", grad_factor),
        ("found_inf", found_inf),
    ):
        if scalar is not None and (
            scalar.numel() != 1 or scalar.dtype not in (torch.float32, torch.float64)
        ):
            raise ValueError(
                f"{name} must be one float32 number, got {tuple(scalar.shape)} of {scalar.dtype}"
            )
    params, grads, steps = lists[0], lists[1], lists[STEP]
    skipped = found_inf is not None and bool(found_inf.item())
    rate = float(lr_tensor.item()) if lr_tensor is not None else lr
    for i, param in enumerate(params):
        if steps and not skipped:
            steps[i].add_(1)
        if param.numel() and not skipped:
            factor = rounded(1.0, param) if grad_factor is None else grad_factor.reshape(())
            random = (
                {"seed": seed, "offset": offsets[i] if offsets else 0}
                if stochastic_rounding
                else None
            )
            number = int(steps[i].item()) if steps else 0
            row = [_at(tensors, i) for tensors in lists[:STEP]]
            _step_row(row, rule, number, rate, -factor if maximize else factor, random)
        if zero_grads:
            grads[i].zero_()


def lists_of(table: Tensor) -> tuple[list[list[Tensor]], list[int]]:
    """The eight lists and the offsets that a CPU table was made of, each tensor flat and in memory
    order."""
    if table.device.type != "cpu":
        raise RuntimeError(
            "without kernels a table works on the CPU only; call the op on lists instead"
        )
    if table.dim() != 2 or table.shape[1] != COLUMNS:
        raise ValueError(
            f"table must be [n, {COLUMNS}], made by optimizer_table; got {tuple(table.shape)}"
        )
    none, rows = torch.empty(0, device="cpu"), table.tolist()
    lists: list[list[Tensor]] = [
        [found if (found := tensor_at(row, column)) is not None else none for row in rows]
        for column in range(STEP + 1)
    ]
    return lists, [row[OFFSET] for row in rows]
