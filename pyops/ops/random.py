"""Counter-based random numbers: element i of a stream is a function of (key, i), whoever draws it.

    key (64 bit) ----.
                      Philox4x32-10 --> 4 words of 32 bit --> lane = index % 4
    index // 4 ------'

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key goes in as
(low, high) word, the counter as (low, high, 0, 0). Element i of `out` (in memory order of a
contiguous tensor) has the global index

    offset + (i // row) * row_stride + i % row

so that a slice of the last dimension of a larger tensor draws exactly its part of the whole. CPU,
CUDA and the reference give the same bits: logarithm, sine and cosine are polynomials
(csrc/math/gaussian.h) evaluated without contraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.ops.library import define

__all__ = [
    "philox_dropout_mask_",
    "philox_dropout_mask_reference",
    "philox_normal_",
    "philox_normal_reference",
    "philox_uniform_",
    "philox_uniform_reference",
    "philox_words",
    "signed64",
]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def signed64(value: int) -> int:
    """`value` modulo 2^64 as the signed integer that a schema's `int` can carry."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def philox_uniform_(out: Tensor, *, key: int, offset: int, row: int, row_stride: int) -> None:
    """out[i] = (word >> 8) * 2^-24, uniform on [0, 1). fp32, contiguous. Moves 4 bytes per
    element."""
    torch.ops.pyops.philox_uniform_.default(
        out, key=signed64(key), offset=offset, row=row, row_stride=row_stride
    )


def philox_normal_(out: Tensor, *, key: int, offset: int, row: int, row_stride: int) -> None:
    """Standard normal numbers by Box-Muller. fp32, contiguous. Moves 4 bytes per element.

    Lanes (0, 1) come from words (0, 1), lanes (2, 3) from words (2, 3), as (r cos a, r sin a) with
    r = sqrt(-2 ln u), u = ((word_0 >> 1) + 1) * 2^-31, a = 2 pi (word_1 >> 8) * 2^-24. No value
    exceeds 6.56.
    """
    torch.ops.pyops.philox_normal_.default(
        out, key=signed64(key), offset=offset, row=row, row_stride=row_stride
    )


def philox_dropout_mask_(
    out: Tensor, *, p: float, key: int, offset: int, row: int, row_stride: int
) -> None:
    """out[i] = uniform[i] >= p: True keeps, with probability 1 - p. bool, contiguous. Moves 1 byte
    per element."""
    torch.ops.pyops.philox_dropout_mask_.default(
        out, p=p, key=signed64(key), offset=offset, row=row, row_stride=row_stride
    )


