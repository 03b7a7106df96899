"""Dropout whose mask is drawn inside the kernel, forward and backward, and never stored.

    y[i] = residual[i] + keep(i) / (1 - p) * (x[i] + bias[i % F])
    keep(i) = uniform(key, offset + i) >= p

`state` is an int64 [2] tensor on x's device: the 64-bit key of the stream (as a signed number) and
the global index of x's first element. It is data, not a number in the program: a compiled or
captured program draws another mask with another state. The bits are those of
`pyops.random.dropout_mask` under the same key and offset, so a shard of a tensor drops exactly what
the whole would. Saved for backward: `state`, 16 bytes. Plain torch saves a mask of one byte an
element.

fp32, bf16, fp16 (computed in fp32, rounded once) and float64; any shape and strides; results are
contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops import random
from pyops.ops.layers.activation import FLOATS
from pyops.ops.library import define, no_second_derivative

__all__ = [
    "bias_dropout_add",
    "bias_dropout_add_backward_reference",
    "bias_dropout_add_reference",
    "check_bias_dropout_add",
    "check_bias_grad",
    "check_dropout",
    "check_stream",
    "dropout",
    "dropout_reference",
    "dropout_state",
]


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    p: float,
    state: Tensor | None = None,
) -> Tensor:
    """residual + keep / (1 - p) * (x + bias), of x's shape and dtype; without dropout when `p` is 0
    or `state` None.

    x [..., F], bias [F], residual as x, all of one dtype, or promoted to one under autocast; state
    int64 [2]: key, and global index of x's first element. Moves 3 elements forward and 2 backward
    for each of x (the residual's gradient is dy itself); saves `state` alone. Plain torch moves 8
    and a mask of a byte forward, 3 and the mask backward.

    Raises:
        ValueError: for a p outside [0, 1], or another shape or dtype.
    """
    check_stream("bias_dropout_add", x, p, state)
    if torch.is_autocast_enabled(
        x.device.type
    ):  # as torch's own additions, to the wider of x and the residual
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        x = x.to(dtype)
        bias, residual = (t if t is None else t.to(dtype) for t in (bias, residual))
    check_bias_dropout_add(x, bias, residual, state, p)
    drops = p > 0 and state is not None
    if not drops and bias is None and residual is None:
        return x
    result: Tensor = torch.ops.pyops.bias_dropout_add.default(
        x, bias, residual, state if drops else None, p=p if drops else 0.0
    )
    return result


def dropout(
    x: Tensor,
    *,
    p: float,
    state: Tensor | None,
    row: int | None = None,
    row_stride: int | None = None,
) -> Tensor:
    """keep / (1 - p) * x, of x's shape and dtype; x itself when `p` is 0 or `state` None.

    Element i of x in row-major order has the global index state[1] + (i // row) * row_stride + i %
    row: x may be a part of each of several equally long rows of a whole, such as a rank's heads of
    attention probabilities. `row` None: all of x is one row; `row_stride` None: rows follow one
    another. Moves 2 elements forward and 2 backward for each of x; saves `state`.
    """
    check_stream("dropout", x, p, state)
    if not p or state is None:
        return x
    row = max(x.numel(), 1) if row is None else row
    row_stride = row if row_stride is None else row_stride
    check_dropout(x, state, p, row, row_stride)
    result: Tensor = torch.ops.pyops.dropout.default(x, state, p=p, row=row, row_stride=row_stride)
    return result


def dropout_state(key: int, first: int, *, device: torch.device | None = None) -> Tensor:
    """The `state` of a stream: its unsigned 64-bit key, and the global index of the first element.
    Waits for no GPU."""
    state = torch.full((2,), first, dtype=torch.int64, device=device)
    state.select(0, 0).fill_(random.signed64(key))
    return state


def check_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, p: float
) -> None:
    """Raise ValueError unless the operands of `bias_dropout_add` fit each other."""
    check_stream("bias_dropout_add", x, p, state)
    if bias is not None and (tuple(bias.shape) != tuple(x.shape[-1:]) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias_dropout_add: bias must be [{x.shape[-1] if x.dim() else ''}] "
            f"{x.dtype}, as x's last dimension; "
            f"got {list(bias.shape)} {bias.dtype}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"bias_dropout_add: residual must be as x, {list(x.shape)} {x.dtype}; got "
            f"{list(residual.shape)} "
            f"{residual.dtype}"
        )


def check_dropout(x: Tensor, state: Tensor, p: float, row: int, row_stride: int) -> None:
    """Raise ValueError unless the operands of `dropout` fit each other."""
    check_stream("dropout", x, p, state)
    if row < 1 or row_stride < 0:
        raise ValueError(f"dropout: need row >= 1 and row_stride >= 0; got {row}, {row_stride}")


def check_stream(op: str, x: Tensor, p: float, state: Tensor | None) -> None:
    """Raise ValueError unless x, p and state are what `op` can draw a mask for."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: p must be a probability in [0, 1], got {p}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    if state is not None and (
        state.dtype != torch.int64 or tuple(state.shape) != (2,) or state.device != x.device
    ):
        raise ValueError(
            f"{op}: state must be int64 [2], key and offset, on {x.device}; got "
            f"{list(state.shape)} {state.dtype} on "
            f"{state.device}"
        )


def _kept(x: Tensor, state: Tensor | None, p: float, *, row: int, row_stride: int) -> Tensor:
    """keep / (1 - p) * x in plain torch; x is contiguous."""
    if state is None or p == 0.0:
        return x
    key, offset = state.tolist()
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    random.philox_dropout_mask_reference(
        mask, p=p, key=key, offset=offset, row=row, row_stride=row_stride
    )
    return torch.where(mask, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


def bias_dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, *, p: float
) -> Tensor:
    """The meaning of `bias_dropout_add` in plain torch, without its derivative."""
    check_bias_dropout_add(x, bias, residual, state, p)
    z, n = _wide(x), max(x.numel(), 1)
    kept = _kept(z if bias is None else z + _wide(bias), state, p, row=n, row_stride=n)
    total = kept if residual is None else _wide(residual) + kept
    return (total.clone() if total is x else total).to(x.dtype)


def bias_dropout_add_backward_reference(
    dy: Tensor, state: Tensor | None, *, p: float, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx = keep / (1 - p) * dy, [0] when nothing is dropped (it is dy); dbias, dx summed over rows;
    [0] unless `bias_grad`."""
    check_stream("bias_dropout_add_backward", dy, p, state)
    check_bias_grad(dy, bias_grad)
    n = max(dy.numel(), 1)
    dx = _kept(_wide(dy), state, p, row=n, row_stride=n)
    dbias = (
        (dx.flatten(0, -2).sum(0) if dx.dim() > 1 else dx.clone()) if bias_grad else dx.new_empty(0)
    )
    drops = state is not None and p > 0.0
    return dx.to(dy.dtype) if drops else dy.new_empty(0), dbias.to(dy.dtype)


def check_bias_grad(dy: Tensor, bias_grad: bool) -> None:
    """ValueError for the gradient of a bias where there is no last dimension that one could lie
    along."""
    if bias_grad and dy.dim() == 0:
        raise ValueError(
            "bias_dropout_add_backward: a dy without dimensions has no bias; pass bias_grad=False"
        )


def dropout_reference(x: Tensor, state: Tensor, *, p: float, row: int, row_stride: int) -> Tensor:
    """The meaning of `dropout` in plain torch, without its derivative."""
    check_dropout(x, state, p, row, row_stride)
    return _kept(_wide(x), state, p, row=row, row_stride=row_stride).to(x.dtype).clone()


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, *, p: float
) -> Tensor:
    return _contiguous_like(x)


def _fake_backward(
    dy: Tensor, state: Tensor | None, *, p: float, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    dx = _contiguous_like(dy) if state is not None and p > 0.0 else dy.new_empty(0)
    return dx, dy.new_empty(dy.shape[-1] if bias_grad else 0)


def _fake_dropout(x: Tensor, state: Tensor, *, p: float, row: int, row_stride: int) -> Tensor:
    return _contiguous_like(x)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[3])
    ctx.p = keyword_only_inputs["p"]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    (state,) = ctx.saved_tensors
    for_x, for_bias, for_residual, _ = ctx.needs_input_grad
    drops = state is not None and ctx.p > 0.0
    dx, dbias = dy, None
    if for_bias or (for_x and drops):
        dx, dbias = torch.ops.pyops.bias_dropout_add_backward.default(
            dy, state, p=ctx.p, bias_grad=for_bias
        )
    return (
        (dx if drops else dy) if for_x else None,
        dbias if for_bias else None,
        dy if for_residual else None,
        None,
    )


def _save_dropout(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.options = keyword_only_inputs


def _backward_dropout(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.pyops.dropout.default(dy, ctx.saved_tensors[0], **ctx.options), None


define(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor? state, *, float "
    "p) -> Tensor",
    reference=bias_dropout_add_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    triton="dropout",
)
define(
    "bias_dropout_add_backward(Tensor dy, Tensor? state, *, float p, bool bias_grad) -> "
    "(Tensor, Tensor)",
    reference=bias_dropout_add_backward_reference,
    fake=_fake_backward,
    backward=no_second_derivative,
    triton="dropout",
)
define(
    "dropout(Tensor x, Tensor state, *, float p, int row, int row_stride) -> Tensor",
    reference=dropout_reference,
    fake=_fake_dropout,
    backward=_backward_dropout,
    setup_context=_save_dropout,
    triton="dropout",
)
