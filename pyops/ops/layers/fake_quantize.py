"""Numbers rounded as quantization would round them, with a derivative to train by, in one pass.

    v = x / s       q = round(v)  to nearest even        l = lo - z, h = hi - z
    y = s clamp(q, l, h)

    dx = dy where l <= q <= h, else 0                     straight through, with the clip's mask
    ds = g sum of dy (q - v  inside,  l  below,  h  above)     learned step sizes (LSQ)

(Bengio et al., arXiv:1308.3432; Esser et al., arXiv:1902.08153, equations 3 and 5, where
g = 1 / sqrt(n hi) for n numbers of a scale.) "Inside" is asked of the rounded number, as torch's
learnable fake quantization does; the paper asks v itself, which differs where v is beyond an end by
half a step at most. A scale that is 0 makes everything 0, a scale that is nan everything nan, as
`pyops.quantized.encode` and `decode` do; an x that is nan stays nan.

Moves 2 elements forward and 3 backward for each of x; plain torch's chain moves 8 and 9. Results
are contiguous. fp32, bf16, fp16 (computed in fp32, rounded once) and float64. y and dx have the
same bits on any number of threads and at every instruction set; so has ds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.ops.layers.activation import FLOATS
from pyops.ops.library import define, no_second_derivative

__all__ = [
    "check_fake_quantize",
    "fake_quantize",
    "fake_quantize_backward_reference",
    "fake_quantize_reference",
]


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    lo: int = -127,
    hi: int = 127,
    dim: int | None = None,
    group: int | None = None,
    count: int | None = None,
) -> Tensor:
    """y = s clamp(round(x / s), lo - z, hi - z), of x's shape and dtype, with the derivatives of
    straight-through estimation for x and of learned step sizes for the scale.

    Args:
        x: fp32, bf16, fp16 or float64, of any shape and strides.
        scale: fp32 (float64 for float64), above 0: one number; one for each row of the last
            dimension, [*x.shape[:-1]]; with `dim` one for each index of that dimension,
            [x.shape[dim]]; with `group` one for each group of neighbors of the last dimension,
            [*x.shape[:-1], x.shape[-1] / group].
        zero: the zero points z, whole numbers of scale's shape; None: 0. They have no derivative.
        lo: the first code.
        hi: the last code; above 0 where scale has a gradient.
        dim: see scale.
        group: see scale.
        count: n of the scale's gradient; None: the numbers of x that share a scale. The paper takes
            for activations the features of a token, whatever the batch.

    Raises:
        ValueError: for a scale of another shape or dtype, a group that does not divide the last
            dimension, lo that is not below hi.
    """
    inner = _inner(x, scale, dim, group)
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(
            f"fake_quantize: zero must have scale's shape {list(scale.shape)}; got "
            f"{list(zero.shape)}"
        )
    z = None if zero is None else zero.detach().to(scale.dtype)
    check_fake_quantize(x, scale, z, lo, hi, inner)
    factor = 1.0
    if scale.requires_grad and torch.is_grad_enabled():
        if hi < 1:
            raise ValueError(f"fake_quantize: a learned scale needs hi above 0; got {hi}")
        shared = max(1, x.numel() // max(1, scale.numel())) if count is None else count
        if shared < 1:
            raise ValueError(f"fake_quantize: count must be 1 or more; got {count}")
        factor = 1.0 / math.sqrt(shared * hi)
    result: Tensor = torch.ops.pyops.fake_quantize.default(
        x, scale, z, lo=lo, hi=hi, inner=inner, factor=factor
    )
    return result


def _inner(x: Tensor, scale: Tensor, dim: int | None, group: int | None) -> int:
    """How many neighbors share a scale, before the next scale follows."""
    shape, last = tuple(x.shape), x.shape[-1] if x.dim() else 1
    if group is not None:
        if dim is not None:
            raise ValueError(
                f"fake_quantize: groups lie along the last dimension; leave out dim={dim}"
            )
        if group < 1 or last % group:
            fitting = ", ".join(str(g) for g in range(1, last + 1) if last % g == 0)
            raise ValueError(
                f"fake_quantize: group={group} does not divide the last dimension of x "
                f"{list(shape)}; these do: {fitting}"
            )
        expected, inner = (*shape[:-1], last // group), group
    elif dim is not None:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"fake_quantize: dim={dim}, but x has {x.dim()} dimensions")
        expected = (shape[dim],)
        inner = math.prod(shape[dim % x.dim() + 1 :])
    elif scale.numel() == 1:
        return max(1, x.numel())
    else:
        expected, inner = shape[:-1], last
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"fake_quantize: scale must be one number or {list(expected)} for x {list(shape)}, "
            f"dim={dim}, group={group}; got {list(scale.shape)}"
        )
    return max(1, inner)


def check_fake_quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, lo: int, hi: int, inner: int
) -> None:
    """Raise ValueError unless the operands of the op fit each other."""
    if x.dtype not in FLOATS:
        raise ValueError(
            f"fake_quantize: x must be float32, bfloat16, float16 or float64; got {x.dtype}"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, t in (("scale", scale), ("zero", zero)):
        if t is not None and t.dtype != wide:
            raise ValueError(f"fake_quantize: {name} must be {wide} for x {x.dtype}; got {t.dtype}")
    block = scale.numel() * inner
    if inner < 1 or (x.numel() and (not block or x.numel() % block)):
        raise ValueError(
            f"fake_quantize: {scale.numel()} scales of {inner} neighbors each must divide x "
            f"{list(x.shape)}"
        )
    if zero is not None and zero.numel() != scale.numel():
        raise ValueError(
            f"fake_quantize: zero must be of scale's size {scale.numel()}; got {zero.numel()}"
        )
    if not lo < hi:
        raise ValueError(f"fake_quantize: lo must be below hi; got lo={lo}, hi={hi}")


def _steps(
    x: Tensor, scale: Tensor, zero: Tensor | None, lo: int, hi: int, inner: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """v, round(v), l, h and s, as [outer, channels, inner]."""
    x = x.detach().to(scale.dtype).contiguous().view(-1, scale.numel(), inner)
    s = scale.detach().view(1, -1, 1)
    z = torch.zeros_like(s) if zero is None else zero.view(1, -1, 1)
    v = torch.where(s > 0, x / s, 0.0)
    return v, torch.round(v), lo - z, hi - z, s


def fake_quantize_reference(
    x: Tensor, scale: Tensor, zero: Tensor | None, *, factor: float, **places: int
) -> Tensor:
    """The meaning of `fake_quantize` in plain torch, without its derivative. `places`: lo, hi and
    inner."""
    check_fake_quantize(x, scale, zero, **places)
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    _, q, low, high, s = _steps(x, scale, zero, **places)
    y = torch.maximum(torch.minimum(q, high), low) * s
    return y.to(x.dtype).view(x.shape)


def fake_quantize_backward_reference(
    dy: Tensor, *operands: Any, factor: float, input_grad: bool, scale_grad: bool, **places: int
) -> tuple[Tensor, Tensor]:
    """dx of x's shape and dtype, and ds of scale's, times `factor`; [0] unless asked for.
    `operands`: x, scale, zero; `places`: lo, hi and inner."""
    x, scale, zero = operands
    check_fake_quantize(x, scale, zero, **places)
    check_gradient(dy, x)
    dx, ds = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.zeros_like(scale)
    if x.numel():
        v, q, low, high, _ = _steps(x, scale, zero, **places)
        g = dy.to(v.dtype).contiguous().view(v.shape)
        below, above = q < low, q > high
        dx = torch.where(below | above, 0.0, g).to(x.dtype).view(x.shape)
        slope = torch.where(below, low, torch.where(above, high, q - v))
        # As the kernel: products in the dtype of the numbers, sums in float64
        ds = ((g * slope).double().sum((0, 2)) * factor).to(scale.dtype).view(scale.shape)
    return dx if input_grad else x.new_empty(0), ds if scale_grad else scale.new_empty(0)


def check_gradient(dy: Tensor, x: Tensor) -> None:
    """Raise ValueError unless dy is of x's shape and dtype."""
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(
            f"fake_quantize: dy must be {list(x.shape)} {x.dtype}, as x; got {list(dy.shape)} "
            f"{dy.dtype}"
        )


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor, *operands: Any, input_grad: bool, scale_grad: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    x, scale, _zero = operands
    return (
        x.new_empty(x.shape if input_grad else [0]),
        scale.new_empty(scale.shape if scale_grad else [0]),
    )


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, scale, zero = ctx.saved_tensors
    of_x, of_scale, _ = ctx.needs_input_grad
    dx, ds = torch.ops.pyops.fake_quantize_backward.default(
        dy, x, scale, zero, **ctx.options, input_grad=of_x, scale_grad=of_scale
    )
    return dx if of_x else None, ds if of_scale else None, None


_OPERANDS = "Tensor x, Tensor scale, Tensor? zero, *, int lo, int hi, int inner, float factor"
define(
    f"fake_quantize({_OPERANDS}) -> Tensor",
    reference=fake_quantize_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    triton="fake_quantize",
)
define(
    f"fake_quantize_backward(Tensor dy, {_OPERANDS}, bool input_grad, bool scale_grad) -> "
    "(Tensor, Tensor)",
    reference=fake_quantize_backward_reference,
    fake=_fake_backward,
    backward=no_second_derivative,
    triton="fake_quantize",
)
