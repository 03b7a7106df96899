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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.decoding.token_blocks import kind_of
from pyops.ops.layers.activation import ACTIVATIONS
from pyops.ops.layers.few_rows import MOST_ROWS, check_operands
from pyops.ops.layers.norm import check_forward
from pyops.ops.library import build_info

__all__ = [
    "PreparedNorm",
    "PreparedProduct",
    "cached_attention",
    "prepared_activation",
    "prepared_code_rows",
    "prepared_linear",
    "turned",
]


class PreparedProduct:
    """x [R, K] -> [R, N] of one linear layer.

    Args:
        kernel: Of x and `operands`.
        operands: Weight and bias; or codes, scales, zero points and bias.
        bits: Of the codes; 0: there are none.
        most_rows: More rows are left to `otherwise`, as is float64 times codes.
        otherwise: The product by other means.
    """

    def __init__(
        self,
        kernel: Callable[..., Tensor],
        operands: Sequence[Tensor | None],
        *,
        bits: int,
        most_rows: int,
        otherwise: Callable[[Tensor], Tensor],
    ) -> None:
        self._kernel, self._operands, self._otherwise = kernel, operands, otherwise
        self._options = {"bits": bits} if bits else {}
        self.most_rows = most_rows
        self.operands = [operand for operand in operands if operand is not None]
        """Those that there are, as `token_blocks_` takes them."""
        self.kind = kind_of(
            bits, zero_points=bool(bits) and operands[2] is not None, bias=operands[-1] is not None
        )
        """What `token_blocks_` is told of them."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most_rows or (self._options and x.dtype == torch.float64):
            return self._otherwise(x)
        return self._kernel(x, *self._operands, **self._options)


def prepared_linear(weight: Tensor, bias: Tensor | None) -> PreparedProduct:
    """As `few_rows.linear` without gradients and autocast: x [R, K] -> [R, N].

    Args:
        weight: [N, K], on the CPU.
        bias: [N], or None.

    Raises:
        ValueError: For operands of other shapes.
        TypeError: For other dtypes.
    """
    check_operands(weight[:1], weight, bias)
    return PreparedProduct(
        torch.ops.pyops.few_rows_linear.default,
        (weight, bias),
        bits=0,
        most_rows=MOST_ROWS.get(weight.dtype, 0) if build_info()["extension"] else 0,
        otherwise=lambda x: functional.linear(x, weight, bias),
    )


def prepared_code_rows(
    *operands: Tensor | None, bits: int, most_rows: int, otherwise: Callable[[Tensor], Tensor]
) -> PreparedProduct:
    """As `code_rows_product`: x [R, K] -> [R, N].

    Args:
        operands: Codes, scales, zero points and bias of `code_rows_product`.
        bits: Of a code.
        most_rows: More rows are left to `otherwise`.
        otherwise: The product by other means.
    """
    kernel = torch.ops.pyops.code_rows_product.default
    return PreparedProduct(kernel, operands, bits=bits, most_rows=most_rows, otherwise=otherwise)


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
        self.eps, self.rms = eps, offset is not None
        self.operands = [weight + offset if offset else weight, *([] if bias is None else [bias])]
        """As `token_blocks_` takes them."""
        self.kind = kind_of(bias=bias is not None)
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


def prepared_activation(activation: str, *, gated: bool) -> Callable[[Tensor], Tensor]:
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
