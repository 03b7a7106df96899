"""The cache's file: the bits of the memory's, read ahead, gone when nobody has it, and training
goes on without it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.elastic import PADDING, ActivationCache, FrozenLayers, open_cache
from pyops.elastic.frozen.disk_tier import DiskTier
from tests.elastic.frozen.test_activation_cache import memory_of_caches
from tests.open_files import open_files
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

SHAPE = (3, 700)  # 8,400 bytes: three pages
EACH = 4 * 3 * 700


def values_of(samples: torch.Tensor, depth: int = 0) -> torch.Tensor:
    return torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(depth))[samples]


def cache_of(folder: Path, *, memory: int = 10, **options) -> ActivationCache:
    return ActivationCache(
        40, shape=SHAPE, disk=str(folder), budget=4096 + 16 * 40 + memory * (EACH + 16), **options
    )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_memory(tmp_path, stored):
    cache, memory = (
        cache_of(tmp_path, stored=stored),
        ActivationCache(40, shape=SHAPE, stored=stored),
    )
    assert 10 <= cache.capacity < 40 == cache.room
    generator = torch.Generator().manual_seed(0)
    for depth in (1, 2):
        for samples in torch.randperm(40, generator=generator).split(7):
            for each in (cache, memory):
                assert each.put(samples, values_of(samples, depth), depth=depth, seed=5) == len(
                    samples
                )
        for samples in torch.randperm(40, generator=generator).split(9):
            if depth == 2:
                cache.prefetch(samples, seed=5)
            (found, there), (wanted, _) = (
                each.get(samples, depth=depth, seed=5) for each in (cache, memory)
            )
            assert there.all()
            assert torch.equal(found, wanted)
    assert not cache.get(samples, depth=1, seed=5)[1].any()
    assert not list(tmp_path.iterdir())


def test_the_budget_of_the_disk_is_kept(tmp_path):
    cache = cache_of(tmp_path, disk_budget=5 * 3 * 4096)
    assert cache.room == cache.capacity + 5
    samples = torch.arange(40)
    assert cache.put(samples, values_of(samples), depth=1) == cache.room
    found, there = cache.get(samples, depth=1)
    assert there.tolist() == [True] * cache.room + [False] * (40 - cache.room)
    assert torch.equal(found, values_of(samples[: cache.room]))


def test_what_is_read_ahead_is_not_read_again(tmp_path):
    cache, samples = cache_of(tmp_path, memory=0), torch.arange(40)
    cache.put(samples, values_of(samples), depth=1)
    file = cache._disk._file
    batches = torch.randperm(40).split(8)
    cache.prefetch(batches[0])
    for i, batch in enumerate(batches):
        if i + 1 < len(batches):
            cache.prefetch(batches[i + 1])
        before = file.bytes_read
        for part in batch.split(3):  # micro-batches
            assert torch.equal(cache.get(part, depth=1)[0], values_of(part))
        assert file.bytes_read == before
    cache.get(batches[0], depth=1)  # long dropped
    assert file.bytes_read > before


def test_what_was_read_ahead_before_a_put_is_not_used(tmp_path):
    cache, samples = cache_of(tmp_path, memory=0), torch.arange(8)
    cache.put(samples, values_of(samples, 1), depth=1)
    cache.prefetch(samples)
    cache.put(samples[:4], values_of(samples[:4], 2), depth=1)
    cache.put(samples[6:], values_of(samples[6:], 3), depth=2)
    assert torch.equal(cache.get(samples[:4], depth=1)[0], values_of(samples[:4], 2))
    assert torch.equal(cache.get(samples[4:6], depth=1)[0], values_of(samples[4:6], 1))
    assert torch.equal(cache.get(samples[6:], depth=2)[0], values_of(samples[6:], 3))


def test_what_another_process_put_meanwhile_is_not_mixed_up(tmp_path):
    tier = DiskTier(str(tmp_path), records=4, shape=SHAPE, dtype=torch.float32)
    places = torch.arange(4)
    tier.put(places, values_of(places, 1))
    tier.ahead(places, ["first"] * 4)
    other = tier._file.write(values_of(torch.tensor([2]), 2).flatten(), offset=2 * 3 * 4096)
    other.wait()
    found = tier.get(places, ["first", "first", "second", "first"])
    assert torch.equal(found[[0, 1, 3]], values_of(places[[0, 1, 3]], 1))
    assert torch.equal(found[2:3], values_of(torch.tensor([2]), 2))
    tier.close()


def test_a_prefix_reads_ahead(tmp_path):
    cache = cache_of(tmp_path, memory=3)
    prefix = FrozenLayers([torch.nn.LayerNorm(700)], chunk=4, cache=cache)
    x, samples = torch.randn(40, *SHAPE), torch.randperm(40)
    wanted = prefix(x)
    prefix(x[samples], samples=samples)
    prefix.prefetch(torch.cat([samples, torch.tensor([PADDING])]))
    before = cache._disk._file.bytes_read
    assert torch.equal(prefix(x[samples], samples=samples), wanted[samples])
    assert cache._disk._file.bytes_read == before > 0
    prefix.cache = None
    prefix.prefetch(samples)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pyops"]


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    cache, samples = cache_of(tmp_path), torch.arange(40)
    cache.put(samples, values_of(samples), depth=1)
    assert torch.equal(cache.get(samples, depth=1)[0], values_of(samples))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_memory_and_full_memory_nothing_each_said_once(
    tmp_path, caplog, monkeypatch
):
    reserve = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda file, start, size: reserve(file, start, min(size, 1 << 30))
    )
    options = {"shape": (1 << 22,), "disk": str(tmp_path)}
    with pytest.raises(OSError, match=r"no file of \d+ bytes in .*: No space left on device"):
        ActivationCache(1 << 16, budget=1 << 25, **options)
    with caplog.at_level(logging.WARNING, logger="pyops"):
        cache = open_cache(1 << 16, budget=1 << 25, **options)
    assert cache.capacity == cache.room > 0
    (message,) = warnings_of(caplog)
    assert message.startswith(
        "frozen layers have no cache on disk in this run, which goes on without it: no file of "
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pyops"):
        assert open_cache(1 << 30, budget=1 << 60, shape=(1 << 20,)) is None
    (message,) = warnings_of(caplog)
    assert "does not fit" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["put", "get", "prefetch"])
def test_a_disk_that_fails_later_is_given_up_and_memory_goes_on(tmp_path, caplog, when):
    cache = cache_of(tmp_path)
    prefix = FrozenLayers([torch.nn.LayerNorm(700)], chunk=4, cache=cache)
    x, samples = torch.randn(40, *SHAPE), torch.arange(40)
    wanted = prefix(x)
    if when != "put":
        prefix(x, samples=samples)
    cache._disk._file.close()
    with caplog.at_level(logging.WARNING, logger="pyops"):
        for _ in range(3):
            if when == "prefetch":
                prefix.prefetch(samples)
            assert torch.equal(prefix(x, samples=samples), wanted)
    assert len(warnings_of(caplog)) == 1
    assert warnings_of(caplog)[0].startswith(
        "the cache's file is not used any more, and training goes on without it: "
    )
    assert prefix.cache is cache
    assert (cache.depths(samples, seed=prefix.key) == 1).tolist() == [True] * cache.capacity + [
        False
    ] * (40 - cache.capacity)


def test_a_closed_cache_keeps_and_finds_nothing(tmp_path):
    cache, samples = cache_of(tmp_path), torch.arange(40)
    assert open_files(tmp_path), "a cache's file is not where this test looks for it"
    cache.put(samples, values_of(samples), depth=1)
    cache.close()
    assert cache.put(samples, values_of(samples), depth=1) == 0
    assert not cache.get(samples, depth=1)[1].any()
    assert not open_files(tmp_path)


def _share(rank: int, group: dist.ProcessGroup, folder: str) -> list[bool]:
    cache, samples = cache_of(Path(folder), group=group), torch.arange(40)
    mine = samples[rank::2]
    cache.put(mine, values_of(mine), depth=2)
    dist.barrier(group)
    found, there = cache.get(samples, depth=2)
    with pytest.raises(OSError, match="no file of"):
        cache_of(Path(folder) / "missing", group=group)
    return [bool(there.all()), torch.equal(found, values_of(samples)), not os.listdir(folder)]


def test_processes_share_it(world, tmp_path):
    assert world(2).run(_share, str(tmp_path)) == [[True] * 3] * 2


class _HalfPut:
    """The memory, or the file, of a process that is killed in the middle of a put."""

    def __init__(self, whole) -> None:
        self.whole, self.writes = whole, 0

    def __setitem__(self, places, values):
        self.whole[places[:5]] = values[:5]
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, tensor, *, offset):
        self.writes += 1
        if self.writes == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        going = self.whole.write(tensor, offset=offset)
        going.wait()
        return going


def _die(rank: int, group: dist.ProcessGroup, folder: str, where: str) -> list[bool]:
    """Rank 1 dies when half of what it puts is there: some in place of what was there, some new."""
    cache, samples = cache_of(Path(folder), memory=20, group=group), torch.arange(40)
    lost = samples[10:20] if where == "memory" else samples[30:40]
    assert 20 <= cache.capacity < 30
    old = torch.ones(40, dtype=torch.bool)
    old[15:25] = old[35:] = False
    if rank == 0:
        cache.put(samples[old], values_of(samples[old], 1), depth=1)
    other = gather(os.getpid(), group=group)[1]
    if rank == 1:
        if where == "memory":
            cache._values = _HalfPut(cache._values)
        else:
            cache._disk._file = _HalfPut(cache._disk._file)
        cache.put(lost, values_of(lost, 2), depth=2)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # once it has been reaped
        while " Z " not in Path(f"/proc/{other}/stat").read_text():
            time.sleep(0.01)
    old[lost] = False
    found, there = cache.get(samples, depth=1)
    results = [torch.equal(cache.depths(samples), torch.where(old, 1, -1)), torch.equal(there, old)]
    results.append(torch.equal(found, values_of(samples[old], 1)))
    cache.put(samples, values_of(samples, 3), depth=2)
    results.append(torch.equal(cache.get(samples, depth=2)[0], values_of(samples, 3)))
    assert memory_of_caches() == {"/memfd:pyops-activations (deleted)"}
    cache.close()
    assert not memory_of_caches()
    return results


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_process_that_is_killed_in_a_put_leaves_the_others_whole_and_its_own_without_a_value(
    tmp_path, where
):
    ends = spawn_ranks(2, _die, str(tmp_path), where)
    assert ends[1].exitcode == -signal.SIGKILL
    assert ends[0].result == [True] * 4, ends[0].error
    assert not list(tmp_path.iterdir())
