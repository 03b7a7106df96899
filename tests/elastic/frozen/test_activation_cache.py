"""The cache: what was put, to the bit, for its depth and seed alone; shared by processes, and gone
with them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyops.elastic import ActivationCache, open_cache
from tests.open_files import open_files
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only


def values_of(count: int, depth: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 2, generator=torch.Generator().manual_seed(depth))


def test_values_come_back_to_the_bit_and_in_order():
    cache, values = ActivationCache(10, shape=(3, 2)), values_of(4)
    assert cache.put(torch.tensor([7, 2, 9, 0]), values, depth=3) == 4
    found, there = cache.get(torch.tensor([0, 1, 7, 9]), depth=3)
    assert there.tolist() == [True, False, True, True]
    assert torch.equal(found, values[[3, 0, 2]])


def test_depth_and_seed_are_part_of_the_key():
    cache, samples = ActivationCache(4, shape=(3, 2)), torch.arange(4)
    cache.put(samples, values_of(4), depth=2, seed=5)
    assert not cache.get(samples, depth=3, seed=5)[1].any()
    assert not cache.get(samples, depth=2, seed=6)[1].any()
    assert cache.depths(samples, seed=5).tolist() == [2] * 4
    assert cache.depths(samples, seed=6).tolist() == [-1] * 4
    cache.put(samples[:2], values_of(2, depth=4), depth=4, seed=5)
    assert cache.depths(samples, seed=5).tolist() == [4, 4, 2, 2]
    assert torch.equal(cache.get(samples[:2], depth=4, seed=5)[0], values_of(2, depth=4))
    cache.clear()
    assert cache.depths(samples, seed=5).tolist() == [-1] * 4


def test_depth_0_is_a_depth():
    cache = ActivationCache(2, shape=(3, 2))
    assert cache.depths(torch.arange(2)).tolist() == [-1, -1]
    cache.put(torch.tensor([1]), values_of(1), depth=0)
    assert cache.depths(torch.arange(2)).tolist() == [-1, 0]


def test_16_bits():
    cache, values = ActivationCache(4, shape=(3, 2), stored=torch.bfloat16), values_of(4)
    cache.put(torch.arange(4), values, depth=1)
    found = cache.get(torch.arange(4), depth=1)[0]
    assert found.dtype == torch.float32
    assert torch.equal(found, values.bfloat16().float())
    assert not torch.equal(found, values)


def test_the_budget_is_kept():
    each = 3 * 2 * 4 + 16
    cache = ActivationCache(1000, shape=(3, 2), budget=4096 + 10 * each)
    assert cache.capacity == 10
    assert cache.put(torch.tensor([3, 500, 9, 10]), values_of(4), depth=1) == 2
    found, there = cache.get(torch.tensor([500, 9, 3]), depth=1)
    assert there.tolist() == [False, True, True]
    assert torch.equal(found, values_of(4)[[2, 0]])


def _put_and_get(rank: int, group: dist.ProcessGroup) -> bool:
    cache = ActivationCache(8, shape=(3, 2), group=group)
    mine = torch.arange(rank, 8, 2)
    cache.put(mine, values_of(8)[mine], depth=2)
    dist.barrier(group)
    found, there = cache.get(torch.arange(8), depth=2)
    return bool(there.all()) and torch.equal(found, values_of(8))


def test_processes_share_it(world):
    assert world(2).run(_put_and_get) == [True, True]


def _too_much(rank: int, group: dist.ProcessGroup) -> str:
    with pytest.raises(MemoryError) as caught:
        ActivationCache(1 << 40, shape=(1 << 10,), group=group)
    with pytest.raises(ValueError, match="give all ranks the same"):
        ActivationCache(8 + rank, shape=(1 << 10,), group=group)
    return str(caught.value)


def test_too_much_and_unequal_are_refused_on_all(world):
    messages = world(2).run(_too_much)
    assert messages[0] == messages[1]
    assert "does not fit" in messages[0]


def memory_of_caches() -> set[str]:
    """What the kernel calls the pieces that this process has, mapped or open. "(deleted)": no file
    system knows it, so that it ends with the last process that has it."""
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {name for name in maps if "pyops-activations" in name}
    return mapped | set(open_files("pyops-activations").values())


def _die(rank: int, group: dist.ProcessGroup) -> bool:
    cache = ActivationCache(8, shape=(3, 2), group=group)
    if rank == 0:
        cache.put(torch.arange(8), values_of(8), depth=1)
    dist.barrier(group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    assert memory_of_caches() == {"/memfd:pyops-activations (deleted)"}
    same = torch.equal(cache.get(torch.arange(8), depth=1)[0], values_of(8))
    cache.close()
    assert not memory_of_caches()
    return same


def test_nothing_is_left_of_a_process_that_was_killed_and_the_other_goes_on():
    ends = spawn_ranks(2, _die)
    assert ends[0].exitcode == -signal.SIGKILL
    assert ends[1].result is True


class _Dies:
    def __setitem__(self, place, values):
        raise RuntimeError("killed")


def test_what_is_put_while_it_is_read_is_not_found(monkeypatch):
    cache, samples = ActivationCache(4, shape=(3, 2)), torch.arange(4)
    cache.put(samples, values_of(4), depth=1)
    read = cache._read

    def slowly(*args):
        found = read(*args)
        cache.put(samples[1:3], values_of(2, depth=2), depth=2)
        return found

    monkeypatch.setattr(cache, "_read", slowly)
    found, there = cache.get(samples, depth=1)
    assert there.tolist() == [True, False, False, True]
    assert torch.equal(found, values_of(4)[[0, 3]])


def test_a_budget_below_one_sample_leaves_a_run_without_a_cache(caplog):
    assert open_cache(4, shape=(3, 2), budget=4100) is None
    assert [record.getMessage() for record in caplog.records] == [
        "frozen layers have no cache in this run, which goes on without it: a budget of "
        "4100 bytes holds no sample of 24; "
        "give 4136 or more"
    ]


def test_half_a_put_is_none():
    cache = ActivationCache(4, shape=(3, 2))
    cache.put(torch.arange(4), values_of(4), depth=1)
    cache._values = _Dies()
    with pytest.raises(RuntimeError, match="killed"):
        cache.put(torch.tensor([1, 2]), values_of(2), depth=1)
    assert cache.depths(torch.arange(4)).tolist() == [1, -1, -1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cache: cache.put(torch.arange(2), values_of(3), depth=1),
            r"values are \(3, 3, 2\); expected \(2, 3, 2\)",
        ),
        (
            lambda cache: cache.put(torch.arange(2), values_of(2).double(), depth=1),
            "values are torch.float64",
        ),
        (lambda cache: cache.get(torch.tensor([4]), depth=1), "numbers from 0 to 3"),
        (lambda cache: cache.get(torch.tensor([-1]), depth=1), "numbers from 0 to 3"),
        (lambda cache: cache.get(torch.arange(2), depth=-1), "depth is -1"),
        (lambda cache: ActivationCache(0, shape=(2,)), "0 samples"),
        (
            lambda cache: ActivationCache(4, shape=(2,), budget=4100),
            "holds no sample of 8; give 4120 or more",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(ActivationCache(4, shape=(3, 2)))
