"""Whether reading pays: one answer on all ranks, by what was measured."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.elastic import PADDING, ActivationCache, CacheTimes, FrozenLayers, measure, reading_pays
from pyops.elastic.frozen import cache_timing

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("times", "pays"),
    [
        (CacheTimes(compute=10, put=4, get=5), True),
        (CacheTimes(compute=10, put=4, get=6), False),
        (CacheTimes(compute=10, put=8, get=1), True),
        (CacheTimes(compute=10, put=1, get=10), False),
        (None, False),
    ],
)
def test_the_rule(times, pays):
    assert reading_pays(times) is pays
    assert reading_pays(times, mode="on") is True
    assert reading_pays(times, mode="off") is False


def test_epochs_by_the_rule_take_no_longer_than_without_a_cache():
    """Seconds of epochs with so many layers frozen, each put at the depth of its epoch: the first
    one computes all of it."""
    layer, times = 1.0, CacheTimes(compute=3.0, put=1.9, get=1.0)  # of 3 layers
    for depths in ([3, 4], [3, 3, 3], [3, 5, 6, 6]):
        plain = sum(layer * depth for depth in depths)
        read = 0.0
        for before, depth in zip([0, *depths], depths, strict=False):
            read += (
                layer * (depth - before)
                + (times.get if before else 0)
                + (times.put if depth != before else 0)
            )
        assert reading_pays(times)
        assert (
            read - times.put * (depths[-1] != depths[-2]) < plain
        )  # the last epoch's entries nobody reads


class Clock:
    """Seconds that pass when something is done, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += len(x)
        return x + 1


def test_what_is_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cache_timing, "time", clock)
    cache = ActivationCache(20, shape=(6,), budget=4096 + 10 * (24 + 16))
    put, get, slow = cache.put, cache.get, iter([0, 100, 50, 70])

    def slow_put(samples, values, **named):
        clock.now += next(slow)
        return put(samples, values, **named)

    def slow_get(samples, **named):
        clock.now += 20
        return get(samples, **named)

    monkeypatch.setattr(cache, "put", slow_put)
    monkeypatch.setattr(cache, "get", slow_get)
    prefix, x = FrozenLayers([Slow(clock)], cache=cache, chunk=4), torch.randn(8, 6)
    samples = torch.tensor([1, 3, 5, 8, 9, 15, 19, PADDING])
    assert measure(prefix, x, samples=samples) == CacheTimes(
        compute=1.0, put=10.0, get=4.0
    )  # five are kept
    assert torch.equal(cache.get(samples[:5], depth=1, seed=prefix.key)[0], x[:5] + 1)
    prefix.cache = None
    assert measure(prefix, x, samples=samples) is None


def test_nothing_kept_and_a_lost_cache_are_nothing_to_read(monkeypatch):
    cache, x = ActivationCache(20, shape=(6,), budget=4096 + 10 * (24 + 16)), torch.randn(4, 6)
    prefix = FrozenLayers([nn.Identity()], cache=cache, chunk=4)
    assert measure(prefix, x, samples=torch.arange(16, 20)) is None
    assert measure(prefix, x, samples=torch.full((4,), PADDING)) is None

    def fail(*args, **named):
        raise OSError("gone")

    monkeypatch.setattr(cache, "get", fail)
    assert measure(prefix, x, samples=torch.arange(4)) is None
    assert prefix.cache is None


def _decide(rank: int, group: dist.ProcessGroup) -> list[bool]:
    def of(*saved: float | None) -> bool:
        return reading_pays(
            None if saved[rank] is None else CacheTimes(10 + saved[rank], 6, 4), group=group
        )

    found = [of(3, -1), of(1, -3), of(None, 1), of(-1, None), of(None, None)]
    with pytest.raises(ValueError, match="cache is 'of'; choose one of auto, on, off"):
        reading_pays(None, mode="auto" if rank else "of", group=group)
    return found


def test_all_ranks_decide_alike(world):
    assert world(2).run(_decide) == [[True, False, True, False, False]] * 2
