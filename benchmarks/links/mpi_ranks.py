"""What a rank of bench mpi does: `mpirun -n 2 python -m benchmarks.links.mpi_ranks ROUNDS FILE`.

Rank 0 writes {way: seconds of the slowest rank, round by round} and the MPI's name into the file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm import all_reduce
from pyops.comm.mpi.transport import as_bytes
from pyops.launch import join

__all__ = ["MPI_OWN", "NUMEL", "WAYS", "main"]

NUMEL = 25 * 2**20 // 4
MPI_OWN = "MPI's own"
WAYS = ("pyops", MPI_OWN, "pyops.comm")


def _calls(tensor: Tensor) -> dict[str, Callable[[], Any]]:
    from mpi4py import MPI

    comm, numbers = MPI.COMM_WORLD, [as_bytes(tensor), NUMEL, MPI.FLOAT]
    return dict(
        zip(
            WAYS,
            (
                lambda: dist.all_reduce(tensor),
                lambda: comm.Allreduce(MPI.IN_PLACE, numbers),
                lambda: all_reduce(tensor),
            ),
            strict=True,
        )
    )


def _check(tensor: Tensor, calls: dict[str, Callable[[], Any]], rank: int) -> None:
    """Each way gives the same bits on all ranks, those of the sum of two numbers."""
    own = [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(r))
        for r in range(dist.get_world_size())
    ]
    for way, call in calls.items():
        tensor.copy_(own[rank])
        call()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
        if len(set(digests)) > 1 or not torch.equal(tensor, torch.stack(own).sum(0)):
            raise AssertionError(f"{way} gives other bits: {digests}")


def main() -> None:
    rounds, file = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    join(backend="mpi")
    from mpi4py import MPI

    rank, tensor = dist.get_rank(), torch.zeros(NUMEL)
    calls = _calls(tensor)
    _check(tensor, calls, rank)
    tensor.zero_()  # sums stay what they are
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(rounds + 2):
        # Each way comes after each other one: what is in the caches is the way's before it.
        shift = turn % len(WAYS)
        for way in (*WAYS[shift:], *WAYS[:shift]):
            call = calls[way]
            dist.barrier()
            start = time.perf_counter()
            call()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn > 1:
                seconds[way].append(float(slowest))
    if rank == 0:
        name = MPI.Get_library_version().splitlines()[0]
        file.write_text(json.dumps({"seconds": seconds, "mpi": name}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