def philox_words(counter: Tensor, *, key: int, high: tuple[int, int] = (0, 0)) -> Tensor:
    """Philox4x32-10 of each int64 counter: int64 [..., 4] holding 32-bit words. `high` are counter
    words 2 and 3."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.full_like(c0, high[0] & _MASK), torch.full_like(c0, high[1] & _MASK)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # A product of two 32-bit words wraps in int64, but its bits are right; the mask drops the
        # copied sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def _check(out: Tensor, dtype: torch.dtype, *, offset: int, row: int, row_stride: int) -> None:
    if out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous {dtype} tensor, got {out.dtype} with strides {out.stride()}"
        )
    if offset < 0 or row < 1 or row_stride < 0:
        raise ValueError(
            f"need offset >= 0, row >= 1, row_stride >= 0; got {offset}, {row}, {row_stride}"
        )


def _global_index(out: Tensor, *, offset: int, row: int, row_stride: int) -> Tensor:
    i = torch.arange(out.numel(), dtype=torch.int64, device=out.device)
    return offset + (i // row) * row_stride + i % row


def _words_of(index: Tensor, key: int) -> Tensor:
    return philox_words(index >> 2, key=key)


def _uniform(index: Tensor, key: int) -> Tensor:
    word = _words_of(index, key).gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return (word >> 8).to(torch.float32) * 2.0**-24


def philox_uniform_reference(
    out: Tensor, *, key: int, offset: int, row: int, row_stride: int
) -> None:
    """The meaning of `philox_uniform_` in plain torch, bit for bit."""
    _check(out, torch.float32, offset=offset, row=row, row_stride=row_stride)
    index = _global_index(out, offset=offset, row=row, row_stride=row_stride)
    out.copy_(_uniform(index, key).view(out.shape))


def philox_dropout_mask_reference(
    out: Tensor, *, p: float, key: int, offset: int, row: int, row_stride: int
) -> None:
    """The meaning of `philox_dropout_mask_` in plain torch, bit for bit. p is rounded to fp32
    first."""
    _check(out, torch.bool, offset=offset, row=row, row_stride=row_stride)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be a probability in [0, 1], got {p}")
    index = _global_index(out, offset=offset, row=row, row_stride=row_stride)
    out.copy_(
        (_uniform(index, key) >= torch.tensor(p, dtype=torch.float32, device=out.device)).view(
            out.shape
        )
    )


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule, multiplication and addition rounded apart."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x
        value = value + coefficient
    return value


# The coefficients are those of csrc/math/gaussian.h, in the same order of evaluation.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3


def _log(u: Tensor) -> Tensor:
    bits = u.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    z = f * f
    y = f * z
    y = y * _polynomial(f, _LOG)
    y = y + e * _LN2_LOW
    y = y - z * 0.5
    return (f + y) + e * _LN2_HIGH


def _sin_cos_turns(u: Tensor) -> tuple[Tensor, Tensor]:
    """sin(2 pi u), cos(2 pi u) for u in [0, 1): the quadrant is taken off exactly, two polynomials
    do the rest."""
    t = u * 4.0
    q = torch.floor(t + 0.5)
    x = (t - q) * 1.5707963267948966
    z = x * x
    sine = x * z
    sine = sine * _polynomial(z, _SIN)
    sine = sine + x
    cosine = z * z
    cosine = cosine * _polynomial(z, _COS)
    cosine = cosine - z * 0.5
    cosine = cosine + 1.0
    quadrant = q.to(torch.int32) & 3
    swap = (quadrant & 1) == 1
    s, c = torch.where(swap, cosine, sine), torch.where(swap, sine, cosine)
    return torch.where(quadrant >= 2, -s, s), torch.where((quadrant == 1) | (quadrant == 2), -c, c)


def philox_normal_reference(
    out: Tensor, *, key: int, offset: int, row: int, row_stride: int
) -> None:
    """The meaning of `philox_normal_` in plain torch, bit for bit."""
    _check(out, torch.float32, offset=offset, row=row, row_stride=row_stride)
    index = _global_index(out, offset=offset, row=row, row_stride=row_stride)
    words = _words_of(index, key)
    first = (index & 2).unsqueeze(-1)
    u = ((words.gather(-1, first).squeeze(-1) >> 1).to(torch.float32) + 1.0) * 2.0**-31
    angle = (words.gather(-1, first + 1).squeeze(-1) >> 8).to(torch.float32) * 2.0**-24
    radius = torch.sqrt(
        (_log(u) * -2.0).double()
    ).float()  # torch's fp32 sqrt on the CPU is not always the nearest
    sine, cosine = _sin_cos_turns(angle)
    out.copy_((radius * torch.where((index & 1) == 1, sine, cosine)).view(out.shape))


def _fake(out: Tensor, **_: object) -> None:
    return None


_PLACE = "int key, int offset, int row, int row_stride) -> ()"
define(
    f"philox_uniform_(Tensor(a!) out, *, {_PLACE}", reference=philox_uniform_reference, fake=_fake
)
define(f"philox_normal_(Tensor(a!) out, *, {_PLACE}", reference=philox_normal_reference, fake=_fake)
define(
    f"philox_dropout_mask_(Tensor(a!) out, *, float p, {_PLACE}",
    reference=philox_dropout_mask_reference,
    fake=_fake,
)
