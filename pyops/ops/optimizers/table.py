"""The table of an optimizer's rows: pointers, sizes and dtypes, checked once and used by every
step.

    one int64 row per parameter (csrc/math/optimizers/table.h holds the same numbers)

       0      1        2          3       4      5       6      7
    | param | grad | exp_avg | exp_avg_sq | max | master | copy | step |
       8       9       10         11
    | numel | dtypes | offset | first chunk |

Pointers are 0 where a tensor is absent: which of them a rule needs is the rule's affair (SGD's
momentum lies in exp_avg, Adagrad's sum in exp_avg_sq). `dtypes` packs 4 bits each for param, grad,
moments, master, copy: 0 fp32, 1 bf16, 2 fp16. `first chunk` is the number of chunks of CHUNK
elements in the rows above: CUDA's work list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.memory import memory_problem

__all__ = [
    "CHUNK",
    "COLUMNS",
    "DTYPES",
    "GRAD",
    "OFFSET",
    "gradients_fit",
    "gradients_fit_reference",
    "hidden_operands",
    "optimizer_table",
    "optimizer_table_reference",
    "row_problem",
    "table_of",
    "tensor_at",
]

Tensors = Sequence[Tensor]

COLUMNS = 12
CHUNK = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX, MASTER, COPY, STEP, NUMEL, PACKED, OFFSET, FIRST_CHUNK = (
    range(COLUMNS)
)
_FIELD_OF_DTYPE = {PARAM: 0, GRAD: 1, EXP_AVG: 2, EXP_AVG_SQ: 2, MAX: 2, MASTER: 3, COPY: 4}
OF_ANY_RULE = (PARAM, GRAD, STEP)  # what a table always holds
_NAMES = (
    "params",
    "grads",
    "exp_avgs",
    "exp_avg_sqs",
    "max_exp_avg_sqs",
    "masters",
    "copies",
    "steps",
)


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gap or overlap, in some order of the
    dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _layout(t: Tensor) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1]


def row_problem(name: str, index: int, t: Tensor, param: Tensor) -> str | None:
    """What keeps `t` from being walked beside `param`, or None."""
    where = f"{name}[{index}]"
    if t.dtype not in DTYPES:
        return f"{where} must be float32, bfloat16 or float16, got {t.dtype}"
    if t.device != param.device:
        return f"{where} is on {t.device}, its parameter on {param.device}; move it there"
    if not _is_dense(t):
        return (
            f"{where} with shape {tuple(t.shape)} and strides {t.stride()} has gaps or "
            "overlaps; pass a dense copy"
        )
    if t.numel() != param.numel() or (t.numel() and _layout(t) != _layout(param)):
        return (
            f"{where} has shape {tuple(t.shape)} and strides {t.stride()}, its parameter "
            f"{tuple(param.shape)} and "
            f"{param.stride()}; all tensors of a row must be laid out alike"
        )
    return None


def _check_moments(lists: Sequence[Tensors]) -> None:
    first: dict[int, torch.dtype] = {}
    for name, tensors in zip(_NAMES[EXP_AVG : MAX + 1], lists[EXP_AVG : MAX + 1], strict=True):
        for i, t in enumerate(tensors):
            if t.numel() and t.dtype != first.setdefault(i, t.dtype):
                raise ValueError(
                    f"{name}[{i}] has another dtype than the moment before it; the "
                    "moments of a row share one"
                )


def _check_rows(lists: Sequence[Tensors], offsets: Sequence[int], required: Sequence[int]) -> None:
    params, steps = lists[PARAM], lists[STEP]
    for column, (name, tensors) in enumerate(zip(_NAMES, lists, strict=True)):
        optional = column not in required
        if len(tensors) != len(params) and not (optional and not tensors):
            raise ValueError(
                f"{name} has {len(tensors)} tensors for {len(params)} params; expected one for each"
            )
        if name == "steps":
            continue
        for i, t in enumerate(tensors):
            if optional and t.numel() == 0:
                continue
            if (problem := row_problem(name, i, t, params[i])) is not None:
                raise ValueError(problem)
    for i, step in enumerate(steps):
        if step.dtype != torch.float32 or step.numel() != 1 or step.device != params[i].device:
            raise ValueError(
                f"steps[{i}] must be one float32 on {params[i].device}, got {step.dtype} "
                f"{tuple(step.shape)}"
            )
    _check_moments(lists)
    if offsets and len(offsets) != len(params):
        raise ValueError(
            f"offsets has {len(offsets)} numbers for {len(params)} params; expected one "
            "for each, or none"
        )


def table_of(
    lists: Sequence[Tensors], offsets: Sequence[int], required: Sequence[int] = OF_ANY_RULE
) -> Tensor:
    """The table of the eight lists of tensors (in column order), on the CPU; ValueError names the
    row that doesn't fit.

    Args:
        required: columns that every row must have; the lists of others may be empty, or hold an
            empty tensor for "none".
    """
    _check_rows(lists, offsets, required)
    rows, chunks = [], 0
    for i, param in enumerate(lists[PARAM]):
        row = [0] * COLUMNS
        for column, tensors in enumerate(lists):
            if tensors and tensors[i].numel():
                row[column] = tensors[i].data_ptr()
                if column in _FIELD_OF_DTYPE:
                    row[PACKED] |= DTYPES.index(tensors[i].dtype) << (4 * _FIELD_OF_DTYPE[column])
        row[NUMEL], row[OFFSET], row[FIRST_CHUNK] = (
            param.numel(),
            offsets[i] if offsets else 0,
            chunks,
        )
        # The field of the moments is or-ed in two or three times with the same number.
        chunks += -(-param.numel() // CHUNK)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, COLUMNS)


def tensor_at(row: Sequence[int], column: int) -> Tensor | None:
    """The tensor whose pointer stands in a row of a CPU table, flat and in memory order; None where
    it is absent."""
    pointer, numel = row[column], 1 if column == STEP else row[NUMEL]
    if not pointer or not numel:
        return None
    dtype = (
        torch.float32
        if column == STEP
        else DTYPES[(row[PACKED] >> (4 * _FIELD_OF_DTYPE[column])) & 15]
    )
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype)


def optimizer_table(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    offsets: Sequence[int] = (),
) -> Tensor:
    """Check the lists as a step on them does and write them as a table, int64 [rows, COLUMNS] on
    the parameters' device.

    All lists but params, grads and steps may be empty, and an empty tensor in them means "none for
    this parameter". The caller keeps the tensors alive, and makes a new table when one of them is
    another tensor than before.
    """
    result: Tensor = torch.ops.pyops.optimizer_table.default(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps, offsets
    )
    return result


def optimizer_table_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    masters: Tensors,
    copies: Tensors,
    steps: Tensors,
    offsets: Sequence[int] = (),
) -> Tensor:
    """The meaning of `optimizer_table`, on the parameters' device."""
    table = table_of(
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps], offsets
    )
    return table.to(params[0].device) if params else table


