"""All-reduce over 2 ranks of one host, one thread each: shared memory, ring and two-shot beside the
backend's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from pyops.comm import all_reduce

__all__ = ["run"]

SIZE = 2
MiB = 1 << 20


def _check(
    ours: Callable[[torch.Tensor], object], *, numel: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest relative error of a sum, after one rounding to the dtype."""
    rows = torch.randn(SIZE, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = rows[dist.get_rank()].clone().to(device)
    ours(x)
    exact = rows.double().sum(0)
    error = float(
        ((x.cpu().double() - exact).abs() / rows.double().abs().sum(0).clamp_min(1e-30)).max()
    )
    if error > torch.finfo(dtype).eps:
        raise AssertionError(f"relative error {error} of a {dtype} sum")
    return error


def _case(
    ours: str,
    *,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    target: float,
    rivals: tuple[str, ...] = (),
) -> Case:
    x = torch.zeros(numel, dtype=dtype, device=device)
    backend = dist.get_backend()

    def call(name: str) -> Callable[[], object]:
        return (
            partial(dist.all_reduce, x)
            if name == backend
            else partial(all_reduce, x, algorithm=name)
        )

    nbytes = numel * dtype.itemsize
    size = f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // 1024} KiB"
    return Case(
        bench="collectives",
        name=f"all_reduce {size} {str(dtype).removeprefix('torch.')}, {SIZE} ranks, {ours}",
        implementations={name: call(name) for name in (ours, backend, *rivals)},
        check=partial(
            _check, partial(all_reduce, algorithm=ours), numel=numel, dtype=dtype, device=device
        ),
        device=device,
        bytes_moved=2 * nbytes,  # a rank reads its tensor and writes the sum
        targets={backend: target} if target else {},
        facts={"ranks": SIZE, "threads": torch.get_num_threads()},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    """Targets are times faster than the backend's own; 0 where none is set."""
    if device.type == "cuda":
        table = [
            ("two_shot", 25 * MiB, torch.bfloat16, 0.0),
            ("ring", 25 * MiB, torch.float32, 0.0),
        ]
    else:
        table = [
            ("shared_memory", 25 * MiB, torch.float32, 4.0),
            ("shared_memory", 25 * MiB, torch.bfloat16, 8.0),
            ("shared_memory", 4096, torch.float32, 4.0),
            ("shared_memory", 256 << 10, torch.float32, 0.0),
            ("ring", 25 * MiB, torch.float32, 1.0),
            ("ring", 25 * MiB, torch.bfloat16, 0.0),
            ("two_shot", 25 * MiB, torch.float32, 0.0),
            ("auto", 25 * MiB, torch.float32, 4.0),
        ]
    for ours, nbytes, dtype, target in table:
        case = partial(
            _case, ours, numel=nbytes // dtype.itemsize, dtype=dtype, device=device, target=target
        )
        if options.only is None or options.only in case().name:
            yield case


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return measure_on_ranks(_cases, size=SIZE, options=options)
