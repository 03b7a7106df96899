"""PowerSGD: each gradient matrix as a product of two thin ones that all ranks share, by two exact
collectives; mean.py says how."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyops.comm.collectives import two_shot
from pyops.comm.collectives.transport import Transport
from pyops.comm.compression.power_sgd.matrix_codec import MatrixCodec
from pyops.comm.compression.power_sgd.mean import low_rank_mean
from pyops.comm.compression.power_sgd.memory import PowerSGDMemory

__all__ = ["PowerSGD"]

SEGMENT = 1 << 18  # elements of a slice of the exact collectives
SMALL = 1 << 12  # elements up to which everyone sends all of them to everyone


@dataclass(frozen=True)
class PowerSGD(MatrixCodec):
    """Matrices as products of rank `rank`; a tensor [n, ...] is the matrix [n, numel / n].

    Vectors, and matrices that would not shrink by half, travel in fp32, exactly. A matrix costs
    rank * (n + m) numbers in place of n * m. It needs the shapes of the tensors, so
    `compressed_all_reduce` takes it with error=PowerSGDMemory(layout, ...) only, as DataParallel
    and ddp_hook do; there is no payload of a piece, nor a compressed reduce-scatter or all-gather.

    Attributes:
        rank: Columns of each factor.
        seed: Of the first directions.
    """

    @property
    def name(self) -> str:
        return f"power_sgd(rank={self.rank}, seed={self.seed})"

    @property
    def memory(self) -> type[PowerSGDMemory]:
        """The class that keeps the factors and what was left out of each matrix."""
        return PowerSGDMemory

    def all_reduce(
        self, flat: Tensor, *, error: PowerSGDMemory, transport: Transport, scale: float
    ) -> None:
        """flat = scale * (sum over ranks of flat + error) at low rank, in place.

        Args:
            flat: The tensor, flat and contiguous.
            error: The memory of this tensor, a PowerSGDMemory.
            transport: What carries the messages.
            scale: A factor of the sum.

        Raises:
            ValueError: Without a memory that fits.
        """
        self.check_memory(error, numel=flat.numel(), rank=transport.rank, size=transport.size)

        def exchange(x: Tensor) -> None:
            if (
                transport.size == 2 or x.numel() <= SMALL
            ):  # as many bytes, or so few that the messages decide
                two_shot.sum_of_whole(
                    x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size
                )
            else:
                two_shot.all_reduce(
                    x, transport=transport, segment=SEGMENT, scale=1.0 / transport.size
                )

        low_rank_mean(flat, error, exchange=exchange, factor=scale * transport.size)

    def check_memory(self, error: object, *, numel: int, rank: int, size: int) -> None:
        """ValueError unless `error` is a memory of this codec and rank for so many numbers.

        Args:
            error: What was given as memory.
            numel: Elements of the tensor.
            rank: This rank.
            size: The number of ranks.
        """
        if not isinstance(error, PowerSGDMemory):
            raise ValueError(
                f"{self.name} needs the shapes of the tensors; pass "
                "error=PowerSGDMemory(layout, codec=codec, ...)"
            )
        if (error.codec, error.rank, error.size, error.numel) != (self, rank, size, numel):
            raise ValueError(
                f"error is for {error.numel} elements with {error.codec.name} on rank "
                f"{error.rank} of {error.size}; this call "
                f"has {numel} with {self.name} on rank {rank} of {size}"
            )
