"""Which algorithm is the fastest for a tensor of some size: measured once, not guessed.

    seconds(bytes) = latency + bytes / bandwidth    two sizes are timed, the line goes through both

All ranks use rank 0's table, so they always choose alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "SIZES",
    "TABLE_WIDTH",
    "Cost",
    "fastest",
    "from_json",
    "measure",
    "packed",
    "to_json",
    "unpacked",
]

SIZES = (4096, 1 << 20)  # bytes
TABLE_WIDTH = 512  # bytes that a table takes between ranks
CLEARLY = 0.5
_REPEATS = 8
_BUDGET = 0.1  # seconds of timed turns, after which no other begins: slow links need no repeats


@dataclass(frozen=True)
class Cost:
    """seconds = latency + nbytes * per_byte."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes * self.per_byte


Table = dict[str, Cost]


def _time(run: Callable[[Tensor], None], tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    start = time.perf_counter()
    run(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def measure(
    candidates: Mapping[str, Callable[[Tensor], None]], *, dtype: torch.dtype, device: torch.device
) -> Table:
    """Time each candidate at both sizes. A collective when the candidates are, which are
    all-reduces: all ranks call it with the same names.

    In turn, and the least of a few runs, because what disturbs a run only makes it longer; the
    first turn warms up. Turns end early, on all ranks alike, where the timed ones take long.
    """
    tensors = [
        torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device) for nbytes in SIZES
    ]
    seconds = {name: [float("inf")] * len(SIZES) for name in candidates}
    spent = 0.0
    for turn in range(_REPEATS + 1):
        for name, run in candidates.items():
            for i, tensor in enumerate(tensors):
                once = _time(run, tensor)
                if turn:
                    seconds[name][i] = min(seconds[name][i], once)
                    spent += once
        if turn and _on_any_rank(spent > _BUDGET, candidates, like=tensors[0]):
            break
    table = {}
    for name, (small, large) in seconds.items():
        per_byte = max(0.0, (large - small) / (SIZES[1] - SIZES[0]))
        table[name] = Cost(max(0.0, small - per_byte * SIZES[0]), per_byte)
    return table


def _on_any_rank(
    value: bool, candidates: Mapping[str, Callable[[Tensor], None]], *, like: Tensor
) -> bool:
    """Whether `value` holds on a rank, by an all-reduce of the first candidate."""
    flags = torch.full_like(like, value)
    next(iter(candidates.values()))(flags)
    return bool(flags.any())


def fastest(table: Table, *, nbytes: int) -> str:
    """The candidate with the least cost at this size. The first one unless another is clearly
    better: timings are noisy."""
    first = next(iter(table))
    best = min(table, key=lambda name: table[name].seconds(nbytes))
    return best if table[best].seconds(nbytes) < CLEARLY * table[first].seconds(nbytes) else first


def to_json(table: Table) -> str:
    return json.dumps({name: [cost.latency, cost.per_byte] for name, cost in table.items()})


def from_json(text: str | bytes) -> Table:
    return {name: Cost(*numbers) for name, numbers in json.loads(text).items()}


def packed(table: Table) -> bytes:
    """A table as TABLE_WIDTH bytes, for the ranks that have another one."""
    return to_json(table).encode().ljust(TABLE_WIDTH, b"\0")


def unpacked(text: bytes) -> Table:
    """The table of what `packed` made."""
    return from_json(text.rstrip(b"\0"))
