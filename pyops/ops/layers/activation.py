"""Bias and activation in one pass, plain and gated, with a backward that keeps nothing but the
layer's own output.

    x = linear(h)  --->  y = act(x + b)                   forward:   reads x            writes y
         |                                                backward:  reads dy and x
         |                                                           writes dx, and db on the way
         '- saved, and b; neither x + b nor act'(x + b) is

`bias_gated` takes x [..., 2F] = gate | up, one linear layer's output, and gives act(gate + b_gate)
* (up + b_up) of [..., F].

| activation | act(z) | source |
|---|---|---|
| gelu | z Phi(z), Phi the normal distribution | Hendrycks and Gimpel, arXiv:1606.08415 |
| gelu_tanh | z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) | the same; GPT-2's |
| relu | max(z, 0) | |
| silu | z / (1 + exp(-z)) | the same; gated: SwiGLU, Shazeer, arXiv:2002.05202 |

fp32, bf16, fp16 (computed in fp32, rounded once) and float64; any shape and strides; results are
contiguous. The sum over rows that is the bias gradient has a fixed order: the same bits on any
number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.library import define, no_second_derivative

__all__ = [
    "ACTIVATIONS",
    "FLOATS",
    "activate",
    "bias_activation",
    "bias_activation_backward_reference",
    "bias_activation_reference",
    "bias_gated",
    "bias_gated_backward_reference",
    "bias_gated_reference",
    "check_gradient",
    "check_layer",
]

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bias_activation(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """y = act(x + bias), of x's shape and dtype; bias [F] for x [..., F], of x's dtype (cast to it
    under autocast).

    Moves 2 elements forward and 3 backward for each of x; saves x itself. Plain torch moves 4 and 4
    and saves x + bias.

    Raises:
        ValueError: for an unknown activation, a bias of another size, or a dtype that is not of
            fp32, bf16, fp16, fp64.
    """
    bias = _under_autocast(x, bias)
    check_layer("bias_activation", x, bias, activation)
    result: Tensor = torch.ops.pyops.bias_activation.default(x, bias, activation=activation)
    return result


def bias_gated(x: Tensor, bias: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """y = act(gate + bias_gate) * (up + bias_up): x [..., 2F] = gate | up, bias [2F] likewise, y
    [..., F].

    Per element of y: moves 3 elements forward and 5 backward; saves x itself. Plain torch: 9 and 13
    with a bias, and saves two more tensors of y's size.

    Raises:
        ValueError: As `bias_activation` does, and for an odd last dimension.
    """
    bias = _under_autocast(x, bias)
    check_layer("bias_gated", x, bias, activation)
    result: Tensor = torch.ops.pyops.bias_gated.default(x, bias, activation=activation)
    return result


def _under_autocast(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Autocast leaves parameters in fp32 beside 16-bit products: the bias is cast, as torch's
    linear does."""
    return (
        bias.to(x.dtype) if bias is not None and torch.is_autocast_enabled(x.device.type) else bias
    )


def check_layer(op: str, x: Tensor, bias: Tensor | None, activation: str) -> None:
    """Raise ValueError unless the operands of `op`, bias_activation or bias_gated, fit each
    other."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    if x.dtype not in FLOATS or x.dim() == 0:
        raise ValueError(
            f"{op}: x must be float32, bfloat16, float16 or float64 with a last "
            f"dimension; got {x.dtype}, "
            f"shape {tuple(x.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != tuple(x.shape[-1:]) or bias.dtype != x.dtype):
        raise ValueError(
            f"{op}: bias must be [{x.shape[-1]}] {x.dtype}, as x's last dimension; got "
            f"{list(bias.shape)} {bias.dtype}"
        )
    if op == "bias_gated" and x.shape[-1] % 2:
        raise ValueError(
            "bias_gated takes gate | up in the last dimension, so its size is even; got "
            f"x of {tuple(x.shape)}"
        )


def check_gradient(op: str, dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> None:
    """As `check_layer` for the backward of `op`: dy must be of x's dtype and y's shape too."""
    check_layer(op, x, bias, activation)
    shape = (*x.shape[:-1], x.shape[-1] // 2) if op == "bias_gated" else tuple(x.shape)
    if tuple(dy.shape) != shape or dy.dtype != x.dtype:
        raise ValueError(
            f"{op}: dy must be {list(shape)} {x.dtype}, as y; got {list(dy.shape)} {dy.dtype}"
        )


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def activate(z: Tensor, activation: str) -> Tensor:
    """act(z) in plain torch, in z's dtype."""
    if activation == "gelu":
        return functional.gelu(z)
    if activation == "gelu_tanh":
        return functional.gelu(z, approximate="tanh")
    return functional.silu(z) if activation == "silu" else torch.relu(z)


