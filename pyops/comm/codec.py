"""How numbers are written for the wire: a codec turns n numbers into a payload of a known number of bytes, and back.

    codec         bytes per number      error feedback   what it keeps
    Identity      4                     nothing is lost  fp32
    BF16          2                     yes              the first 8 bits of each number
    Int8, FP8     1 + 4 / block         yes              8 bits of each number, relative to the largest of its block
    OneBit        1/8 + 4 / block       yes              the sign of each number, and a mean size of its block

    u = x + error --> encode --> payload --> (wire) --> decode --> what all ranks see
          error <--- u - decoded ---'

A number that is not finite makes its block nan (its element, for Identity and BF16), so that every rank that decodes it sees
nan; the error of that block stays as it was, and `flag` becomes 1. Payloads are written and read with the same bits on any CPU.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyops.ops.onebit import (
    RULES,
    onebit_decode_,
    onebit_encode_,
    onebit_encode_scaled_,
    onebit_norm,
    onebit_reencode_,
    onebit_sum_rows_,
)
from pyops.ops.onebit import payload_bytes as onebit_bytes
from pyops.ops.quantize import payload_bytes as quantize_bytes
from pyops.ops.quantize import quantize_decode_, quantize_encode_, quantize_reencode_, quantize_sum_rows_

if TYPE_CHECKING:
    from pyops.comm.power_sgd import PowerSGD
    from pyops.comm.topk import TopK

__all__ = ["BF16", "FP8", "Codec", "Identity", "Int8", "OneBit", "PowerSGD", "TopK", "check_whole", "parse"]

LINE = 64  # numbers: pieces of a tensor begin at multiples of it, whatever the codec


class Codec(ABC):
    """What every codec can do. Tensors of numbers are flat and contiguous, payloads uint8 [payload_bytes(n)] of n numbers.

    feedback: whether what is left out should be added the next time (`error`). multiple: a tensor is cut into pieces at
    multiples of so many numbers. streams: whether pieces can be encoded before the whole tensor has been seen.
    """

    feedback: bool = True
    streams: bool = True

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec with all its options: what ranks compare, and what a saved state is known by."""

    @property
    def multiple(self) -> int:
        return LINE

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of n numbers."""

    def scale_of(self, x: Tensor, error: Tensor | None = None) -> Tensor | None:
        """The one scale of a whole tensor, fp32 [1], for codecs that do not stream; pieces are encoded with it."""
        return None

    @abstractmethod
    def encode(
        self, x: Tensor, payload: Tensor, *, error: Tensor | None = None, flag: Tensor | None = None,
        scale: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        """payload <- x + error; error <- x + error - what was written.

        x: fp32, bf16 or fp16. error: fp32, of x's size. flag: fp32 [1], set to 1 where a number is not finite. scale: that of
        `scale_of`. seed, offset: for rounding at random, the key of this call and x's first position in its tensor.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        """out = scale * the numbers of the payload. out: fp32, bf16 or fp16, rounded once."""

    @abstractmethod
    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        """out = scale * ((d0 + d1) + d2 ...), fp32, in the order of the list."""

    def reencode(
        self, payload: Tensor, payloads: Sequence[Tensor], *, n: int, scale: float = 1.0, error: Tensor | None = None,
        flag: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        """payload <- the sum of n numbers of each of `payloads`, times scale, plus error; error as for `encode`."""
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.sum_rows(total, payloads, scale=scale)
        measure = self.scale_of(total, error)
        self.encode(total, payload, error=error, flag=flag, scale=measure, seed=seed, offset=offset)


def check_whole(value: object, *, name: str, example: str) -> None:
    """TypeError for what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give a whole number, such as {example}")


def _raise_flag(flag: Tensor | None, fine: Tensor) -> None:
    if flag is not None:
        flag.copy_(torch.where(fine.all(), flag, 1.0))


@dataclass(frozen=True)
class _Floats(Codec):
    """Numbers one by one in a float dtype."""

    @abstractmethod
    def _numbers(self, payload: Tensor) -> Tensor:
        """The payload as numbers of the codec's dtype."""

    def encode(
        self, x: Tensor, payload: Tensor, *, error: Tensor | None = None, flag: Tensor | None = None,
        scale: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        numbers = self._numbers(payload)
        u = x.float() if error is None else torch.add(x, error)
        numbers.copy_(u)
        left = torch.sub(u, numbers, out=u) if u is not x else u - numbers  # nan where a number is not finite
        fine = left.isfinite()
        if x.is_cuda or not bool(fine.all()):
            numbers.copy_(torch.where(fine, numbers, torch.nan))
            _raise_flag(flag, fine)
            left = left if error is None else torch.where(fine, left, error)
        if error is not None:
            error.copy_(left)

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        numbers = self._numbers(payload)
        out.copy_(numbers if scale == 1.0 else numbers.float() * scale)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        out.copy_(self._numbers(payloads[0]))
        for payload in payloads[1:]:
            out.add_(self._numbers(payload))
        if scale != 1.0:
            out.mul_(scale)


@dataclass(frozen=True)
class Identity(_Floats):
    """fp32 as it is. Nothing is left out."""

    feedback = False

    @property
    def name(self) -> str:
        return "identity"

    def payload_bytes(self, n: int) -> int:
        return 4 * n

    def _numbers(self, payload: Tensor) -> Tensor:
        return payload.view(torch.float32)


@dataclass(frozen=True)
class BF16(_Floats):
    """The nearest bf16 numbers: half the bytes of fp32, three decimal digits."""

    @property
    def name(self) -> str:
        return "bf16"

    def payload_bytes(self, n: int) -> int:
        return 2 * n

    def _numbers(self, payload: Tensor) -> Tensor:
        return payload.view(torch.bfloat16)


@dataclass(frozen=True)
class _EightBits(Codec):
    block: int = 256
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        check_whole(self.block, name="block", example="256")
        if self.block < LINE or self.block % LINE:
            raise ValueError(f"block is {self.block}; give a multiple of {LINE}, such as 256")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(f"stochastic_rounding is {self.stochastic_rounding!r}; give True or False")

    @property
    def multiple(self) -> int:
        return self.block

    @property
    def _format(self) -> str:
        return "int8"

    @property
    def _options(self) -> str:
        return f"block={self.block}" + (", stochastic_rounding=True" if self.stochastic_rounding else "")

    def payload_bytes(self, n: int) -> int:
        return quantize_bytes(n, block=self.block)

    def encode(
        self, x: Tensor, payload: Tensor, *, error: Tensor | None = None, flag: Tensor | None = None,
        scale: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        quantize_encode_(
            payload, x, error, flag, block=self.block, format=self._format, stochastic_rounding=self.stochastic_rounding,
            seed=seed, offset=offset,
        )  # fmt: skip

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        quantize_decode_(out, payload, block=self.block, format=self._format, scale=scale)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        quantize_sum_rows_(out, payloads, block=self.block, format=self._format, scale=scale)

    def reencode(
        self, payload: Tensor, payloads: Sequence[Tensor], *, n: int, scale: float = 1.0, error: Tensor | None = None,
        flag: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        quantize_reencode_(
            payload, payloads, error, flag, n=n, block=self.block, format=self._format, scale=scale,
            stochastic_rounding=self.stochastic_rounding, seed=seed, offset=offset,
        )  # fmt: skip


@dataclass(frozen=True)
class Int8(_EightBits):
    """Whole numbers -127 .. 127 times a scale per block of `block`: the block's largest number / 127."""

    @property
    def name(self) -> str:
        return f"int8({self._options})"


@dataclass(frozen=True)
class FP8(_EightBits):
    """8-bit floats times a scale per block. format: "e4m3" (4 bits of exponent, 3 of fraction) or "e5m2"."""

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"format is {self.format!r}; choose 'e4m3' or 'e5m2'")

    @property
    def name(self) -> str:
        return f"fp8({self.format}, {self._options})"

    @property
    def _format(self) -> str:
        return self.format


@dataclass(frozen=True)
class OneBit(Codec):
    """The signs, and one scale per block. rule: "l1", the mean of |u|, loses least; "rms" is DeepSpeed's.

    block: a multiple of 64; None: one scale for a rank's whole tensor, and one for what each rank sums, as DeepSpeed has it.
    That needs a pass over the tensor before the first bit can leave, so nothing overlaps.
    """

    block: int | None = 2048
    rule: str = "l1"

    def __post_init__(self) -> None:
        if self.block is not None:
            check_whole(self.block, name="block", example="2048, or None for one scale per tensor")
        if self.block is not None and (self.block < LINE or self.block % LINE):
            raise ValueError(f"block is {self.block}; give a multiple of {LINE}, or None for one scale per tensor")
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; choose one of {RULES}")

    @property
    def name(self) -> str:
        return f"onebit(block={self.block}, rule={self.rule})"

    @property
    def multiple(self) -> int:
        return self.block or LINE

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.block is not None

    def payload_bytes(self, n: int) -> int:
        return onebit_bytes(n, block=self.block) if self.block is not None else (4 + onebit_bytes(n, block=None) if n else 0)

    def scale_of(self, x: Tensor, error: Tensor | None = None) -> Tensor | None:
        if self.block is not None:
            return None
        absolute, squares, wrong = onebit_norm(x, error)
        n = max(1, x.numel())
        mean = (absolute / n) if self.rule == "l1" else (squares / n).sqrt()
        return torch.where(wrong > 0, torch.nan, mean).float().view(1)

    def encode(
        self, x: Tensor, payload: Tensor, *, error: Tensor | None = None, flag: Tensor | None = None,
        scale: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        if self.block is not None:
            onebit_encode_(payload, x, error, flag, block=self.block, rule=self.rule)
            return
        whole = scale if scale is not None else self.scale_of(x, error)
        assert whole is not None
        if x.numel():
            payload[:4].copy_(whole.view(torch.uint8))
            onebit_encode_scaled_(payload[4:], x, error, whole)
        _raise_flag(flag, whole.isfinite())

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        if self.block is not None:
            onebit_decode_(out, payload, block=self.block, scale=scale)
        elif out.numel():
            onebit_decode_(out, payload[4:], payload[:4].view(torch.float32), scale=scale)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        if self.block is not None:
            onebit_sum_rows_(out, payloads, block=self.block, scale=scale)
        elif out.numel():
            scales = torch.cat([p[:4] for p in payloads]).view(torch.float32)
            onebit_sum_rows_(out, [p[4:] for p in payloads], scales, scale=scale)

    def reencode(
        self, payload: Tensor, payloads: Sequence[Tensor], *, n: int, scale: float = 1.0, error: Tensor | None = None,
        flag: Tensor | None = None, seed: int = 0, offset: int = 0,
    ) -> None:  # fmt: skip
        if self.block is None:
            super().reencode(payload, payloads, n=n, scale=scale, error=error, flag=flag)
        else:
            onebit_reencode_(payload, payloads, error, flag, n=n, block=self.block, scale=scale, rule=self.rule)


def parse(text: str) -> Codec:
    """The codec of a name as a configuration gives it. ValueError lists the names."""
    from pyops.comm.power_sgd import PowerSGD
    from pyops.comm.topk import TopK

    known: dict[str, Callable[[], Codec]] = {
        "none": Identity, "identity": Identity, "bf16": BF16, "int8": Int8, "fp8": FP8, "onebit": OneBit,
        "fp8_e5m2": lambda: FP8(format="e5m2"), "onebit_tensor": lambda: OneBit(block=None),
        "topk": TopK, "power_sgd": PowerSGD,
    }  # fmt: skip
    if not isinstance(text, str) or text not in known:
        raise ValueError(f"there is no codec {text!r}; choose one of {', '.join(known)}")
    return known[text]()


def __getattr__(name: str) -> Any:
    # Two codecs with files of their own, which are made of what is above.
    homes = {"PowerSGD": "power_sgd", "TopK": "topk"}
    if name in homes:
        return getattr(importlib.import_module(f"pyops.comm.{homes[name]}"), name)
    raise AttributeError(f"module 'pyops.comm.codec' has no attribute {name!r}; it has {sorted(__all__)}")
