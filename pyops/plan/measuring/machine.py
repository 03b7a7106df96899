"""This machine, measured: products, memory, messages between processes.

Machine.here()      products of several widths, a copy, sums between ranks where there are some
  .cluster()        the same as a Cluster, to plan with
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from pyops.comm import all_reduce
from pyops.comm.agreement import gather
from pyops.mesh import ProcessGroupLike, resolve
from pyops.plan.clusters import GIB, Cluster, Device, Efficiency, Link

__all__ = ["Machine", "processors"]

SHORTEST = 0.02  # seconds that each measurement takes
ROUNDS = 9
WIDTHS = (128, 512)  # of the products
ROWS = 512  # of the products
COPY_BYTES = 32 << 20
MESSAGES = (4 << 10, 4 << 20)  # bytes of the sums
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LINK = 10e9  # bytes a second, where no rank is there to send to
LATENCY = 20e-6


def _seconds(call: Callable[[], object]) -> float:
    """The shortest of many times, in which nobody else took the processor."""
    call()
    found: list[float] = []
    while len(found) < ROUNDS or sum(found) < SHORTEST:
        start = time.perf_counter()
        call()
        found.append(max(1e-9, time.perf_counter() - start))
    return min(found)


@dataclass(frozen=True)
class Machine:
    """What was measured."""

    name: str
    """Of the processor."""
    products: dict[str, dict[int, float]]
    """{precision: {width: operations a second}}."""
    copy: float
    """Bytes a second that a copy reads and writes."""
    memory_gib: float
    """Of the whole machine, shared by the ranks."""
    num_ranks: int
    """That measured together."""
    latency: float
    """Seconds of a small sum between ranks, for each hop."""
    bandwidth: float
    """Bytes a second of a large sum."""
    processors: int = 0
    """That the ranks share; 0: nobody knows."""
    threads: int = 1
    """Of each rank while it measured, whatever the process has that plans with it."""

    @classmethod
    def here(cls, *, group: ProcessGroupLike = None) -> Machine:
        """Measure this machine, on the CPU; with a group all its ranks at the same time, and the
        slowest of them counts: the result is the same on every rank.

        Args:
            group: The ranks between which messages are timed. None: the default group, or this
                process alone where torch.distributed is not initialized.
        """
        ranks = resolve(group, "Machine.here")
        products = {
            precision: {width: _product(width, dtype) for width in WIDTHS}
            for precision, dtype in DTYPES.items()
        }
        source = torch.zeros(COPY_BYTES // 4)
        target = torch.empty_like(source)
        copy = 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))
        latency, bandwidth, number = LATENCY, LINK, 1
        if ranks is not None and dist.get_world_size(ranks) > 1:
            number = dist.get_world_size(ranks)
            small, large = (_sum(nbytes, ranks) for nbytes in MESSAGES)
            latency = small / (2 * (number - 1))
            moved = 2 * (MESSAGES[1] - MESSAGES[0]) * (number - 1) / number
            bandwidth = moved / max(1e-9, large - small)
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        threads = torch.get_num_threads()
        found = cls(
            name=f"{platform.machine()}, {threads} threads",
            products=products,
            copy=copy,
            memory_gib=pages / GIB / number,
            num_ranks=number,
            latency=latency,
            bandwidth=bandwidth,
            processors=processors(),
            threads=threads,
        )
        return found if number == 1 else _slowest(gather(found, group=group))

    def cluster(self, *, devices: int = 0) -> Cluster:
        """The machine to plan for.

        Args:
            devices: How many processes; 0: as many as measured.
        """
        number = devices or self.num_ranks
        peak = {dtype: max(widths.values()) for dtype, widths in self.products.items()}
        low, high = self.products["fp32"][WIDTHS[0]], self.products["fp32"][WIDTHS[1]]
        half = max(0.0, (high - low) / (low / WIDTHS[0] - high / WIDTHS[1]))
        whole = 1.0 + half / WIDTHS[1]
        # Messages are copied and added by processors: by those of the ranks where none are spare.
        busy = number * self.threads
        spare = not self.processors or self.processors > busy
        link = Link(self.bandwidth, 1.0, self.latency, 0.5 if spare else 1.0)
        source = f"measured by Machine.here on {self.name}"
        return Cluster(
            name="this machine",
            device=Device(
                name=self.name,
                memory_gib=self.memory_gib * self.num_ranks / number,
                reserved_gib=0.3,
                memory_bandwidth=self.copy,
                peak={dtype: value * whole for dtype, value in peak.items()},
                efficiency=Efficiency(1.0, half, 0.5, 1.0),
            ),
            devices_per_node=number,
            node=link,
            network=link,
            num_devices=number,
            device_hours=50000.0,
            processors=self.processors // self.threads,
            sources={
                "device": source,
                "node": source if self.num_ranks > 1 else "estimate: one process measured",
                "network": "as node",
                "failures": "of the H100's file",
            },
        )


def processors() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def _slowest(several: Sequence[Machine]) -> Machine:
    """Of each figure that of the rank where it is worst."""
    first = several[0]
    return replace(
        first,
        products={
            precision: {
                width: min(each.products[precision][width] for each in several) for width in widths
            }
            for precision, widths in first.products.items()
        },
        copy=min(each.copy for each in several),
        memory_gib=min(each.memory_gib for each in several),
        latency=max(each.latency for each in several),
        bandwidth=min(each.bandwidth for each in several),
    )


def _product(width: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(ROWS, width).to(dtype), torch.randn(width, 4 * width).to(dtype)
    return 2.0 * ROWS * width * 4 * width / _seconds(lambda: a @ b)


def _sum(nbytes: int, group: dist.ProcessGroup) -> float:
    values = torch.zeros(nbytes // 4)
    return _in_step(lambda: all_reduce(values, group=group), group)


def _in_step(call: Callable[[], object], group: dist.ProcessGroup) -> float:
    """The shortest of as many times on every rank."""
    found = []
    for _ in range(2 * ROUNDS):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)
