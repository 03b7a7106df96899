"""What a codec of whole matrices has, and that it has no payload of a piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from pyops.comm.compression.codec import Codec, check_whole

__all__ = ["MatrixCodec"]


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """A codec that writes a matrix as a product of rank `rank`, and no pieces.

    Attributes:
        rank: Columns of each factor.
        seed: Of the first directions.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.rank, name="rank", example="4")
        check_whole(self.seed, name="seed", example="0")
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a product of matrices needs rank 1 or more")

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self.name} writes whole matrices, not pieces; use it with "
            "compressed_all_reduce and a PowerSGDMemory"
        )

    def payload_bytes(self, n: int) -> int:
        self._refuse()

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
        self._refuse()

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        self._refuse()

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        self._refuse()
