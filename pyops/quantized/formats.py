"""Numbers of few bits and their scales, in plain torch: the exact rules that every kernel follows.

    symmetric    s = max |x| / h, z = 0     c = clamp(round(x / s), -h, h)      h = 127, 7 (4 bits)
    asymmetric   s = (max - min) / m        c = clamp(round(x / s) + z, 0, m)   m = 255, 15 (4 bits)
                 z = round(-min / s)        min <= 0 <= max: 0 is a code of its own
    e4m3         s = max |x| / 448          c = fp8(x / s)
    decoded      x^ = s (c - z)

All arithmetic is fp32 and every operation is rounded once, to nearest even. The code -128 (-8) is
not used by symmetric formats: negation stays exact. A block of zeros has scale 0 and codes 0. A
value that is not finite makes the scale of its block nan and its codes 0, so that whoever decodes
the block sees nan.

A block is what shares a scale: all values along the inner width of a product (a row of a weight, a
token), a group of neighbors along it, or a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from pyops.given_numbers import is_whole
from pyops.ops.codes.scaled import codes_of, range_scales

__all__ = [
    "FP8",
    "Codes",
    "Format",
    "Int4",
    "Int8",
    "IntN",
    "Scheme",
    "check_format",
    "check_scheme_kind",
    "code_range",
    "decode",
    "encode",
    "extremes",
    "pack_nibbles",
    "scales_of",
    "to_codes",
    "unpack_nibbles",
]

_GRAINS = ("channel", "token", "tensor")


def _check_grain(name: str, per: str) -> None:
    if per not in _GRAINS:
        raise ValueError(f"{name}: per must be one of {', '.join(_GRAINS)}; got {per!r}")


def _check_group(name: str, group: int | None, bits: int, per: str = "channel") -> None:
    if group is not None and (not is_whole(group) or group < 2 or group % 2):
        raise ValueError(
            f"{name}: group must be an even number of inputs, or None for a whole row of a weight; "
            f"got {group!r}"
        )
    if group is not None and per == "tensor":
        raise ValueError(f'{name}: per="tensor" is one scale for all; got group={group} beside it')
    if not is_whole(bits) or not 2 <= bits <= 8:
        raise ValueError(f"{name}: bits must be 2 to 8; got {bits!r}")


@dataclass(frozen=True)
class Int8:
    """Codes of 8 bits: of weights with a scale for each output channel, or of activations with one
    for each token."""

    per: str = "channel"
    """What has a scale of its own: "channel" (a row of a weight), "token" (a row of activations),
    or "tensor": for activations one scale that is found beforehand (static)."""
    symmetric: bool = True
    """Codes -127 to 127 around 0; else 0 to 255 with a zero point."""
    bits: ClassVar[int] = 8
    group: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        _check_grain("Int8", self.per)


@dataclass(frozen=True)
class Int4:
    """Codes of 4 bits for weights, with a scale for each group of inputs of each output channel."""

    group: int | None = 128
    """Inputs that share a scale: 32, 64, 128, or None for a whole row."""
    symmetric: bool = True
    """Codes -7 to 7 around 0; else 0 to 15 with a zero point."""
    bits: ClassVar[int] = 4
    per: ClassVar[str] = "channel"

    def __post_init__(self) -> None:
        _check_group("Int4", self.group, 4)


@dataclass(frozen=True)
class IntN:
    """Codes of 2 to 8 bits, each in a byte: to study what few bits cost, and for training with them
    in mind."""

    bits: int
    """Bits of a code, 2 to 8."""
    per: str = "channel"
    """As for `Int8`."""
    group: int | None = None
    """As for `Int4`."""
    symmetric: bool = True
    """Codes around 0; else from 0 on with a zero point."""

    def __post_init__(self) -> None:
        _check_grain("IntN", self.per)
        _check_group("IntN", self.group, self.bits, self.per)


@dataclass(frozen=True)
class FP8:
    """Codes of fp8 e4m3 (Micikevicius et al., 2022): 4 bits of exponent, 3 of fraction."""

    per: str = "channel"
    """As for `Int8`."""
    bits: ClassVar[int] = 8
    group: ClassVar[int | None] = None
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_grain("FP8", self.per)


Format: TypeAlias = Int8 | Int4 | IntN | FP8


def check_format(name: str, format: object) -> None:
    """Raise TypeError for what is no format.

    Args:
        name: What it is, for the message.
        format: Any.
    """
    if not isinstance(format, Int8 | Int4 | IntN | FP8):
        raise TypeError(f"{name} is {format!r}; give a format, such as Int8() or Int4(group=64)")


@dataclass(frozen=True)
class Scheme:
    """What the weights and the inputs of linear layers are made of."""

    weights: Format = Int8()
    """Codes of the weights."""
    activations: Int8 | FP8 | None = None
    """Codes of the inputs: None leaves them as they are (weights alone are smaller), per="token"
    finds a scale for each row when it comes (dynamic), per="tensor" wants examples beforehand."""

    def __post_init__(self) -> None:
        check_format("Scheme: weights", self.weights)
        if self.activations is not None:
            check_format("Scheme: activations", self.activations)
        if self.weights.per != "channel":
            raise ValueError(
                f"Scheme: weights have a scale for each output channel; got {self.weights}. "
                'Take per="channel"'
            )
        if self.activations is None:
            return
        if self.activations.per == "channel":
            raise ValueError(
                'Scheme: activations are per="token" (dynamic) or per="tensor" (static); got '
                f"{self.activations}"
            )
        if isinstance(self.activations, FP8) != isinstance(self.weights, FP8):
            raise ValueError(
                "Scheme: weights and activations must both be fp8 or both be integers; got "
                f"{self.weights} and {self.activations}"
            )


def check_scheme_kind(scheme: object) -> None:
    """Raise TypeError for what is no scheme.

    Args:
        scheme: Any.
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"scheme is {scheme!r}; give a Scheme, such as Scheme(Int8(), Int8(per='token'))"
        )


