"""Depthwise 3 x 3 convolution with a padding of one: each channel by nine taps of its own.

    y[n, c, h, w] = bias[c] + sum over i, j of weight[c, 0, i, j] x[n, c, s h + i - 1, s w + j - 1]

    x [N, C, H, W] --> y [N, C, ceil(H / s), ceil(W / s)]        s: the stride, 1 or 2

Tensors have torch's shapes, and in memory their channels last (torch.channels_last): neighboring
channels fill a register. An x of other strides is copied first. Sums are in fp32 (float64 for
float64), rounded once. Backward reads x and dy once for both gradients; those of weight and bias
are sums over fixed groups of rows, added in order: the same bits for any number of threads.

Bytes per element of fp32 at stride 1: forward 8, backward 12. On CUDA both passes are torch's own
convolution, called with channels last and without TF32: there is no kernel of this library for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers.activation import ACTIVATIONS, FLOATS, activate
from pyops.ops.library import by_torch_on_cuda, define, no_second_derivative

__all__ = [
    "check_backward",
    "check_forward",
    "depthwise_conv2d",
    "depthwise_conv2d_backward_reference",
    "depthwise_conv2d_reference",
]


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    activation: str | None = None,
) -> Tensor:
    """torch's `conv2d(x, weight, bias, stride, padding=1, groups=C)`, with its channels last.

    Args:
        x: [N, C, H, W], fp32, bf16 or fp16, of any strides; best channels last.
        weight: [C, 1, 3, 3] of one of these dtypes, perhaps another than x's; or all float64.
        bias: [C] of weight's dtype.
        stride: 1 or 2, of rows and columns alike.
        activation: "gelu", "gelu_tanh", "relu" or "silu", applied before y is rounded; for
            inference, as it has no derivative.

    Returns:
        [N, C, ceil(H / stride), ceil(W / stride)] of x's dtype, channels last.

    Raises:
        ValueError: for other shapes, strides and activations, and for an activation where a
            gradient is wanted.
        TypeError: for other dtypes.
    """
    if x.dim() != 4:
        raise ValueError(
            f"depthwise_conv2d: x must be [N, C, H, W]; got {list(x.shape)}. One image is x[None]"
        )
    last = x.permute(0, 2, 3, 1)
    check_forward(last, weight, bias, stride, activation)
    wanted = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    if activation is not None and wanted:
        raise ValueError(
            f"depthwise_conv2d: activation={activation!r} is for inference and has no derivative; "
            "use torch.no_grad(), or apply pyops.ops.activation.bias_activation to the result"
        )
    y: Tensor = torch.ops.pyops.depthwise_conv2d.default(
        last, weight, bias, stride=stride, activation=activation
    )
    return y.permute(0, 3, 1, 2)


def check_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, activation: str | None
) -> None:
    """Raise ValueError or TypeError unless the operands of the op, x [N, H, W, C], fit."""
    if x.dim() != 4:
        raise ValueError(f"depthwise_conv2d: x must be [N, H, W, C]; got {list(x.shape)}")
    channels = x.shape[-1]
    if tuple(weight.shape) != (channels, 1, 3, 3):
        raise ValueError(
            f"depthwise_conv2d: weight must be [{channels}, 1, 3, 3], as x has {channels} "
            f"channels; got {list(weight.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (channels,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"depthwise_conv2d: bias must be [{channels}] {weight.dtype}, as the weight; got "
            f"{list(bias.shape)} {bias.dtype}"
        )
    if stride not in (1, 2):
        raise ValueError(f"depthwise_conv2d: stride must be 1 or 2; got {stride}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"depthwise_conv2d: activation must be None or one of {', '.join(ACTIVATIONS)}; got "
            f"{activation!r}"
        )
    double = [t.dtype == torch.float64 for t in (x, weight)]
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or len(set(double)) > 1:
        raise TypeError(
            "depthwise_conv2d: x and weight must be of float32, bfloat16 and float16, or both "
            f"float64; got {x.dtype} and {weight.dtype}; cast with .to(dtype)"
        )


def check_backward(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> None:
    """As `check_forward` for a derivative: dy must be of x's dtype and of y's shape."""
    check_forward(x, weight, None, stride, None)
    shape = _out_shape(x.shape, stride)
    if tuple(dy.shape) != shape or dy.dtype != x.dtype:
        raise ValueError(
            f"depthwise_conv2d: dy must be {list(shape)} {x.dtype}, as y; got {list(dy.shape)} "
            f"{dy.dtype}"
        )


def _out_shape(x: Any, stride: int) -> tuple[int, int, int, int]:
    return x[0], (x[1] + stride - 1) // stride, (x[2] + stride - 1) // stride, x[3]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """torch's, of x [N, H, W, C] and for it."""
    wide = x.permute(0, 3, 1, 2)
    if not x.numel():  # torch refuses images of no rows
        return x.new_empty(_out_shape(x.shape, stride))
    y = functional.conv2d(wide, weight, bias, stride=stride, padding=1, groups=x.shape[-1])
    return y.permute(0, 2, 3, 1)


