"""Layer norm and root-mean-square norm over the last dimension, alone or after the residual
addition, forward and backward.

    x, residual [..., D] --> s = x + residual --> centre, scale --> y [..., D]
                             |   (an output)       ^    ^
                             '-- two passes: mean, then the mean of squared distances from it

Statistics are computed in fp32 (float64 for float64 input) and returned: mean and rstd, one number
for each row. Backward reads the norm's input, which the caller holds anyway, and those two numbers;
nothing else is saved. The gradients of weight and bias are sums over fixed groups of rows, added in
order: the same bits for any number of threads.

Bytes per element of fp32: forward 8, with the residual 16; backward 12, and 4 more with a gradient
of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import define, no_second_derivative

__all__ = [
    "add_layer_norm",
    "add_layer_norm_reference",
    "add_rms_norm",
    "add_rms_norm_reference",
    "check_backward",
    "check_forward",
    "layer_norm",
    "layer_norm_backward_reference",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_backward_reference",
    "rms_norm_reference",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """y = (x - mean) rstd weight + bias, mean over the last dimension, rstd = 1 / sqrt(mean((x -
    mean)^2) + eps).

    y has the shape and dtype of x. Ba et al., "Layer normalization", arXiv:1607.06450.

    Args:
        x: [..., D], fp32, bf16 or fp16, of any strides.
        weight, bias: [D] of one of these dtypes, perhaps another than x's; or all float64.

    Raises:
        ValueError: for other shapes.
        TypeError: for other dtypes.
    """
    check_forward([x], weight, bias)
    result: Tensor = torch.ops.pyops.layer_norm.default(x, weight, bias, eps=eps)[0]
    return result


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """y = x rstd (offset + weight), rstd = 1 / sqrt(mean(x^2) + eps). Shapes and dtypes as
    layer_norm; offset 1 is Gemma's.

    Zhang and Sennrich, "Root mean square layer normalization", arXiv:1910.07467.
    """
    check_forward([x], weight, None)
    result: Tensor = torch.ops.pyops.rms_norm.default(x, weight, eps=eps, offset=offset)[0]
    return result


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual, in one pass. x and residual have one shape.

    s has the dtype to which torch promotes x and residual; it is rounded to that before it is
    normalised, so y is what layer_norm gives for the s returned. Gradients may arrive at both
    outputs; they are added in the backward pass itself.
    """
    check_forward([x, residual], weight, bias)
    result: tuple[Tensor, Tensor] = torch.ops.pyops.add_layer_norm.default(
        x, residual, weight, bias, eps=eps
    )[:2]
    return result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, in one pass; as add_layer_norm."""
    check_forward([x, residual], weight, None)
    result: tuple[Tensor, Tensor] = torch.ops.pyops.add_rms_norm.default(
        x, residual, weight, eps=eps, offset=offset
    )[:2]
    return result


def check_forward(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the operands of a norm, x and perhaps the residual, fit
    each other."""
    shape = inputs[0].shape
    if not shape or shape[-1] == 0:
        raise ValueError(
            f"x has shape {tuple(shape)}; a norm is over a last dimension of at least 1"
        )
    if inputs[-1].shape != shape:
        raise ValueError(
            f"x and residual must have one shape, got {tuple(shape)} and "
            f"{tuple(inputs[-1].shape)}; expand one"
        )
    vectors = [weight] if bias is None else [weight, bias]
    if any(v.shape != shape[-1:] for v in vectors):
        shapes = [tuple(v.shape) for v in vectors]
        raise ValueError(
            f"weight and bias must have shape [{shape[-1]}], as x's last dimension; got {shapes}"
        )
    tensors = [*inputs, *vectors]
    if bias is not None and bias.dtype != weight.dtype:
        raise TypeError(
            f"weight and bias must have one dtype, got {weight.dtype} and {bias.dtype}; "
            "cast one with .to(dtype)"
        )
    if not (
        all(t.dtype in _FLOATS for t in tensors) or all(t.dtype == torch.float64 for t in tensors)
    ):
        raise TypeError(
            f"dtypes must be of {_FLOATS}, or all float64; got "
            f"{[t.dtype for t in tensors]}; cast with .to(dtype)"
        )