def _slope(z: Tensor, activation: str) -> Tensor:
    """act'(z)."""
    if activation == "gelu":
        result: Tensor = (
            0.5 * torch.erfc(-z * math.sqrt(0.5))
            + z * torch.exp(-0.5 * z * z) * (0.5 / math.pi) ** 0.5
        )
        return result
    if activation == "gelu_tanh":
        s = torch.sigmoid(math.sqrt(8 / math.pi) * z * (1 + 0.044715 * z * z))
        return s + z * s * (1 - s) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * z * z)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    return (~(z <= 0)).to(z.dtype)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    z = x.to(_computed_in(x))
    return (z if bias is None else z + bias.to(z.dtype)).contiguous()


def _gradients(dz: Tensor, x: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor]:
    dbias = (
        dz.flatten(0, -2).sum(0)
        if bias_grad and dz.dim() > 1
        else dz.clone()
        if bias_grad
        else dz.new_empty(0)
    )
    return dz.to(x.dtype).contiguous(), dbias.to(x.dtype)


def bias_activation_reference(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """The meaning of `bias_activation` in plain torch, without its derivative."""
    check_layer("bias_activation", x, bias, activation)
    return activate(_biased(x.detach(), bias), activation).to(x.dtype)


def bias_activation_backward_reference(
    dy: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx = dy * act'(x + bias) and dbias, the sum of dx over rows before it is rounded; [0] unless
    `bias_grad`."""
    check_gradient("bias_activation", dy, x, bias, activation)
    z = _biased(x, bias)
    return _gradients(dy.to(z.dtype) * _slope(z, activation), x, bias_grad)


def bias_gated_reference(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """The meaning of `bias_gated` in plain torch, without its derivative."""
    check_layer("bias_gated", x, bias, activation)
    gate, up = _biased(x.detach(), bias).chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(x.dtype)


def bias_gated_backward_reference(
    dy: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx = dgate | dup = dy * (up + b_up) * act'(gate + b_gate) | dy * act(gate + b_gate); dbias as
    in `bias_activation`."""
    check_gradient("bias_gated", dy, x, bias, activation)
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    dy = dy.to(gate.dtype)
    return _gradients(
        torch.cat([dy * up * _slope(gate, activation), dy * activate(gate, activation)], dim=-1),
        x,
        bias_grad,
    )


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    return _contiguous_like(x)


def _fake_gated(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


def _fake_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    return _contiguous_like(x), x.new_empty(x.shape[-1] if bias_grad else 0)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.activation = keyword_only_inputs["activation"]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return _gradient(torch.ops.pyops.bias_activation_backward.default, ctx, dy)


def _backward_gated(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return _gradient(torch.ops.pyops.bias_gated_backward.default, ctx, dy)


def _gradient(op: Any, ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, bias = ctx.saved_tensors
    bias_grad = bias is not None and ctx.needs_input_grad[1]
    dx, dbias = op(dy, x, bias, activation=ctx.activation, bias_grad=bias_grad)
    return dx if ctx.needs_input_grad[0] else None, dbias if bias_grad else None


_FORWARD = "(Tensor x, Tensor? bias, *, str activation) -> Tensor"
_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? bias, *, str activation, bool bias_grad) -> (Tensor, Tensor)"
)
define(
    f"bias_activation{_FORWARD}",
    reference=bias_activation_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    triton="activation",
)
define(
    f"bias_gated{_FORWARD}",
    reference=bias_gated_reference,
    fake=_fake_gated,
    backward=_backward_gated,
    setup_context=_save,
    triton="activation",
)
define(
    f"bias_activation_backward{_BACKWARD}",
    reference=bias_activation_backward_reference,
    fake=_fake_backward,
    backward=no_second_derivative,
    triton="activation",
)
define(
    f"bias_gated_backward{_BACKWARD}",
    reference=bias_gated_backward_reference,
    fake=_fake_backward,
    backward=no_second_derivative,
    triton="activation",
)