@dataclass(frozen=True)
class Codes:
    """A tensor as codes and scales; `decode` makes numbers of it."""

    codes: Tensor
    """int8 (symmetric), uint8 (asymmetric) or float8_e4m3fn, of the tensor's shape."""
    scales: Tensor
    """fp32: the shape without the dimension whose values share a scale, with the number of groups
    in its place where there are groups, or [] for a whole tensor."""
    zero_points: Tensor | None
    """int32 of the scales' shape; None for symmetric formats."""
    format: Format
    """What the codes are."""
    dim: int
    """The dimension along which values share a scale, counted from the end (-1 is the last)."""


def code_range(format: Format) -> tuple[int, int]:
    """The lowest and the highest code of a format; for fp8, the largest magnitude and its
    negative."""
    if isinstance(format, FP8):
        return -448, 448
    if format.symmetric:
        most = 2 ** (format.bits - 1) - 1
        return -most, most
    return 0, 2**format.bits - 1


def encode(x: Tensor, format: Format, dim: int = -1) -> Codes:
    """Codes and scales of x by the rules above, in plain torch.

    Args:
        x: a tensor of floating-point numbers; computed in fp32.
        format: what the codes are.
        dim: the dimension along which values share a scale: the inner width of a product, which is
            the last of a weight [out, in] and of activations [tokens, in].

    Returns:
        The codes, of x's shape.

    Raises:
        ValueError: for a group that does not divide x's size along `dim`, and a dim that x lacks.
        TypeError: for x or a format that is none.
    """
    check_format("encode: format", format)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"encode: x is {kind}; give a tensor of floating-point numbers")
    if format.per != "tensor" and not -x.dim() <= dim < x.dim():
        raise ValueError(f"encode: dim is {dim}, but x is {list(x.shape)}")
    lowest, highest = extremes(x, format, dim)
    scales, zero_points = scales_of(lowest, highest, format)
    return to_codes(x, scales, zero_points, format, dim)


