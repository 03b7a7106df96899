"""Eight bits per number: int8 or fp8 with one fp32 scale per block, stochastic rounding and error
feedback if wanted.

    u = x + error --> scale = max |u| / limit of each block --> code = round(u / scale) --> payload
                                                            [fp32 scales | codes]
                                                                 error <- u - scale * code

    format   limit   codes                                              relative step
    int8       127   -127 .. 127                                        1/127 of the largest
    e4m3       448   sign, 4 bits of exponent, 3 of fraction            1/16 .. 1/8 of each
    e5m2     57344   sign, 5 bits of exponent, 2 of fraction            1/8 .. 1/4 of each

All arithmetic is fp32 and every operation is rounded once, so every instruction set, any number of
threads, and plain torch give the same bits. Rounded to nearest (even), the new error is exact:
`decoded + error' == u`, as real numbers. Rounded at random it is the nearest fp32 number to u -
decoded.

A payload is uint8, contiguous, `payload_bytes(n)` long: the scales of ceil(n / block) blocks, then
n codes. Only the last block may be shorter. A block of zeros has scale 0 and codes 0. A block in
which u is not finite gets the scale nan, so that whoever decodes it sees nan; its errors stay, and
`flag` becomes 1.

fp8: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, table 1. Stochastic
rounding: up with the probability of the part cut off, by 16 random bits: element i takes half-word
j % 8 of Philox(key=seed, counter=(j // 8, 0, 0)), j = offset + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.random import philox_words, signed64

__all__ = [
    "BLOCK",
    "FORMATS",
    "payload_bytes",
    "quantize_decode_",
    "quantize_decode_reference",
    "quantize_encode_",
    "quantize_encode_reference",
    "quantize_reencode_",
    "quantize_reencode_reference",
    "quantize_sum_rows_",
    "quantize_sum_rows_reference",
]

BLOCK = 256
FORMATS = ("int8", "e4m3", "e5m2")
_LIMITS = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_MULTIPLE = 32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def payload_bytes(n: int, *, block: int = BLOCK) -> int:
    """Bytes of the payload of n numbers."""
    return n + 4 * -(-n // block)


def quantize_encode_(
    payload: Tensor,
    x: Tensor,
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    block: int = BLOCK,
    format: str = "int8",
    stochastic_rounding: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Encode u = float(x) + error into `payload`; error <- u - scale * code, in one pass.

    Moves 5 bytes per element of fp32 without error, 13 with it.

    Args:
        payload: uint8 [payload_bytes(n, block=block)], at any address.
        x: fp32, bf16 or fp16, n elements.
        error: fp32 [n], or None for no feedback.
        flag: fp32 [1], set to 1 when a u is not finite and never cleared.
        block: a multiple of 32.
        seed, offset: for stochastic rounding, the key and the global index of x's first element.
    """
    rounding: dict[str, Any] = {
        "stochastic_rounding": stochastic_rounding,
        "seed": signed64(seed),
        "offset": offset,
    }
    torch.ops.pyops.quantize_encode_.default(
        payload, x, error, flag, block=block, format=format, **rounding
    )


