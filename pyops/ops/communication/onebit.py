"""One-bit compression with error feedback: signs, one scale per block, and what was lost kept for
the next round.

    x ----+--> u = x + error --> scale = mean |u| of each block --> payload
                                                    [fp32 scales | bits, 1 where u >= 0]
          |                              |
    error <------ u - scale * sgn(u) <---'                           sgn(0) = +1

All arithmetic is fp32, but for the sum of a block, which is float64 in a fixed order (`LANES`):
every instruction set, any number of threads, and plain torch give the same bits. Hence error' is
the fp32 number nearest to u - scale * sgn(u), so that `decoded + error' = u` up to one rounding, at
most 2^-24 |error'|, and exactly where scale / 2 <= |u| <= 2 scale.

A payload is uint8, contiguous, `payload_bytes(n)` long: the scales of ceil(n / block) blocks, then
ceil(n / 8) bytes of bits, the lowest bit first; bits beyond n are 0. Only the last block may be
shorter, and only its own numbers enter its scale. A block in which u is not finite gets the scale
nan, so that whoever decodes it sees nan; its errors stay, and `flag` becomes 1.

The scale that is best in the sense of least squares is mean |u| (rule "l1"); DeepSpeed's is the
root mean square ("rms"). Seide et al., "1-bit stochastic gradient descent", Interspeech 2014,
section 3; Tang et al., "1-bit Adam", ICML 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define

__all__ = [
    "BLOCK",
    "RULES",
    "onebit_decode_",
    "onebit_decode_reference",
    "onebit_encode_",
    "onebit_encode_reference",
    "onebit_encode_scaled_",
    "onebit_encode_scaled_reference",
    "onebit_norm",
    "onebit_norm_reference",
    "onebit_reencode_",
    "onebit_reencode_reference",
    "onebit_sum_rows_",
    "onebit_sum_rows_reference",
    "payload_bytes",
]

BLOCK = 2048
RULES = ("l1", "rms")
LANES = 128  # element i of a block goes to sum i % LANES; then the sums are added by halves
_MULTIPLE = 64
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def payload_bytes(n: int, *, block: int | None = BLOCK) -> int:
    """Bytes of the payload of n numbers; `block=None`: of the bits alone, as
    `onebit_encode_scaled_` writes them."""
    return (n + 7) // 8 + (4 * -(-n // block) if block is not None else 0)


def onebit_encode_(
    payload: Tensor,
    x: Tensor,
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    block: int = BLOCK,
    rule: str = "l1",
) -> None:
    """Encode u = float(x) + error into `payload`; error <- u - scale * sgn(u), in one pass.

    Moves 12.1 bytes per element of fp32 with error (4 of x, 4 + 4 of error, 1/8 of bits, 4/block of
    scales).

    Args:
        payload: uint8 [payload_bytes(n, block=block)], at any address.
        x: fp32, bf16 or fp16, n elements.
        error: fp32 [n], or None for no feedback.
        flag: fp32 [1], set to 1 when a u is not finite and never cleared.
        block: a multiple of 64.
    """
    torch.ops.pyops.onebit_encode_.default(payload, x, error, flag, block=block, rule=rule)


def onebit_norm(x: Tensor, error: Tensor | None = None) -> Tensor:
    """float64 [3]: the sums of |u| and u^2 over u = float(x) + error, and how many u are not
    finite. Moves 8 bytes per element.

    The first of two passes to one scale for a whole tensor: sums of shards add up, then
    `onebit_encode_scaled_`.
    """
    result: Tensor = torch.ops.pyops.onebit_norm.default(x, error)
    return result


def onebit_encode_scaled_(payload: Tensor, x: Tensor, error: Tensor | None, scale: Tensor) -> None:
    """payload <- the bits of u = float(x) + error; error <- u - scale * sgn(u), with `scale` given:
    fp32 [1] on x's device.

    Moves 12.1 bytes per element of fp32 with error.

    Args:
        payload: uint8 [ceil(n / 8)], bits only. Where the new error would not be finite (a nan
            among u, or scale = nan) the old one stays.
    """
    torch.ops.pyops.onebit_encode_scaled_.default(payload, x, error, scale)


def onebit_decode_(
    out: Tensor,
    payload: Tensor,
    scales: Tensor | None = None,
    *,
    block: int = BLOCK,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """out = scale * (s * sgn), or out += that, with s of the element's block.

    Moves 4.1 bytes per element of fp32 (8.1 when accumulating).

    Args:
        out: fp32, bf16 or fp16, rounded once.
        scales: None for a payload that brings its scales; else fp32 [1], s of every element, for a
            payload of bits alone.
    """
    torch.ops.pyops.onebit_decode_.default(
        out, payload, scales, block=block, scale=scale, accumulate=accumulate
    )


def onebit_sum_rows_(
    out: Tensor,
    payloads: Sequence[Tensor],
    scales: Tensor | None = None,
    *,
    block: int = BLOCK,
    scale: float = 1.0,
) -> None:
    """out = scale * (((d0 + d1) + d2) + ...) in the order of the list, d_r = s_r * sgn_r; nothing
    is unpacked to memory.

    Moves 4 + rows / 8 bytes per element.

    Args:
        scales: None, or fp32 [len(payloads)]: one s for each row, for payloads of bits alone.
    """
    torch.ops.pyops.onebit_sum_rows_.default(out, list(payloads), scales, block=block, scale=scale)


def onebit_reencode_(
    payload: Tensor,
    payloads: Sequence[Tensor],
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    n: int,
    block: int = BLOCK,
    scale: float = 1.0,
    rule: str = "l1",
) -> None:
    """The server's step in one pass: `onebit_sum_rows_` of n numbers, encoded with its own error as
    `onebit_encode_` does.

    `payload` may be none of `payloads`. A nan in a block of any row makes that block nan. Moves 8.1
    + rows / 8 bytes an element.
    """
    torch.ops.pyops.onebit_reencode_.default(
        payload, list(payloads), error, flag, n=n, block=block, scale=scale, rule=rule
    )


def _check(
    payloads: Sequence[Tensor],
    n: int,
    *,
    block: int | None,
    fp32: dict[str, tuple[Tensor | None, int]],
) -> None:
    if block is not None and (block <= 0 or block % _MULTIPLE):
        raise ValueError(f"block must be a positive multiple of {_MULTIPLE}, got {block}")
    if not payloads:
        raise ValueError("needs at least one payload")
    for payload in payloads:
        if payload.dtype != torch.uint8:
            raise ValueError(f"a payload must be uint8, got {payload.dtype}")
        if payload.numel() != (size := payload_bytes(n, block=block)):
            raise ValueError(
                f"a payload must have {size} bytes for these numbers, got {payload.numel()}"
            )
    for name, (tensor, size) in fp32.items():
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor.dtype}")
        if tensor is not None and tensor.numel() != size:
            raise ValueError(f"{name} must have {size} elements, got {tensor.numel()}")
    if any(
        not t.is_contiguous() for t in [*payloads, *(t for t, _ in fp32.values() if t is not None)]
    ):
        raise ValueError("payloads, error and flag must be contiguous")


def _check_numbers(x: Tensor, name: str) -> None:
    if x.dtype not in _FLOATS or not x.is_contiguous():
        raise ValueError(
            f"{name} must be float32, bfloat16 or float16 and contiguous, got {x.dtype} "
            f"with strides {x.stride()}"
        )


def _source(x: Tensor, error: Tensor | None) -> Tensor:
    u = x.detach().reshape(-1).float()
    return u + error.reshape(-1) if error is not None else u


def _block_sums(values: Tensor, block: int) -> Tensor:
    """float64 sums of each block of a flat tensor, in the order that the kernels share."""
    blocks, lines = -(-values.numel() // block), -(-block // LANES)
    padded = torch.nn.functional.pad(values.double(), (0, blocks * block - values.numel())).view(
        blocks, block
    )
    lanes = torch.nn.functional.pad(padded, (0, lines * LANES - block)).view(blocks, lines, LANES)
    total = torch.zeros(blocks, LANES, dtype=torch.float64, device=values.device)
    for line in range(lines):
        total = total + lanes[:, line]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _pack(u: Tensor) -> Tensor:
    positive = torch.nn.functional.pad((u >= 0).to(torch.uint8), (0, -u.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=u.device)
    return (positive * weights).sum(dim=1, dtype=torch.uint8)


def _signs(payload: Tensor, n: int) -> Tensor:
    """+1 and -1 in fp32 of the bits at the end of a payload."""
    bits = payload.view(-1)[payload.numel() - (n + 7) // 8 :]
    one = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return one.view(-1)[:n].float() * 2.0 - 1.0


def _scales(payload: Tensor, n: int, block: int) -> Tensor:
    """The fp32 scale of each element's block."""
    blocks = -(-n // block)
    return payload.view(-1)[: 4 * blocks].clone().view(torch.float32).repeat_interleave(block)[:n]


def _encode(
    payload: Tensor, u: Tensor, error: Tensor | None, flag: Tensor | None, block: int, rule: str
) -> None:
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule}")
    n, blocks = u.numel(), -(-u.numel() // block)
    terms = u.double().square() if rule == "rms" else u.double().abs()
    counts = torch.full((blocks,), float(block), dtype=torch.float64, device=u.device)
    if blocks:
        counts[-1] = n - (blocks - 1) * block
    mean = _block_sums(terms, block) / counts
    scales = (mean.sqrt() if rule == "rms" else mean).float()
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    payload.view(-1)[: 4 * blocks].copy_(scales.view(torch.uint8))
    payload.view(-1)[4 * blocks :].copy_(_pack(u))
    each = scales.repeat_interleave(block)[:n]
    if error is not None:
        new = u - torch.where(u >= 0, each, -each)
        error.copy_(torch.where(each.isnan(), error.reshape(-1), new).view(error.shape))
    if flag is not None and bool(scales.isnan().any()):
        flag.fill_(1.0)


def onebit_encode_reference(
    payload: Tensor,
    x: Tensor,
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    block: int = BLOCK,
    rule: str = "l1",
) -> None:
    """The meaning of `onebit_encode_` in plain torch, bit for bit."""
    _check_numbers(x, "x")
    _check([payload], x.numel(), block=block, fp32={"error": (error, x.numel()), "flag": (flag, 1)})
    _encode(payload, _source(x, error), error, flag, block, rule)


def onebit_norm_reference(x: Tensor, error: Tensor | None = None) -> Tensor:
    """The meaning of `onebit_norm` in plain torch, up to the order of the float64 sum."""
    _check_numbers(x, "x")
    u = _source(x, error)
    return torch.stack(
        [u.double().abs().sum(), u.double().square().sum(), (~u.isfinite()).sum().double()]
    )


def onebit_encode_scaled_reference(
    payload: Tensor, x: Tensor, error: Tensor | None, scale: Tensor
) -> None:
    """The meaning of `onebit_encode_scaled_` in plain torch, bit for bit."""
    _check_numbers(x, "x")
    _check(
        [payload], x.numel(), block=None, fp32={"error": (error, x.numel()), "scale": (scale, 1)}
    )
    u = _source(x, error)
    payload.view(-1).copy_(_pack(u))
    if error is not None:
        new = u - torch.where(u >= 0, scale.view(()), -scale.view(()))
        error.copy_(torch.where(new.isfinite(), new, error.reshape(-1)).view(error.shape))


def _sum_rows(
    payloads: Sequence[Tensor], n: int, scales: Tensor | None, block: int, scale: float
) -> Tensor:
    total = torch.zeros(n, device=payloads[0].device)
    for row, payload in enumerate(payloads):
        each = scales.view(-1)[row] if scales is not None else _scales(payload, n, block)
        value = each * _signs(payload, n)
        total = value if row == 0 else total + value
    return total * torch.tensor(scale, dtype=torch.float32, device=total.device)


def onebit_decode_reference(
    out: Tensor,
    payload: Tensor,
    scales: Tensor | None = None,
    *,
    block: int = BLOCK,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """The meaning of `onebit_decode_` in plain torch, bit for bit."""
    _check_numbers(out, "out")
    _check(
        [payload],
        out.numel(),
        block=None if scales is not None else block,
        fp32={"scales": (scales, 1)},
    )
    value = _sum_rows([payload], out.numel(), scales, block, scale)
    out.copy_((out.reshape(-1).float() + value if accumulate else value).view(out.shape))


def onebit_sum_rows_reference(
    out: Tensor,
    payloads: Sequence[Tensor],
    scales: Tensor | None = None,
    *,
    block: int = BLOCK,
    scale: float = 1.0,
) -> None:
    """The meaning of `onebit_sum_rows_` in plain torch, bit for bit."""
    _check_numbers(out, "out")
    _check(
        payloads,
        out.numel(),
        block=None if scales is not None else block,
        fp32={"scales": (scales, len(payloads))},
    )
    out.copy_(_sum_rows(payloads, out.numel(), scales, block, scale).view(out.shape))


def onebit_reencode_reference(
    payload: Tensor,
    payloads: Sequence[Tensor],
    error: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    n: int,
    block: int = BLOCK,
    scale: float = 1.0,
    rule: str = "l1",
) -> None:
    """The meaning of `onebit_reencode_` in plain torch, bit for bit."""
    _check(
        [*payloads, payload] if payloads else [],
        n,
        block=block,
        fp32={"error": (error, n), "flag": (flag, 1)},
    )
    _encode(
        payload,
        _source(_sum_rows(payloads, n, None, block, scale), error),
        error,
        flag,
        block,
        rule,
    )


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _norm_fake(x: Tensor, error: Tensor | None = None) -> Tensor:
    return x.new_empty(3, dtype=torch.float64)


define(
    "onebit_encode_(Tensor(a!) payload, Tensor x, Tensor(b!)? error, Tensor(c!)? flag, "
    "*, int block, str rule) -> ()",
    reference=onebit_encode_reference,
    fake=_nothing,
)
define(
    "onebit_norm(Tensor x, Tensor? error) -> Tensor",
    reference=onebit_norm_reference,
    fake=_norm_fake,
)
define(
    "onebit_encode_scaled_(Tensor(a!) payload, Tensor x, Tensor(b!)? error, Tensor scale) -> ()",
    reference=onebit_encode_scaled_reference,
    fake=_nothing,
)
define(
    "onebit_decode_(Tensor(a!) out, Tensor payload, Tensor? scales, *, int block, float scale=1.0, "
    "bool accumulate=False) -> ()",
    reference=onebit_decode_reference,
    fake=_nothing,
)
define(
    "onebit_sum_rows_(Tensor(a!) out, Tensor[] payloads, Tensor? scales, *, int block, "
    "float scale=1.0) -> ()",
    reference=onebit_sum_rows_reference,
    fake=_nothing,
)
define(
    "onebit_reencode_(Tensor(a!) payload, Tensor[] payloads, Tensor(b!)? error, "
    "Tensor(c!)? flag, *, int n, int block, "
    "float scale=1.0, str rule) -> ()",
    reference=onebit_reencode_reference,
    fake=_nothing,
)
