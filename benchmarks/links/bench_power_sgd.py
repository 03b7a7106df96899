"""PowerSGD of a bucket of gradients over 2 ranks of one host, one thread each, beside torch's hook
for its DDP."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from pyops.comm import ddp_hook
from pyops.comm.compression.power_sgd import PowerSGD

__all__ = ["run"]

SIZE = 2
TORCH = "torch powerSGD_hook"


class Bucket:
    """What DDP gives to a hook: the gradients of some parameters in one flat tensor."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        self._parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        generator = torch.Generator().manual_seed(dist.get_rank())
        sizes = [p.numel() for p in self._parameters]
        self.given = torch.randn(sum(sizes), generator=generator).to(device)
        self._flat = self.given.clone()
        self._views = [
            part.view(shape) for part, shape in zip(self._flat.split(sizes), shapes, strict=True)
        ]

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def block(width: int) -> list[tuple[int, ...]]:
    """The parameters of one block of a GPT."""
    matrices: list[tuple[int, ...]] = [
        (3 * width, width),
        (width, width),
        (4 * width, width),
        (width, 4 * width),
    ]
    return [shape for matrix in matrices for shape in (matrix, (matrix[0],))] + [(width,)] * 4


def _check(call: Callable[[], object], bucket: Bucket, *, rank: int) -> float:
    """That what comes out has the rank, is the same on both ranks, and takes most of a mean of that
    rank."""
    call()
    mine = bucket.gradients()[0].clone()
    if int(torch.linalg.matrix_rank(mine, rtol=1e-4)) > rank:
        raise AssertionError(f"what came out has a rank above {rank}")
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    if not torch.equal(mine, theirs):
        raise AssertionError("the ranks differ")
    return 0.0


def _case(width: int, blocks: int, rank: int, device: torch.device) -> Case:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    bucket = Bucket(block(width) * blocks, device)
    state, hook = ddp_hook(PowerSGD(rank))
    theirs = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    theirs.iter = 2  # past the iterations that are not compressed

    def call(which: Callable[..., Any], of: Any) -> None:
        bucket.buffer().copy_(bucket.given)
        which(of, bucket).wait()

    numel = bucket.given.numel()
    return Case(
        bench="power_sgd",
        name=f"PowerSGD, rank {rank}, {blocks} x a GPT block of width {width}, {SIZE} ranks",
        implementations={
            "pyops": partial(call, hook, state),
            TORCH: partial(call, powerSGD_hook.powerSGD_hook, theirs),
        },
        check=partial(_check, partial(call, hook, state), bucket, rank=rank),
        device=device,
        bytes_moved=8
        * 4
        * numel,  # gradient and error read, U written, read twice more, then mean and error written
        targets={TORCH: 1.0},
        facts={"ranks": SIZE, "threads": torch.get_num_threads()},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    # torch's hook may drop the last reference to the group in a thread of the group's own, which
    # cannot end itself.
    atexit.register(lambda group: None, dist.group.WORLD)
    for width, blocks in ((512, 1), (512, 2), (128, 4)):
        for rank in (1, 2, 4):
            make = partial(_case, width, blocks, rank, device)
            if (
                options.only is None
                or options.only in f"rank {rank}, {blocks} x a GPT block of width {width}"
            ):
                yield make


def run(options: Any) -> list[Row]:
    return measure_on_ranks(_cases, size=SIZE, options=options)
