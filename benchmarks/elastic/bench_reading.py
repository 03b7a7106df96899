"""What frozen layers say, read from the cache beside computed: a batch of 64 through blocks of a
ViT of width 128, 17 tokens.

    reading     the frozen layers as one, `FrozenLayers`, whose samples are all in the cache: in
                memory, or on disk, not read ahead
    computing   the same without a cache

A sample has 8.7 kB. `keep_us`: microseconds to keep one. The bits of both are the same, or the case
fails.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.elastic import ActivationCache, FrozenLayers
from pyops.models import ViT, ViTConfig

__all__ = ["case", "cases", "run"]

BATCH, DEPTHS = 64, (1, 12)
CONFIG = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, num_labels=10, num_layers=12, num_heads=4, dim=128
)


def _keeping(
    cache: ActivationCache, samples: Tensor, values: Tensor, prefix: FrozenLayers
) -> float:
    """Microseconds for each sample, the shortest of five."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        cache.put(samples, values, depth=prefix.depth, seed=prefix.key)
        found.append(time.perf_counter() - begin)
    return round(1e6 * min(found) / len(samples), 2)


@torch.no_grad()
def case(blocks: int, folder: str | None) -> Case:
    """folder: of the disk's file; None: in memory."""
    embedding, *layers = ViT(CONFIG, seed=0).layers()[: blocks + 1]
    shape, samples = (CONFIG.num_tokens, CONFIG.dim), torch.arange(BATCH)
    each, given = 4 * shape[0] * shape[1], {"shape": (BATCH, CONFIG.num_tokens)}
    memory = 4096 + 16 * BATCH + each + 16  # of one sample
    cache = ActivationCache(BATCH, shape=shape, disk=folder, budget=memory if folder else None)
    x = embedding(torch.randn(BATCH, 1, CONFIG.image_size, CONFIG.image_size))
    computing, reading = (
        FrozenLayers(layers, chunk=BATCH),
        FrozenLayers(layers, cache=cache, chunk=BATCH),
    )
    values = reading(x, samples=samples, **given)

    def check() -> float:
        there = cache.get(samples, depth=reading.depth, seed=reading.key)[1]
        if not bool(there.all()) or not torch.equal(
            reading(x, samples=samples, **given), computing(x, **given)
        ):
            raise AssertionError("what is read is not what is computed")
        return 0.0

    name = (
        f"{blocks} block{'s' * (blocks > 1)}, {BATCH} samples, "
        f"{'on disk' if folder else 'in memory'}"
    )
    calls = {
        "reading": lambda: reading(x, samples=samples, **given),
        "computing": lambda: computing(x, **given),
    }
    facts = {"keep_us": _keeping(cache, samples, values, reading)}
    return Case("reading", name, calls, check=check, facts=facts)


def cases(folder: str) -> Iterator[tuple[str, partial[Case]]]:
    """(name, what makes it)"""
    for where in (None, folder):
        for blocks in DEPTHS:
            yield (
                f"{blocks} blocks, {'on disk' if where else 'in memory'}",
                partial(case, blocks, where),
            )


def run(options: Options) -> list[Row]:
    if options.device.type != "cpu":
        print("the reading bench runs on CPU only")
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(
            dir="."
        ) as folder:  # where runs are, not in a memory that looks like a disk
            made = (
                make for name, make in cases(folder) if options.only is None or options.only in name
            )
            return run_cases(made, rounds=options.rounds)
    finally:
        torch.set_num_threads(threads)
