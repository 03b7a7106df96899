"""Batch norm in four parts, between which ranks can exchange what they have: moments, application,
and for the gradient the sums and their use.

    x [..., C] --> moments --> (ranks merge them) --> mean, rstd --> apply --> y
    dy, x      --> sums    --> (ranks add them)   ---------------> input_grad --> dx

A channel is the last dimension, so an image is [N, H, W, C]. Moments are the mean and the sum of
the squared distances from it (never E[x^2] - E[x]^2), in float64, of a few rows in fp32 first and
then merged in order (Chan, Golub and LeVeque, 1979): the same bits for any number of threads. The
gradient's sums likewise. Nothing here has a derivative of its own: that is for the caller, who
joins the parts of the ranks (pyops.models.coatnet.batch_norm).

Bytes per element of fp32: moments 4, application 8, sums 8, the input's gradient 12. On CUDA the
parts are plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops.ops.layers.activation import ACTIVATIONS, FLOATS, activate
from pyops.ops.library import by_torch_on_cuda, define, no_second_derivative

__all__ = [
    "batch_norm_apply",
    "batch_norm_apply_reference",
    "batch_norm_input_grad",
    "batch_norm_input_grad_reference",
    "batch_norm_moments",
    "batch_norm_moments_reference",
    "batch_norm_sums",
    "batch_norm_sums_reference",
    "check_input",
    "merge_moments",
]


def batch_norm_moments(x: Tensor) -> Tensor:
    """float64 [2, C]: mean, and sum of squared distances from it, of each channel of x [..., C].

    Raises:
        ValueError: for an x without dimensions.
        TypeError: for another dtype than fp32, bf16, fp16 and float64.
    """
    check_input("batch_norm_moments", x)
    result: Tensor = torch.ops.pyops.batch_norm_moments.default(x)
    return result


def merge_moments(counts: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Count and moments of several parts as one, by the formula of Chan, Golub and LeVeque for all
    parts at once; sums go by the parts' order.

    Args:
        counts: float64 [R], of numbers a channel; a part may be empty.
        moments: float64 [R, 2, C], of each part what `batch_norm_moments` gives.

    Returns:
        The sum of counts, float64 without dimensions, and moments [2, C].
    """
    count = counts.sum()
    shares = torch.where(count > 0, counts / count, 0.0)
    mean = (shares[:, None] * moments[:, 0]).sum(0)
    apart = counts[:, None] * (moments[:, 0] - mean).square()
    return count, torch.stack([mean, (moments[:, 1] + apart).sum(0)])


