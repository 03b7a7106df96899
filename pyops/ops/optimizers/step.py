"""What surrounds the rule of every elementwise optimizer, and the meaning of a whole step in plain
torch.

    row of tensors -> fp32 -> rule (Adam, SGD, Lion, Adagrad, ...) -> rounded and stored
                          -> copy, zeroed gradient

A rule sees p (the master, where there is one), g (times grad_factor, negated for maximize), m, v
and top, the fp32 values of the columns param, grad, exp_avg, exp_avg_sq and max; it puts new values
in their place. The kernels are csrc/cpu/optimizers/step.h and csrc/cuda/optimizers/step.cuh, with
the rules of csrc/math/optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.table import COLUMNS, OF_ANY_RULE, OFFSET, STEP, table_of, tensor_at
from pyops.ops.random import philox_words

__all__ = [
    "DEVICE_SCALARS",
    "STEP_SCALARS",
    "Operands",
    "StepContext",
    "Tensors",
    "lists_of",
    "nothing",
    "reference_step",
    "round_stochastically",
    "rounded",
    "table_reference",
]

Tensors = Sequence[Tensor]

# Of every schema: in this order before and after a rule's own scalars.
DEVICE_SCALARS = "Tensor? lr_tensor, Tensor? grad_factor, Tensor? found_inf"
STEP_SCALARS = "bool zero_grads, bool stochastic_rounding, int seed"


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


@dataclass(frozen=True)
class StepContext:
    """What a step is given beside its tensors and its rule's own hyper-parameters."""

    lr: float
    """Learning rate, where lr_tensor is None."""
    lr_tensor: Tensor | None = None
    """Learning rate on the device, one float32 number."""
    grad_factor: Tensor | None = None
    """What gradients are multiplied by, one float32 number; None for 1."""
    found_inf: Tensor | None = None
    """The step is skipped where this number is not 0."""
    maximize: bool = False
    """Step along the gradient."""
    zero_grads: bool = False
    """Zero the gradients after they were read."""
    stochastic_rounding: bool = False
    """Round 16-bit results at random."""
    seed: int = 0
    """Key of the random bits."""
    offsets: Sequence[int] = ()
    """Number of each row's first element, for the random bits; empty for zeros."""

    def check(self) -> None:
        """Raise ValueError for a device scalar that is not one float number."""
        for name in ("lr_tensor", "grad_factor", "found_inf"):
            scalar = getattr(self, name)
            if scalar is not None and (
                scalar.numel() != 1 or scalar.dtype not in (torch.float32, torch.float64)
            ):
                raise ValueError(
                    f"{name} must be one float32 number, got {tuple(scalar.shape)} of "
                    f"{scalar.dtype}"
                )


def reference_step(
    lists: Sequence[Tensors],
    rule: Rule,
    context: StepContext,
    *,
    required: Sequence[int] = OF_ANY_RULE,
) -> None:
    """One step of `rule` over the rows of the eight lists of a table, in plain torch.

    Args:
        lists: in the order of the table's columns. The number of a step is steps[row], incremented
            here, or 0 without steps.
        rule: changes the operands of one row.
        context: scalars of the step.
        required: columns that the rule works on.

    Raises:
        ValueError: for lists or scalars that do not fit.
    """
    table_of(lists, context.offsets, required)
    context.check()
    params, grads, steps = lists[0], lists[1], lists[STEP]
    skipped = context.found_inf is not None and bool(context.found_inf.item())
    rate = context.lr if context.lr_tensor is None else float(context.lr_tensor.item())
    for i, param in enumerate(params):
        if steps and not skipped:
            steps[i].add_(1)
        if param.numel() and not skipped:
            given = context.grad_factor
            factor = rounded(1.0, param) if given is None else given.reshape(())
            offset = context.offsets[i] if context.offsets else 0
            random = {"seed": context.seed, "offset": offset}
            number = int(steps[i].item()) if steps else 0
            _step_row(
                [_at(tensors, i) for tensors in lists[:STEP]],
                rule,
                number,
                rate,
                -factor if context.maximize else factor,
                random if context.stochastic_rounding else None,
            )
        if context.zero_grads:
            grads[i].zero_()


def lists_of(table: Tensor) -> tuple[list[list[Tensor]], list[int]]:
    """The eight lists and the offsets that a CPU table was made of, each tensor flat and in memory
    order."""
    if table.device.type != "cpu":
        raise RuntimeError(
            "without kernels a table works on the CPU only; call the op on lists instead"
        )
    # Its numbers are pointers: others, or in another order, are addresses of nothing.
    made = table.dtype == torch.int64 and table.dim() == 2 and table.is_contiguous()
    if not made or table.shape[1] != COLUMNS:
        raise ValueError(
            f"table must be a contiguous int64 [n, {COLUMNS}], made by optimizer_table; got "
            f"{table.dtype} {tuple(table.shape)} of strides {table.stride()}"
        )
    none, rows = torch.empty(0, device="cpu"), table.tolist()
    lists: list[list[Tensor]] = [
        [found if (found := tensor_at(row, column)) is not None else none for row in rows]
        for column in range(STEP + 1)
    ]
    return lists, [row[OFFSET] for row in rows]


def table_reference(reference: Callable[..., None], columns: Sequence[int]) -> Callable[..., None]:
    """The meaning of an op on a table, from that of the op on lists.

    Args:
        reference: of the op on lists.
        columns: of the table, in the order in which `reference` takes the lists.

    Returns:
        A function of the table, the tensors that follow the lists, and the scalars; for CPU tables
        only.
    """

    def on_table(table: Tensor, *tensors: Tensor | None, **scalars: Any) -> None:
        lists, offsets = lists_of(table)
        reference(*(lists[column] for column in columns), *tensors, **scalars, offsets=offsets)

    return on_table