def check_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: list[Tensor]
) -> None:
    """As `check_forward` for a derivative: dy and dsum must be of x's shape, mean and rstd of its
    leading dimensions."""
    check_forward([x], weight, None)
    for name, t, shape in (
        ("dy", dy, x.shape),
        ("dsum", dsum, x.shape),
        *(("mean or rstd", t, x.shape[:-1]) for t in statistics),
    ):
        if t is not None and t.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale(weight: Tensor, offset: float) -> Tensor:
    return weight.to(_compute(weight.dtype)) + offset


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, rstd in plain torch. mean and rstd have x's shape without its last dimension."""
    check_forward([x], weight, bias)
    wide = x.to(_compute(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * _scale(weight, 0.0)
    y = y if bias is None else y + bias
    return y.to(x.dtype).contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """y, rstd in plain torch."""
    check_forward([x], weight, None)
    wide = x.to(_compute(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * _scale(weight, offset)).to(x.dtype).contiguous(), rstd.squeeze(-1)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, x + residual, mean, rstd in plain torch."""
    check_forward([x, residual], weight, bias)
    s = (x + residual).contiguous()
    y, mean, rstd = layer_norm_reference(s, weight, bias, eps=eps)
    return y, s, mean, rstd


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, x + residual, rstd in plain torch."""
    check_forward([x, residual], weight, None)
    s = (x + residual).contiguous()
    y, rstd = rms_norm_reference(s, weight, eps=eps, offset=offset)
    return y, s, rstd


def _sum_of_rows(terms: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    return (
        terms.reshape(-1, terms.shape[-1]).sum(0).to(dtype)
        if wanted
        else terms.new_empty(0, dtype=dtype)
    )


def layer_norm_backward_reference(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias in plain torch; x is the norm's input, dsum a gradient that arrives at it
    by another way.

    With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)) + dsum;
    dweight = sum of dy h over all rows, dbias = sum of dy, both of weight's dtype, and of no
    elements unless `weight_grad`.
    """
    check_backward(dy, dsum, x, weight, [mean, rstd])
    wide, dy = x.to(mean.dtype), dy.to(mean.dtype)
    h = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = dy * _scale(weight, 0.0)
    dx = (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    dx = dx if dsum is None else dx + dsum
    dweight, dbias = (_sum_of_rows(terms, weight.dtype, weight_grad) for terms in (dy * h, dy))
    return dx.to(x.dtype).contiguous(), dweight, dbias


def rms_norm_backward_reference(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    offset: float,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """dx, dweight in plain torch; as layer_norm's without mean(g), and with h = x rstd, g = dy
    (offset + weight)."""
    check_backward(dy, dsum, x, weight, [rstd])
    wide, dy = x.to(rstd.dtype), dy.to(rstd.dtype)
    h = wide * rstd.unsqueeze(-1)
    g = dy * _scale(weight, offset)
    dx = (g - h * (g * h).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    dx = dx if dsum is None else dx + dsum
    return dx.to(x.dtype).contiguous(), _sum_of_rows(dy * h, weight.dtype, weight_grad)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_compute(x.dtype))


def _fake_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _statistic(x), _statistic(x)


def _fake_rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return _like(x), _statistic(x)


def _fake_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = _like(x, torch.promote_types(x.dtype, residual.dtype))
    return y, _like(y), _statistic(y), _statistic(y)


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = _like(x, torch.promote_types(x.dtype, residual.dtype))
    return y, _like(y), _statistic(y)


def _fake_layer_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    vector = weight.new_empty(weight.shape if weight_grad else [0])
    return _like(x), vector, torch.empty_like(vector)


def _fake_rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    offset: float,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    return _like(x), weight.new_empty(weight.shape if weight_grad else [0])


def _save(
    ctx: Any, x: Tensor, weight: Tensor, statistics: tuple[Tensor, ...], *, offset: float | None
) -> None:
    """x: the norm's input. offset: None for layer norm."""
    ctx.save_for_backward(x, weight, *statistics)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(
        False
    )  # a sum that nobody reads has no gradient, rather than one of zeros to be added
    ctx.offset = offset


def _save_layer_norm(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    _save(ctx, inputs[0], inputs[1], output[1:], offset=None)


def _save_rms_norm(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    _save(ctx, inputs[0], inputs[1], output[1:], offset=keyword_only_inputs["offset"])


def _save_add_layer_norm(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    _save(ctx, output[1], inputs[2], output[2:], offset=None)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


def _save_add_rms_norm(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    _save(ctx, output[1], inputs[2], output[2:], offset=keyword_only_inputs["offset"])
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


Gradients = tuple[Tensor | None, ...]


def _gradients(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *, vectors: slice) -> Gradients:
    """Of the norm's input and of the inputs at `vectors`: weight, or weight and bias."""
    needed = ctx.needs_input_grad[vectors]
    if dy is None:
        return dsum, *(None for _ in needed)
    x, weight, *statistics = ctx.saved_tensors
    if ctx.offset is None:
        dx, *of_vectors = torch.ops.pyops.layer_norm_backward.default(
            dy, dsum, x, weight, *statistics, weight_grad=any(needed)
        )
    else:
        dx, *of_vectors = torch.ops.pyops.rms_norm_backward.default(
            dy, dsum, x, weight, *statistics, offset=ctx.offset, weight_grad=any(needed)
        )
    return dx, *(d if wanted else None for d, wanted in zip(of_vectors, needed, strict=True))


def _backward(ctx: Any, dy: Tensor | None, *of_statistics: None) -> Gradients:
    return _gradients(ctx, dy, None, vectors=slice(1, None))


def _add_backward(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *of_statistics: None
) -> Gradients:
    dx, *of_vectors = _gradients(ctx, dy, dsum, vectors=slice(2, None))
    return *(None if dx is None else dx.to(dtype) for dtype in ctx.dtypes), *of_vectors


_LAYER, _RMS = (
    "Tensor weight, Tensor? bias, *, float eps)",
    "Tensor weight, *, float eps, float offset)",
)
_BEFORE = "(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor"
define(
    f"layer_norm(Tensor x, {_LAYER} -> (Tensor, Tensor, Tensor)",
    reference=layer_norm_reference,
    fake=_fake_layer_norm,
    backward=_backward,
    setup_context=_save_layer_norm,
    triton="norm",
)
define(
    f"rms_norm(Tensor x, {_RMS} -> (Tensor, Tensor)",
    reference=rms_norm_reference,
    fake=_fake_rms_norm,
    backward=_backward,
    setup_context=_save_rms_norm,
    triton="norm",
)
define(
    f"add_layer_norm(Tensor x, Tensor residual, {_LAYER} -> (Tensor, Tensor, Tensor, Tensor)",
    reference=add_layer_norm_reference,
    fake=_fake_add_layer_norm,
    backward=_add_backward,
    setup_context=_save_add_layer_norm,
    triton="norm",
)
define(
    f"add_rms_norm(Tensor x, Tensor residual, {_RMS} -> (Tensor, Tensor, Tensor)",
    reference=add_rms_norm_reference,
    fake=_fake_add_rms_norm,
    backward=_add_backward,
    setup_context=_save_add_rms_norm,
    triton="norm",
)
define(
    f"layer_norm_backward{_BEFORE} mean, Tensor rstd, *, bool weight_grad) -> (Tensor, "
    "Tensor, Tensor)",
    reference=layer_norm_backward_reference,
    fake=_fake_layer_norm_backward,
    backward=no_second_derivative,
    triton="norm",
)
define(
    f"rms_norm_backward{_BEFORE} rstd, *, float offset, bool weight_grad) -> (Tensor, Tensor)",
    reference=rms_norm_backward_reference,
    fake=_fake_rms_norm_backward,
    backward=no_second_derivative,
    triton="norm",
)