def batch_norm_apply(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """y = act((x - mean) rstd weight + bias), of x's dtype, rounded once.

    Args:
        x: [..., C], fp32, bf16, fp16 or float64.
        mean, rstd: float64 [C].
        weight, bias: [C] of one of these dtypes; float64 where x is.
        activation: "gelu", "gelu_tanh", "relu", "silu" or None.

    Raises:
        ValueError: for other shapes and activations.
        TypeError: for other dtypes.
    """
    check_input("batch_norm_apply", x, (mean, rstd), (weight, bias), activation)
    result: Tensor = torch.ops.pyops.batch_norm_apply.default(
        x, mean, rstd, weight, bias, activation=activation
    )
    return result


def batch_norm_sums(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """float64 [2, C]: the sums of dy and of dy (x - mean), both of x's shape and dtype."""
    check_input("batch_norm_sums", x, (mean,), dy=dy)
    result: Tensor = torch.ops.pyops.batch_norm_sums.default(dy, x, mean)
    return result


def check_sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, sums: Tensor
) -> None:
    """ValueError or TypeError for operands of `batch_norm_input_grad` that do not fit."""
    check_input("batch_norm_input_grad", x, (mean, rstd), (weight,), dy=dy)
    if tuple(sums.shape) != (2, x.shape[-1]) or sums.dtype != torch.float64:
        raise ValueError(
            f"batch_norm_input_grad: sums must be float64 [2, {x.shape[-1]}]; got "
            f"{list(sums.shape)} {sums.dtype}"
        )


def batch_norm_input_grad(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    *,
    count: float,
) -> Tensor:
    """dx = weight rstd (dy - sums[0] / count - (x - mean) rstd^2 sums[1] / count).

    Args:
        dy, x: [..., C] of one dtype.
        mean, rstd: float64 [C], of all that was normalized together.
        weight: [C] or None.
        sums: float64 [2, C], `batch_norm_sums` of all that was normalized together.
        count: of numbers a channel, likewise.
    """
    check_sums(dy, x, mean, rstd, weight, sums)
    result: Tensor = torch.ops.pyops.batch_norm_input_grad.default(
        dy, x, mean, rstd, weight, sums, count=count
    )
    return result


def check_input(
    op: str,
    x: Tensor,
    statistics: tuple[Tensor, ...] = (),
    vectors: tuple[Tensor | None, ...] = (),
    activation: str | None = None,
    dy: Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError unless the operands of `op` fit each other."""
    if x.dim() == 0:
        raise ValueError(f"{op}: x has no dimensions; its last one is that of channels")
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be one of {FLOATS}; got {x.dtype}; cast with .to(dtype)")
    channels, double = x.shape[-1], x.dtype == torch.float64
    for t in statistics:
        if tuple(t.shape) != (channels,) or t.dtype != torch.float64:
            raise ValueError(
                f"{op}: mean and rstd must be float64 [{channels}]; got {list(t.shape)} {t.dtype}"
            )
    for vector in vectors:
        if vector is None:
            continue
        if tuple(vector.shape) != (channels,):
            raise ValueError(
                f"{op}: weight and bias must be [{channels}], as x has {channels} channels; got "
                f"{list(vector.shape)}"
            )
        if vector.dtype not in FLOATS or (vector.dtype == torch.float64) != double:
            raise TypeError(
                f"{op}: weight and bias must be float64 where x is, and fp32, bf16 or fp16 "
                f"elsewhere; got {vector.dtype} beside {x.dtype}; cast with .to(dtype)"
            )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation must be None or one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    if dy is not None and (dy.shape != x.shape or dy.dtype != x.dtype):
        raise ValueError(
            f"{op}: dy must be {list(x.shape)} {x.dtype}, as x; got {list(dy.shape)} {dy.dtype}"
        )


def _pixels(x: Tensor) -> Tensor:
    return x.detach().double().reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1])


def batch_norm_moments_reference(x: Tensor) -> Tensor:
    """The op in plain torch, in float64."""
    check_input("batch_norm_moments", x)
    wide = _pixels(x)
    if not wide.shape[0]:
        return wide.new_zeros(2, x.shape[-1])
    mean = wide.mean(0)
    return torch.stack([mean, (wide - mean).square().sum(0)])


def batch_norm_apply_reference(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    """The op in plain torch, in float64."""
    check_input("batch_norm_apply", x, (mean, rstd), (weight, bias), activation)
    y = (x.detach().double() - mean) * (rstd if weight is None else rstd * weight.double())
    y = y if bias is None else y + bias.double()
    y = y if activation is None else activate(y, activation)
    return y.to(x.dtype).contiguous()


def batch_norm_sums_reference(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """The op in plain torch, in float64."""
    check_input("batch_norm_sums", x, (mean,), dy=dy)
    g = _pixels(dy)
    return torch.stack([g.sum(0), (g * (_pixels(x) - mean)).sum(0)])


def batch_norm_input_grad_reference(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    *,
    count: float,
) -> Tensor:
    """The op in plain torch, in float64."""
    check_sums(dy, x, mean, rstd, weight, sums)
    scale = rstd if weight is None else rstd * weight.double()
    along = (x.detach().double() - mean) * (rstd * rstd * sums[1] / count)
    return (scale * (dy.double() - sums[0] / count - along)).to(x.dtype).contiguous()


def _fake_doubles(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[-1]), dtype=torch.float64)


def _fake_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    define(schema, reference=reference, fake=fake, backward=no_second_derivative)
    by_torch_on_cuda(schema[: schema.index("(")], reference)


_define(
    "batch_norm_moments(Tensor x) -> Tensor",
    batch_norm_moments_reference,
    _fake_doubles,
)
_define(
    "batch_norm_apply(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, *, "
    "str? activation) -> Tensor",
    batch_norm_apply_reference,
    lambda x, *_, activation: _fake_like(x),
)
_define(
    "batch_norm_sums(Tensor dy, Tensor x, Tensor mean) -> Tensor",
    batch_norm_sums_reference,
    lambda dy, x, mean: _fake_doubles(x),
)
_define(
    "batch_norm_input_grad(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor sums, *, float count) -> Tensor",
    batch_norm_input_grad_reference,
    lambda dy, x, *_, count: _fake_like(x),
)
