"""The blocks of a decoder for one new token of each row, in one call.

    h, x = norm1(x + added)    q k v = inner h    y = token_attention_(q, k, v)    added = output y
    h, x = norm2(x + added)                                  added = down activation(up h)

For fp32 without gradients, on the CPU. The kernels are those of the ops that compute the parts, so
that the bits are theirs; what the call saves is the way of each part through Python and torch's
dispatcher, and the tensors in between: at one row and width 512 that is as long as the products of
int4 weights. On CUDA it is plain torch.

    operands   of each block: weight[, bias] of norm1; of the products that make q, k and v; of
               output; of norm2; of up; of down; one after the other
    a product  weight[, bias], or codes, scales[, zero points][, bias] of `code_rows_product`
    kinds      of each norm and product, in the same order: see `kind_of`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.codes.code_rows import code_rows_product_reference
from pyops.ops.decoding.token_attention import token_attention_reference
from pyops.ops.layers.activation import bias_activation_reference, bias_gated_reference
from pyops.ops.layers.norm import layer_norm_reference, rms_norm_reference
from pyops.ops.library import by_torch_on_cuda, define

__all__ = ["BlockForm", "kind_of", "token_blocks_", "token_blocks_reference"]

_BITS, _ZERO_POINTS, _BIAS = 15, 16, 32


@dataclass(frozen=True)
class BlockForm:
    """What is alike in all blocks of a decoder."""

    width: int
    """Of a head."""
    scale: float
    """Factor of the scores of attention."""
    eps: float
    """Added to the variance or the mean square of a norm."""
    rms: bool
    """Norms are RMSNorm, else LayerNorm."""
    activation: str
    """As of `bias_activation`."""
    gated: bool
    """`up` makes gate | up, as `bias_gated` takes it."""
    interleaved: bool
    """As of `rotary`."""


def kind_of(bits: int = 0, *, zero_points: bool = False, bias: bool = False) -> int:
    """The number that says which operands a norm or a product has.

    Args:
        bits: Of the codes of a product, 4 or 8; 0: a norm, or a weight of fp32 numbers.
        zero_points: Whether codes have them.
        bias: Whether there is one.
    """
    return bits | _ZERO_POINTS * zero_points | _BIAS * bias


def token_blocks_(
    x: Tensor,
    blocks: tuple[Sequence[Tensor], Sequence[int]],
    kept: tuple[Sequence[Tensor], Sequence[Tensor]],
    places: Tensor,
    turns: tuple[Tensor, Tensor] | None = None,
    *,
    first_row: int = 0,
    form: BlockForm,
) -> Tensor:
    """x [R, D] behind the blocks; keys and values of the new tokens are kept.

    Args:
        x: fp32 [R, D].
        blocks: Operands and kinds of all blocks, see above. One product makes q, k and v as
            [heads, 3, width], or the first of two q as [heads, width] and the second k and v as
            [groups, 2, width].
        kept: Keys and values of each block, as of `token_attention_`.
        places: int64 of R numbers: where each row's token stands.
        turns: cos and sin of these places, as of `token_attention_`.
        first_row: Of keys and values, to which the first row of x belongs.
        form: Of the blocks.

    Raises:
        RuntimeError: For operands that don't fit, before anything is kept.
    """
    cos, sin = (None, None) if turns is None else turns
    y: Tensor = torch.ops.pyops.token_blocks_.default(
        x, *blocks, *kept, places, cos, sin, first_row=first_row, **asdict(form)
    )
    return y


def token_blocks_reference(
    x: Tensor,
    operands: Sequence[Tensor],
    kinds: Sequence[int],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *positions: Any,
    first_row: int,
    **form: Any,
) -> Tensor:
    """The op in plain torch. `positions`: places, cos, sin; `form`: fields of `BlockForm`."""
    given = _Operands(operands, kinds, BlockForm(**form))
    merged, width = len(kinds) == 6 * len(keys), given.form.width
    gate = bias_gated_reference if given.form.gated else bias_activation_reference
    attention: dict[str, Any] = {
        "first_row": first_row,
        "scale": given.form.scale,
        "interleaved": given.form.interleaved,
    }
    added = None
    for kept in zip(keys, values, strict=True):
        h, x = given.norm(x, added)
        if merged:
            q, k, v = given.product(h).view(len(x), 1, -1, 3, width).unbind(3)
        else:
            q = given.product(h).view(len(x), 1, -1, width)
            k, v = given.product(h).view(len(x), 1, -1, 2, width).unbind(3)
        y = token_attention_reference(q, k, v, *kept, *positions, **attention)
        h, x = given.norm(x, given.product(y))
        up = given.product(h)
        added = given.product(gate(up, None, activation=given.form.activation))
    return x.clone() if added is None else x + added


class _Operands:
    """Of all blocks, taken one after the other."""

    def __init__(self, tensors: Sequence[Tensor], kinds: Sequence[int], form: BlockForm) -> None:
        self._tensors, self._kinds, self.form = iter(tensors), iter(kinds), form

    def norm(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + added), x + added)"""
        kind, x = next(self._kinds), x if added is None else added + x
        weight, bias = next(self._tensors), next(_some(self._tensors, kind & _BIAS), None)
        if self.form.rms:
            return rms_norm_reference(x, weight, eps=self.form.eps, offset=0.0)[0], x
        return layer_norm_reference(x, weight, bias, eps=self.form.eps)[0], x

    def product(self, x: Tensor) -> Tensor:
        kind, weight = next(self._kinds), next(self._tensors)
        scales, zero_points, bias = (
            next(_some(self._tensors, kind & part), None) for part in (_BITS, _ZERO_POINTS, _BIAS)
        )
        if scales is None:
            return functional.linear(x, weight, bias)
        given = (weight, scales, zero_points, bias)
        return code_rows_product_reference(x, *given, bits=kind & _BITS)


def _some(tensors: Iterator[Tensor], are_there: int) -> Iterator[Tensor]:
    return tensors if are_there else iter(())


def _fake(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)


define(
    "token_blocks_(Tensor x, Tensor[] operands, int[] kinds, Tensor(a!)[] keys, "
    "Tensor(b!)[] values, Tensor places, Tensor? cos, Tensor? sin, *, int first_row, int width, "
    "float scale, float eps, bool rms, str activation, bool gated, bool interleaved) -> Tensor",
    reference=token_blocks_reference,
    fake=_fake,
)
by_torch_on_cuda("token_blocks_", token_blocks_reference)