def quantize_decode_(
    out: Tensor,
    payload: Tensor,
    *,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """out = scale * (s * code), or out += that, with s of the element's block.

    Moves 5 bytes per element of fp32 (9 when accumulating).

    Args:
        out: fp32, bf16 or fp16, rounded once.
    """
    torch.ops.pyops.quantize_decode_.default(
        out, payload, block=block, format=format, scale=scale, accumulate=accumulate
    )


def quantize_sum_rows_(
    out: Tensor,
    payloads: Sequence[Tensor],
    *,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
) -> None:
    """out = scale * (((d0 + d1) + d2) + ...) in the order of the list, d_r = s_r * code_r. Moves 4
    + rows bytes per element."""
    torch.ops.pyops.quantize_sum_rows_.default(
        out, list(payloads), block=block, format=format, scale=scale
    )


def quantize_reencode_(
    payload: Tensor,
    payloads: Sequence[Tensor],
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    n: int,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """The server's step in one pass: `quantize_sum_rows_` of n numbers, encoded with its own error
    as `quantize_encode_` does.

    `payload` may be none of `payloads`. A nan in a block of any row makes that block nan. Moves 1 +
    rows bytes per element, and 8 with error.
    """
    rounding: dict[str, Any] = {
        "stochastic_rounding": stochastic_rounding,
        "seed": signed64(seed),
        "offset": offset,
    }
    torch.ops.pyops.quantize_reencode_.default(
        payload,
        list(payloads),
        error,
        flag,
        n=n,
        block=block,
        format=format,
        scale=scale,
        **rounding,
    )


def _check(
    payloads: Sequence[Tensor],
    n: int,
    *,
    block: int,
    format: str,
    **fp32: tuple[Tensor | None, int],
) -> None:
    if block <= 0 or block % _MULTIPLE:
        raise ValueError(f"block must be a positive multiple of {_MULTIPLE}, got {block}")
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format}")
    if not payloads:
        raise ValueError("needs at least one payload")
    for payload in payloads:
        if payload.dtype != torch.uint8 or not payload.is_contiguous():
            raise ValueError(
                f"a payload must be uint8 and contiguous, got {payload.dtype} with "
                f"strides {payload.stride()}"
            )
        if payload.numel() != (size := payload_bytes(n, block=block)):
            raise ValueError(
                f"a payload must have {size} bytes for these numbers, got {payload.numel()}"
            )
    for name, (tensor, size) in fp32.items():
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be float32 and contiguous, got {tensor.dtype}")
        if tensor is not None and tensor.numel() != size:
            raise ValueError(f"{name} must have {size} elements, got {tensor.numel()}")


def _check_numbers(x: Tensor, name: str) -> None:
    if x.dtype not in _FLOATS or not x.is_contiguous():
        raise ValueError(
            f"{name} must be float32, bfloat16 or float16 and contiguous, got {x.dtype} "
            f"with strides {x.stride()}"
        )


def _random_halves(n: int, seed: int, offset: int, device: torch.device) -> Tensor:
    index = offset + torch.arange(n, dtype=torch.int64, device=device)
    words = philox_words(index >> 3, key=seed)
    return (
        words.gather(-1, ((index >> 1) & 3).unsqueeze(-1)).squeeze(-1) >> (16 * (index & 1))
    ) & 0xFFFF


def _codes(t: Tensor, format: str, random: Tensor | None) -> Tensor:
    """uint8 codes of numbers within the format's range."""
    dtype = _DTYPES[format]
    if random is None:
        return (t.round() if format == "int8" else t).to(dtype).view(torch.uint8)
    magnitude = t.abs()
    if format == "int8":
        q = ((magnitude * 65536.0).to(torch.int32) + random.to(torch.int32)) >> 16
        return torch.where(t < 0, -q, q).to(torch.int8).view(torch.uint8)
    cut, bias, smallest, unit = (
        (20, 120 << 3, 2.0**-6, 2.0**-9) if format == "e4m3" else (21, 112 << 2, 2.0**-14, 2.0**-16)
    )
    normal = ((magnitude.view(torch.int32).to(torch.int64) + (random << (cut - 16))) >> cut) - bias
    tiny = ((magnitude.clamp(max=smallest) * (65536.0 / unit)).to(torch.int64) + random) >> 16
    return (torch.where(magnitude < smallest, tiny, normal) | (t.signbit().long() << 7)).to(
        torch.uint8
    )


def _each(scales: Tensor, n: int, block: int) -> Tensor:
    return scales.repeat_interleave(block)[:n]


def _decode(scales: Tensor, codes: Tensor, format: str) -> Tensor:
    return scales * codes.view(_DTYPES[format]).float()


def _encode(
    payload: Tensor,
    u: Tensor,
    error: Tensor | None,
    flag: Tensor | None,
    *,
    block: int,
    format: str,
    random: Tensor | None,
) -> None:
    n, blocks = u.numel(), -(-u.numel() // block)
    largest = (
        torch.nn.functional.pad(u.abs(), (0, blocks * block - n)).view(blocks, block).amax(dim=1)
    )
    # Divided by a tensor: by a Python number, CUDA multiplies with its reciprocal, which is another
    # number in the last bit.
    limit = torch.tensor(_LIMITS[format], dtype=torch.float32, device=u.device)
    scales = torch.where(largest.isfinite(), largest / limit, torch.nan)
    each = _each(scales, n, block)
    t = torch.where(each > 0, (u / each).clamp(-_LIMITS[format], _LIMITS[format]), 0.0)
    codes = _codes(t, format, random)
    payload.view(-1)[: 4 * blocks].copy_(scales.view(torch.uint8))
    payload.view(-1)[4 * blocks :].copy_(codes)
    if error is not None:
        new = u - _decode(each, codes, format)
        error.copy_(torch.where(each.isnan(), error.reshape(-1), new).view(error.shape))
    if flag is not None and bool(scales.isnan().any()):
        flag.fill_(1.0)


def _source(x: Tensor, error: Tensor | None) -> Tensor:
    u = x.detach().reshape(-1).float()
    return u + error.reshape(-1) if error is not None else u


def _sum_rows(
    payloads: Sequence[Tensor], n: int, *, block: int, format: str, scale: float
) -> Tensor:
    head, total = 4 * -(-n // block), torch.zeros(n, device=payloads[0].device)
    for row, payload in enumerate(payloads):
        scales = _each(payload.view(-1)[:head].clone().view(torch.float32), n, block)
        value = _decode(scales, payload.view(-1)[head:], format)
        total = value if row == 0 else total + value
    return total * torch.tensor(scale, dtype=torch.float32, device=total.device)


def quantize_encode_reference(
    payload: Tensor,
    x: Tensor,
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    block: int = BLOCK,
    format: str = "int8",
    stochastic_rounding: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """The meaning of `quantize_encode_` in plain torch, bit for bit."""
    _check_numbers(x, "x")
    _check(
        [payload], x.numel(), block=block, format=format, error=(error, x.numel()), flag=(flag, 1)
    )
    random = _random_halves(x.numel(), seed, offset, x.device) if stochastic_rounding else None
    _encode(payload, _source(x, error), error, flag, block=block, format=format, random=random)


def quantize_decode_reference(
    out: Tensor,
    payload: Tensor,
    *,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """The meaning of `quantize_decode_` in plain torch, bit for bit."""
    _check_numbers(out, "out")
    _check([payload], out.numel(), block=block, format=format)
    value = _sum_rows([payload], out.numel(), block=block, format=format, scale=scale)
    out.copy_((out.reshape(-1).float() + value if accumulate else value).view(out.shape))


def quantize_sum_rows_reference(
    out: Tensor,
    payloads: Sequence[Tensor],
    *,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
) -> None:
    """The meaning of `quantize_sum_rows_` in plain torch, bit for bit."""
    _check_numbers(out, "out")
    _check(payloads, out.numel(), block=block, format=format)
    out.copy_(
        _sum_rows(payloads, out.numel(), block=block, format=format, scale=scale).view(out.shape)
    )


def quantize_reencode_reference(
    payload: Tensor,
    payloads: Sequence[Tensor],
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    n: int,
    block: int = BLOCK,
    format: str = "int8",
    scale: float = 1.0,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """The meaning of `quantize_reencode_` in plain torch, bit for bit."""
    _check(
        [*payloads, payload] if payloads else [],
        n,
        block=block,
        format=format,
        error=(error, n),
        flag=(flag, 1),
    )
    total = _sum_rows(payloads, n, block=block, format=format, scale=scale)
    random = _random_halves(n, seed, offset, total.device) if stochastic_rounding else None
    _encode(payload, _source(total, error), error, flag, block=block, format=format, random=random)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


_ROUNDING = "bool stochastic_rounding=False, int seed=0, int offset=0) -> ()"
define(
    "quantize_encode_(Tensor(a!) payload, Tensor x, Tensor(b!)? error, Tensor(c!)? flag, "
    "*, int block, str format, " + _ROUNDING,
    reference=quantize_encode_reference,
    fake=_nothing,
)
define(
    "quantize_decode_(Tensor(a!) out, Tensor payload, *, int block, str format, float "
    "scale=1.0, bool accumulate=False) -> ()",
    reference=quantize_decode_reference,
    fake=_nothing,
)
define(
    "quantize_sum_rows_(Tensor(a!) out, Tensor[] payloads, *, int block, str format, "
    "float scale=1.0) -> ()",
    reference=quantize_sum_rows_reference,
    fake=_nothing,
)
define(
    "quantize_reencode_(Tensor(a!) payload, Tensor[] payloads, Tensor(b!)? error, "
    "Tensor(c!)? flag, *, int n, int block, "
    "str format, float scale=1.0, " + _ROUNDING,
    reference=quantize_reencode_reference,
    fake=_nothing,
)
