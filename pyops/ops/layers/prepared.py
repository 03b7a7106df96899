"""Ops of one decoding step with their parameters checked once: what is left of each call is the
kernel's time.

    prepared_linear(weight, bias)          -->  x [R, K] -> [R, N]
    prepared_code_rows(codes, scales, ..)  -->  x [R, K] -> [R, N]
    PreparedNorm(weight, bias, eps)        -->  x -> norm(x);  (x, residual) -> (norm(s), s)
    prepared_activation(name, gated)       -->  x [R, F or 2F] -> [R, F]
    turned, cached_attention               ops on activations alone

A decoder adds one token at a time, and a layer of width 512 takes some 100 us for it, of which the
checks and look-ups of the differentiable wrappers take more than the kernels. None of these
functions has a derivative; they are for CPU tensors of a model that one rank holds. The kernels
still check sizes and memory themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers.activation import ACTIVATIONS
from pyops.ops.layers.few_rows import MOST_ROWS, check_operands
from pyops.ops.layers.norm import check_forward
from pyops.ops.library import build_info

__all__ = [
    "PreparedNorm",
    "cached_attention",
    "prepared_activation",
    "prepared_code_rows",
    "prepared_linear",
    "turned",
]

Product = Callable[[Tensor], Tensor]


def prepared_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """As `few_rows.linear` without gradients and autocast: x [R, K] -> [R, N].

    Args:
        weight: [N, K], on the CPU.
        bias: [N], or None.

    Raises:
        ValueError: For operands of other shapes.
        TypeError: For other dtypes.
    """
    check_operands(weight[:1], weight, bias)
    most = MOST_ROWS.get(weight.dtype, 0) if build_info()["extension"] else 0
    kernel = torch.ops.pyops.few_rows_linear.default

    def product(x: Tensor) -> Tensor:
        if x.shape[0] > most:
            return functional.linear(x, weight, bias)
        y: Tensor = kernel(x, weight, bias)
        return y

    return product


def prepared_code_rows(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
) -> Product:
    """As `code_rows_product`: x [R, K] -> [R, N].

    Args:
        codes: As of `code_rows_product`; so all others.
        scales: See codes.
        zero_points: See codes.
        bias: See codes.
        bits: See codes.
    """
    kernel = torch.ops.pyops.code_rows_product.default

    def product(x: Tensor) -> Tensor:
        y: Tensor = kernel(x, codes, scales, zero_points, bias, bits=bits)
        return y

    return product


class PreparedNorm:
    """A norm over the last dimension, alone or with the residual added first.

    Args:
        weight: [D].
        bias: [D], or None.
        eps: Added to the variance or the mean square.
        offset: Of RMSNorm, which has no bias: added to the weight; None: LayerNorm.

    Raises:
        ValueError: For operands of other shapes.
        TypeError: For other dtypes.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, eps: float, offset: float | None
    ) -> None:
        check_forward([weight], weight, bias)
        ops = torch.ops.pyops
        self._given: tuple[Any, ...] = (weight, bias) if offset is None else (weight,)
        self._options = {"eps": eps} if offset is None else {"eps": eps, "offset": offset}
        self._plain = ops.layer_norm.default if offset is None else ops.rms_norm.default
        self._added = ops.add_layer_norm.default if offset is None else ops.add_rms_norm.default

    def __call__(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(s), s) of s = x + added; of x where nothing is added."""
        if added is None:
            return self._plain(x, *self._given, **self._options)[0], x
        y, s, *_ = self._added(added, x, *self._given, **self._options)
        return y, s


def prepared_activation(activation: str, *, gated: bool) -> Product:
    """As `bias_gated` and `bias_activation` without a bias.

    Args:
        activation: One of `ACTIVATIONS`.
        gated: The input is gate | up.

    Raises:
        ValueError: For another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    ops = torch.ops.pyops
    kernel = ops.bias_gated.default if gated else ops.bias_activation.default

    def activated(x: Tensor) -> Tensor:
        y: Tensor = kernel(x, None, activation=activation)
        return y

    return activated


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As `rotary` of tables that fit.

    Args:
        x: [B, T, H, K].
        cos: fp32 [T, R/2] or [B, T, R/2].
        sin: As cos.
        interleaved: See `rotary`.
    """
    y: Tensor = torch.ops.pyops.rotary.default(x, cos, sin, interleaved=interleaved, inverse=False)
    return y


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float
) -> Tensor:
    """As `attention` of one query for each row, which sees all keys that the mask leaves.

    Args:
        q: [R, 1, H, K].
        k: [R, S, G, K].
        v: As k.
        mask: bool [R, S], True where a key is seen; None: all are.
        scale: Factor of the scores.
    """
    y: Tensor = torch.ops.pyops.attention_forward.default(
        q,
        k,
        v,
        *(None, None, None, None, mask, None, None, None, None, None, None, None, None, None),
        scale=scale,
        soft_cap=0.0,
        causal=False,
        before=-1,
        after=-1,
        block=0,
        p=0.0,
        first=0,
        row_stride=0,
        num_queries=1,
        num_keys=k.shape[1],
    )[0]
    return y