def extremes(x: Tensor, format: Format, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each block, in fp32, with 0 among them; for symmetric
    formats -max |x| and max |x|. nan where a block has a number that is not finite.

    Where a block lies on several ranks, reduce these by minimum and maximum before `scales_of`.

    Args:
        x, format, dim: as for `encode`.

    Returns:
        Two fp32 tensors of the shape of the scales.
    """
    wide = x.detach().float()
    if format.per == "tensor":
        wide, across = wide.reshape(-1), 0
    else:
        wide, across = _blocks(wide, format, dim), -1
    if format.symmetric:
        highest = _largest(wide.abs(), across)
        lowest = -highest
    else:
        lowest, highest = -_largest(-wide, across), _largest(wide, across)
    bad = ~(torch.isfinite(highest) & torch.isfinite(lowest))
    lowest, highest = (t.masked_fill(bad, torch.nan) for t in (lowest, highest))
    if format.group is None:
        return lowest, highest
    return lowest.movedim(-1, dim), highest.movedim(-1, dim)


def _largest(x: Tensor, across: int) -> Tensor:
    """max(x, 0) along a dimension, which may be empty."""
    return x.amax(across).clamp_min(0) if x.shape[across] else x.sum(across)


def scales_of(lowest: Tensor, highest: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of blocks whose numbers lie from `lowest` to `highest`.

    Args:
        lowest, highest: fp32, as of `extremes`.
        format: what the codes will be.

    Returns:
        fp32 scales, and int32 zero points or None for symmetric formats.
    """
    low, high = code_range(format)
    return range_scales(lowest, highest, low=low, high=high)


def to_codes(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, format: Format, dim: int = -1
) -> Codes:
    """Codes of x by given scales; codes 0 where a scale is 0 or nan, and where x is nan.

    Args:
        x: as for `encode`.
        scales: fp32, of the shape that `encode` gives them.
        zero_points: int32 of the same shape, or None.
        format, dim: as for `encode`.

    Returns:
        The codes, of x's shape.
    """
    dim = dim if dim < 0 else dim - x.dim()
    low, high = code_range(format)
    wide = x.detach().float()
    s = _spread(scales, wide.shape, format, dim)
    if isinstance(format, FP8):
        # Rounded from within the range: e4m3 has no infinity, and what is beyond it becomes nan
        ratio = (wide / torch.where(s > 0, s, 1.0)).clamp(low, high)
        numbers = torch.where((s > 0) & ~torch.isnan(wide), ratio, 0.0)
        return Codes(numbers.to(torch.float8_e4m3fn), scales, None, format, dim)
    zeros = None if zero_points is None else _spread(zero_points, wide.shape, format, dim)
    rounded = codes_of(wide, s, zeros, low=low, high=high)
    dtype = torch.int8 if format.symmetric else torch.uint8
    return Codes(rounded.to(dtype), scales, zero_points, format, dim)


def decode(codes: Codes) -> Tensor:
    """The numbers that codes stand for: s (c - z), in fp32.

    Args:
        codes: as of `encode`.

    Returns:
        fp32 of the codes' shape.
    """
    numbers = codes.codes.float()
    shape, format, dim = numbers.shape, codes.format, codes.dim
    if codes.zero_points is not None:
        numbers = numbers - _spread(codes.zero_points, shape, format, dim)
    return _spread(codes.scales, shape, format, dim) * numbers


def _blocks(x: Tensor, format: Format, dim: int) -> Tensor:
    """x with `dim` last, and cut into groups [..., groups, group] where there are groups."""
    last = x.movedim(dim, -1)
    if format.group is None:
        return last
    width = last.shape[-1]
    if width % format.group:
        fitting = [g for g in range(2, width + 1, 2) if width % g == 0]
        said = ", ".join(map(str, fitting)) or "none: take a format without groups"
        raise ValueError(
            f"{format}: {width} inputs can't be cut into groups of {format.group}; groups that "
            f"divide it: {said}"
        )
    groups: Tensor = last.unflatten(-1, (width // format.group, format.group))  # type: ignore[no-untyped-call]
    return groups


def _spread(per_block: Tensor, shape: torch.Size, format: Format, dim: int) -> Tensor:
    """A number for each block, so that it broadcasts to a tensor of `shape`."""
    if format.per == "tensor":
        return per_block
    if format.group is None:
        return per_block.unsqueeze(dim)
    return per_block.repeat_interleave(shape[dim] // max(per_block.shape[dim], 1), dim)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in a byte, the first in the low half; a last one alone beside 0.

    Args:
        codes: int8 or uint8 [..., n], values of 4 bits: -8 to 7 or 0 to 15.

    Returns:
        uint8 [..., ceil(n / 2)].
    """
    bits = codes.view(torch.uint8) & 15
    if bits.shape[-1] % 2:
        bits = torch.nn.functional.pad(bits, (0, 1))
    return bits[..., 0::2] | (bits[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, n: int, symmetric: bool = True) -> Tensor:
    """The codes that `pack_nibbles` has packed.

    Args:
        packed: uint8 [..., ceil(n / 2)].
        n: codes in a row.
        symmetric: whether the highest of the 4 bits is a sign.

    Returns:
        int8 (symmetric) or uint8 [..., n].
    """
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :n]
    if not symmetric:
        return both.contiguous()
    return ((both ^ 8).view(torch.int8) - 8).contiguous()
