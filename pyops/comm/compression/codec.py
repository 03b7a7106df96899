"""How numbers are written for the wire: a codec turns n numbers into a payload of a known number of
bytes, and back.

    codec       bytes per number   error feedback   what it keeps
    Identity    4                  nothing is lost  fp32
    BF16        2                  yes              the first 8 bits of each number
    Int8, FP8   1 + 4 / block      yes              8 bits of each number, relative to the largest
                                                    of its block
    Int4        1/2 + 4 / block    yes              4 bits of each number, likewise
    OneBit      1/8 + 4 / block    yes              the sign of each number, and a mean size of its
                                                    block

    u = x + error --> encode --> payload --> (wire) --> decode --> what all ranks see
          error <--- u - decoded ---'

A number that is not finite makes its block nan (its element, for Identity and BF16), so that every
rank that decodes it sees nan; the error of that block stays as it was, and `flag` becomes 1.
Payloads are written and read with the same bits on any CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LINE", "Codec", "check_whole", "raise_flag"]

LINE = 64  # numbers: pieces of a tensor begin at multiples of it, whatever the codec


class Codec(ABC):
    """What every codec can do. Tensors of numbers are flat and contiguous, payloads uint8
    [payload_bytes(n)] of n numbers.

    Attributes:
        feedback: Whether what is left out should be added the next time (`error`).
        multiple: A tensor is cut into pieces at multiples of so many numbers.
        streams: Whether pieces can be encoded before the whole tensor has been seen.
    """

    feedback: bool = True
    streams: bool = True

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec with all its options: what ranks compare, and what a saved state is known
        by."""

    @property
    def multiple(self) -> int:
        """Chunks and segments are cut at multiples of this number of elements."""
        return LINE

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of n numbers."""

    def scale_of(self, x: Tensor, error: Tensor | None = None) -> Tensor | None:
        """The one scale of a whole tensor, fp32 [1], for codecs that do not stream; pieces are
        encoded with it."""
        return None

    @abstractmethod
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
        """payload <- x + error; error <- x + error - what was written.

        Args:
            x: fp32, bf16 or fp16.
            error: fp32, of x's size.
            flag: fp32 [1], set to 1 where a number is not finite.
            scale: That of `scale_of`.
            seed, offset: For rounding at random, the key of this call and x's first position in its
                tensor.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        """out = scale * the numbers of the payload.

        Args:
            out: fp32, bf16 or fp16, rounded once.
        """

    @abstractmethod
    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        """out = scale * ((d0 + d1) + d2 ...), fp32, in the order of the list.

        Args:
            out: fp32, of as many numbers as each payload has.
            payloads: What `encode` wrote, in the order of the ranks.
            scale: A factor of the sum.
        """

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
        """payload <- the sum of n numbers of each of `payloads`, times scale, plus error; error as
        for `encode`.

        Args:
            payload: Where the encoded sum goes.
            payloads: What `encode` wrote on each rank, in the order of the ranks.
            n: How many numbers each payload has.
            scale: A factor of the sum.
            error: fp32 [n], added to the sum; afterwards what is left out.
            flag: fp32 [1], set to 1 where a number is not finite.
            seed, offset: As for `encode`.
        """
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.sum_rows(total, payloads, scale=scale)
        measure = self.scale_of(total, error)
        self.encode(total, payload, error=error, flag=flag, scale=measure, seed=seed, offset=offset)


def check_whole(value: object, *, name: str, example: str) -> None:
    """TypeError for what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give a whole number, such as {example}")


def raise_flag(flag: Tensor | None, fine: Tensor) -> None:
    """flag <- 1 where some of `fine` is False."""
    if flag is not None:
        flag.copy_(torch.where(fine.all(), flag, 1.0))
