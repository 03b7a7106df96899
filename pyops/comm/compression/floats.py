"""Codecs whose payload is one floating-point number per element: fp32 as it is, and bf16."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.compression.codec import Codec, raise_flag

__all__ = ["BF16", "Identity"]


@dataclass(frozen=True)
class _Floats(Codec):
    """Numbers one by one in a float dtype."""

    @abstractmethod
    def _numbers(self, payload: Tensor) -> Tensor:
        """The payload as numbers of the codec's dtype."""

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
        numbers = self._numbers(payload)
        u = x.float() if error is None else torch.add(x, error)
        numbers.copy_(u)
        left = (
            torch.sub(u, numbers, out=u) if u is not x else u - numbers
        )  # nan where a number is not finite
        fine = left.isfinite()
        if x.is_cuda or not bool(fine.all()):
            numbers.copy_(torch.where(fine, numbers, torch.nan))
            raise_flag(flag, fine)
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
