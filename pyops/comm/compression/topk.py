"""The largest few numbers of each piece, with their places: what is left out waits in the error for
its turn.

    u = x + error   | .1 -3. .2  0. |  2. .1 -.1 .3 |      ratio 1/4, two pieces of 4 numbers
    payload         | 1 | -3. |        | 0 | 2. |          int32 places, fp32 numbers
    error           | .1  0. .2  0. |  0. .1 -.1 .3 |      what is sent is sent exactly

Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; with error
feedback: Stich, Cordonnier, Jaggi, Sparsified SGD with memory, NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.compression.codec import Codec

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(Codec):
    """The `ratio` of a piece's numbers that are largest in magnitude, rounded up, in fp32: 8 bytes
    for each that is sent.

    Attributes:
        ratio: Above 0, at most 1. A piece is what one message carries, not the whole tensor; an
            owner keeps the same ratio of the sum. Where a number of a piece is not finite, the
            largest ones arrive as nan and the piece's error stays as it was.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float):
            raise TypeError(f"ratio is {self.ratio!r}; give a number, such as 0.01")
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(
                f"ratio is {self.ratio}; give the part of the numbers to send, above 0 "
                "and at most 1"
            )

    @property
    def name(self) -> str:
        return f"topk(ratio={self.ratio})"

    def kept(self, n: int) -> int:
        """How many of n numbers are sent."""
        return min(n, math.ceil(self.ratio * n))

    def payload_bytes(self, n: int) -> int:
        return 8 * self.kept(n)

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
        u = x.float() if error is None else x.float() + error
        places = (
            u.abs().topk(self.kept(len(u)), sorted=False).indices.sort().values
        )  # nan counts as largest
        numbers, fine = u[places], u.isfinite().all()
        at, values = _parts(payload)
        at.copy_(places)
        values.copy_(torch.where(numbers.isfinite(), numbers, torch.nan))
        if flag is not None:
            flag.copy_(torch.where(fine, flag, 1.0))
        if error is not None:
            u[places] = 0.0
            error.copy_(torch.where(fine, u, error))

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        at, values = _parts(payload)
        out.zero_()
        out[at.long()] = (values * scale).to(out.dtype)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        out.zero_()
        for payload in payloads:  # one after the other: the order of a sum is that of the list
            at, values = _parts(payload)
            out.index_add_(0, at.long(), values)
        if scale != 1.0:
            out.mul_(scale)


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    """(places, numbers): views of a payload's two halves."""
    half = len(payload) // 2
    return payload[:half].view(torch.int32), payload[half:].view(torch.float32)