def _table_fake(params: Tensors, *_: object) -> Tensor:
    return torch.empty(
        len(params), COLUMNS, dtype=torch.int64, device=params[0].device if params else None
    )


define(
    "optimizer_table(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] "
    "exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    "Tensor[] masters, Tensor[] copies, Tensor[] steps, int[] offsets) -> Tensor",
    reference=optimizer_table_reference,
    fake=_table_fake,
    keeps_addresses=True,
)


def gradients_fit(gradients: Tensors, expected: Sequence[int]) -> bool:
    """Whether each gradient is contiguous, has memory, and is of the kind that a table expects in
    its place.

    Args:
        expected: one number for each, its elements * 16, plus 8 for one on the CPU, plus the place
            of its dtype in DTYPES.

    Raises:
        ValueError: for a view whose sign is still to be taken.
    """
    return bool(torch.ops.pyops.gradients_fit.default(gradients, expected))


def gradients_fit_reference(gradients: Tensors, expected: Sequence[int]) -> bool:
    """The meaning of `gradients_fit`."""
    if len(gradients) != len(expected):
        raise ValueError(
            f"expected has {len(expected)} numbers for {len(gradients)} gradients; give "
            "one for each"
        )
    return all(_kind_of(t) == kind for t, kind in zip(gradients, expected, strict=True))


def _kind_of(t: Tensor) -> int:
    if t.dtype not in DTYPES or not t.is_contiguous() or t.is_neg() or memory_problem(t):
        return -1
    return t.numel() * 16 + 8 * (t.device.type == "cpu") + DTYPES.index(t.dtype)


def _untraceable(gradients: Tensors, expected: Sequence[int]) -> NoReturn:
    raise NotImplementedError("pyops::gradients_fit asks where tensors lie and can't be traced")


define(
    "gradients_fit(Tensor[] gradients, int[] expected) -> bool",
    reference=gradients_fit_reference,
    fake=_untraceable,
    keeps_addresses=True,
)


def hidden_operands(op: str, instead: str) -> Callable[..., Any]:
    """A fake for an op that reaches its operands through pointers, which no compiler can follow."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"pyops::{op} works through pointers and can't be traced; call pyops.ops "
            f"{instead} instead"
        )

    return refuse
