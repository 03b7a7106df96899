"""Codecs of eight bits per number, relative to the largest number of each block: int8 and fp8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyops.comm.compression.codec import LINE, Codec, check_whole
from pyops.ops.communication.quantize import payload_bytes as quantize_bytes
from pyops.ops.communication.quantize import (
    quantize_decode_,
    quantize_encode_,
    quantize_reencode_,
    quantize_sum_rows_,
)

__all__ = ["FP8", "Int8"]


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
