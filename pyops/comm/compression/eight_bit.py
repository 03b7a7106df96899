"""Codecs of eight bits per number, relative to the largest number of each block: int8 and fp8; and
of half as many: int4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.compression.codec import LINE, Codec, check_whole, raise_flag
from pyops.ops.communication.quantize import payload_bytes as quantize_bytes
from pyops.ops.communication.quantize import (
    quantize_decode_,
    quantize_encode_,
    quantize_reencode_,
    quantize_sum_rows_,
)

__all__ = ["FP8", "Int4", "Int8"]


@dataclass(frozen=True)
class _EightBits(Codec):
    block: int = 256
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        check_whole(self.block, name="block", example="256")
        if self.block < LINE or self.block % LINE:
            raise ValueError(f"block is {self.block}; give a multiple of {LINE}, such as 256")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(
                f"stochastic_rounding is {self.stochastic_rounding!r}; give True or False"
            )

    @property
    def multiple(self) -> int:
        """One block: each has a scale of its own."""
        return self.block

    @property
    def _format(self) -> str:
        return "int8"

    @property
    def _options(self) -> str:
        return f"block={self.block}" + (
            ", stochastic_rounding=True" if self.stochastic_rounding else ""
        )

    def payload_bytes(self, n: int) -> int:
        return quantize_bytes(n, block=self.block)

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        scale: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        quantize_encode_(
            payload,
            x,
            error,
            flag,
            block=self.block,
            format=self._format,
            stochastic_rounding=self.stochastic_rounding,
            seed=seed,
            offset=offset,
        )

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        quantize_decode_(out, payload, block=self.block, format=self._format, scale=scale)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        quantize_sum_rows_(out, payloads, block=self.block, format=self._format, scale=scale)

    def reencode(
        self,
        payload: Tensor,
        payloads: Sequence[Tensor],
        *,
        n: int,
        scale: float = 1.0,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        quantize_reencode_(
            payload,
            payloads,
            error,
            flag,
            n=n,
            block=self.block,
            format=self._format,
            scale=scale,
            stochastic_rounding=self.stochastic_rounding,
            seed=seed,
            offset=offset,
        )


@dataclass(frozen=True)
class Int8(_EightBits):
    """Whole numbers -127 .. 127 times a scale per block of `block`: the block's largest number /
    127."""

    @property
    def name(self) -> str:
        return f"int8({self._options})"


@dataclass(frozen=True)
class FP8(_EightBits):
    """8-bit floats times a scale per block.

    Attributes:
        format: "e4m3" (4 bits of exponent, 3 of fraction) or "e5m2".
    """

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
class Int4(Codec):
    """Whole numbers -7 .. 7 times a scale per block of `block`: the block's largest number / 7; two
    numbers in a byte. In plain torch.

    For what is sent seldom and summed with error feedback, such as the differences of replicas that
    train on their own.

    Attributes:
        block: Numbers that share a scale, a multiple of 64.
    """

    block: int = 64

    def __post_init__(self) -> None:
        check_whole(self.block, name="block", example="64")
        if self.block < LINE or self.block % LINE:
            raise ValueError(f"block is {self.block}; give a multiple of {LINE}, such as 64")

    @property
    def name(self) -> str:
        return f"int4(block={self.block})"

    @property
    def multiple(self) -> int:
        """One block: each has a scale of its own."""
        return self.block

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)

    def payload_bytes(self, n: int) -> int:
        return 4 * self._blocks(n) + (n + 1) // 2

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """(scales, pairs of codes): views of the payload of n numbers."""
        scales = 4 * self._blocks(n)
        return payload[:scales].view(torch.float32), payload[scales:]

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        scale: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        n = x.numel()
        if not n:
            return
        u = x.float() if error is None else x.float() + error
        padded = torch.zeros(self._blocks(n), self.block, device=x.device)
        padded.view(-1)[:n] = u
        largest = padded.abs().amax(1, keepdim=True)
        scales, pairs = self._parts(payload, n)
        scales.copy_(torch.where(largest.isfinite(), largest / 7, torch.nan).view(-1))
        step = torch.where((largest > 0) & largest.isfinite(), largest / 7, 1.0)
        codes = torch.nan_to_num(padded / step, nan=0.0).round_().clamp_(-7, 7)
        nibbles = (codes + 8).to(torch.uint8).view(-1)[: n + n % 2].view(-1, 2)
        pairs.copy_(nibbles[:, 0] | (nibbles[:, 1] << 4))
        fine = largest.isfinite().expand_as(padded).reshape(-1)[:n]
        raise_flag(flag, fine)
        if error is not None:
            left = u - (codes * scales.view(-1, 1)).view(-1)[:n]
            error.copy_(torch.where(fine, left, error))

    def _numbers(self, payload: Tensor, n: int) -> Tensor:
        """fp32 [n]."""
        scales, pairs = self._parts(payload, n)
        codes = torch.stack([pairs & 15, pairs >> 4], 1).view(-1)[:n].float().sub_(8)
        return codes.mul_(scales.repeat_interleave(self.block)[:n])

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        if out.numel():
            numbers = self._numbers(payload, out.numel())
            out.copy_(numbers if scale == 1.0 else numbers.mul_(scale))

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        if not out.numel():
            return
        out.copy_(self._numbers(payloads[0], out.numel()))
        for payload in payloads[1:]:
            out.add_(self._numbers(payload, out.numel()))
        if scale != 1.0:
            out.mul_(scale)