def depthwise_conv2d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, activation: str | None
) -> Tensor:
    """The op in plain torch, of x [N, H, W, C]: computed in fp32 (float64), rounded once."""
    check_forward(x, weight, bias, stride, activation)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with _whole_fp32():
        y = _convolution(
            x.detach().to(dtype),
            weight.detach().to(dtype),
            None if bias is None else bias.detach().to(dtype),
            stride,
        )
    y = y if activation is None else activate(y, activation)
    return y.to(x.dtype).contiguous()


def depthwise_conv2d_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, *, stride: int, input_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias in plain torch; of no elements where they are not wanted.

    dx[h, w] = sum of weight[i, j] dy[(h + 1 - i) / s, (w + 1 - j) / s] over the taps for which
    these are whole, dweight[i, j] = sum of x[s h + i - 1, s w + j - 1] dy[h, w], dbias = sum of dy.
    """
    check_backward(dy, x, weight, stride)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.enable_grad(), _whole_fp32():
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        y = _convolution(leaves[0], leaves[1], None, stride)
        if x.numel():
            dx, dweight = torch.autograd.grad(y, leaves, dy.to(dtype))
        else:
            dx, dweight = (torch.zeros_like(t) for t in leaves)
    dbias = dy.to(dtype).sum((0, 1, 2))
    return (
        dx.to(x.dtype).contiguous() if input_grad else x.new_empty(0),
        dweight.to(weight.dtype).contiguous() if weight_grad else weight.new_empty(0),
        dbias.to(weight.dtype) if weight_grad else weight.new_empty(0),
    )


def _whole_fp32() -> Any:
    """cuDNN's convolutions of fp32 without TF32, whose products have 10 bits."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=False,
    )


def _cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, activation: str | None
) -> Tensor:
    """torch's convolution in the wider of the dtypes: it accumulates in fp32."""
    check_forward(x, weight, bias, stride, activation)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    with _whole_fp32():
        y = _convolution(
            x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), stride
        )
    y = y if activation is None else activate(y, activation)
    return y.to(x.dtype).contiguous()


def _cuda_backward(
    dy: Tensor, x: Tensor, weight: Tensor, *, stride: int, input_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_backward(dy, x, weight, stride)
    if not x.numel():
        return depthwise_conv2d_backward_reference(
            dy, x, weight, stride=stride, input_grad=input_grad, weight_grad=weight_grad
        )
    dtype = torch.promote_types(x.dtype, weight.dtype)
    with _whole_fp32():
        dx, dweight, _ = torch.ops.aten.convolution_backward.default(
            dy.permute(0, 3, 1, 2).to(dtype),
            x.permute(0, 3, 1, 2).to(dtype),
            weight.to(dtype),
            None,
            [stride, stride],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            x.shape[-1],
            [input_grad, weight_grad, False],
        )
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
    return (
        dx.permute(0, 2, 3, 1).to(x.dtype).contiguous() if input_grad else x.new_empty(0),
        dweight.to(weight.dtype).contiguous() if weight_grad else weight.new_empty(0),
        wide.sum((0, 1, 2)).to(weight.dtype) if weight_grad else weight.new_empty(0),
    )


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, activation: str | None
) -> Tensor:
    return x.new_empty(_out_shape(x.shape, stride))


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, *, stride: int, input_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if input_grad else [0]),
        weight.new_empty(weight.shape if weight_grad else [0]),
        weight.new_empty(weight.shape[:1] if weight_grad else [0]),
    )


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    if keyword_only_inputs["activation"] is not None:
        raise ValueError("pyops::depthwise_conv2d: an activation is for inference; use no_grad()")
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.stride = keyword_only_inputs["stride"]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    dx, dweight, dbias = torch.ops.pyops.depthwise_conv2d_backward.default(
        dy, x, weight, stride=ctx.stride, input_grad=of_x, weight_grad=of_weight or of_bias
    )
    return dx if of_x else None, dweight if of_weight else None, dbias if of_bias else None


def _flops(x: Any, weight: Any, *_: Any, stride: int, **__: Any) -> int:
    count = 2 * 9
    for size in _out_shape(x, stride):
        count *= size
    return count


def _backward_flops(
    dy: Any, x: Any, weight: Any, *, stride: int, input_grad: bool, weight_grad: bool, **_: Any
) -> int:
    return (input_grad + weight_grad) * _flops(x, weight, stride=stride)


define(
    "depthwise_conv2d(Tensor x, Tensor weight, Tensor? bias, *, int stride, str? activation) -> "
    "Tensor",
    reference=depthwise_conv2d_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    flops=_flops,
)
define(
    "depthwise_conv2d_backward(Tensor dy, Tensor x, Tensor weight, *, int stride, bool input_grad, "
    "bool weight_grad) -> (Tensor, Tensor, Tensor)",
    reference=depthwise_conv2d_backward_reference,
    fake=_fake_backward,
    backward=no_second_derivative,
    flops=_backward_flops,
)
by_torch_on_cuda("depthwise_conv2d", _cuda)
by_torch_on_cuda("depthwise_conv2d_backward", _cuda_backward)
