"""Elastic runs that keep and read what frozen layers say have the bits of those that compute it,
wherever it is kept."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.checkpoint import load, save
from pyops.elastic import (
    ActivationCache,
    Bound,
    CacheOptions,
    CacheTimes,
    Elastic,
    FrozenLayers,
    Sampler,
)
from pyops.elastic.frozen import host_cache
from pyops.elastic.frozen.disk_tier import DiskTier
from pyops.elastic.frozen.host_cache import HostCache
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.grids import full

pytestmark = pytest.mark.cpu_only

BLOCKS, EPOCHS, EACH = 6, 4, 4 * networks.WIDTH + 16


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def example(samples: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return networks.rows(samples)[0], {}


def made(cache: dict[str, Any], **options: Any) -> Elastic:
    return make_elastic(
        networks.layers(BLOCKS),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        policy=Bound(1 / 3),
        held_out=networks.HELD_OUT,
        cache=CacheOptions(example=example, **cache),
        **options,
    )


def trained(elastic: Elastic, epochs: int = EPOCHS, *, factor: float = 1.0) -> list[float]:
    """Losses, and of each epoch how many held-out rows are known."""
    found: list[float] = []
    for _ in range(epochs):
        for share in elastic.shares():
            x, y = networks.rows(share.samples)
            found.append(
                elastic.step(x, y, share=share, lr=factor * networks.lr_of(share.step)).loss
            )
        found.append(
            elastic.evaluate(
                networks.HELD_OUT,
                lambda share: (*networks.rows(share.samples, held_out=True), {}),
                score=networks.right,
                cached=True,
            )
        )
        elastic.decide()
    return found


def kept(elastic: Elastic) -> int:
    """How many samples, held-out ones too, are there at some depth."""
    if elastic._runtime.host_cache.cache is None:
        return 0
    cache = elastic._runtime.host_cache.cache
    return int((torch.from_numpy(cache._tags.copy())[:, 0] > 0).sum()) if cache.room else 0


def run(
    rank: int, group: Any, caches: list[dict[str, Any]], options: dict[str, Any]
) -> list[tuple[Any, ...]]:
    """Of each of these ways to keep: (what training said, bits of this rank's weights, how many
    samples are kept, read?)."""
    found = []
    for cache in caches:
        elastic = made(cache, **options)
        said = trained(elastic)
        states = elastic.states()
        weights = {
            name: t.numpy().tobytes()
            for each in states.values()
            for name, t in each["parameters"].items()
        }
        found.append((said, weights, kept(elastic), elastic.is_cached))
        elastic.close()
    return found


ALL = networks.SAMPLES + networks.HELD_OUT


@pytest.mark.parametrize(
    ("ranks", "ways", "options"),
    [
        (1, 5, {}),
        (2, 2, {"stages": 2}),
        full(2, 3, {"stages": 2}),
        full(2, 5, {"stages": 2}),
        full(4, 2, {"stages": 4}),
        full(4, 2, {"stages": 4, "replicate": False}),
    ],
)
def test_reading_has_the_bits_of_computing(world, tmp_path, ranks, ways, options):
    small = {"mode": "on", "budget": 4096 + 16 * ALL + 9 * EACH}
    caches = [
        {"mode": "off"},
        {"mode": "on"},
        {**small, "disk": str(tmp_path)},
        small,
        {"mode": "on", "budget": 4100},
    ][:ways]
    runs = [run(0, None, caches, options)] if ranks == 1 else world(ranks).run(run, caches, options)
    wanted = [(0, False), (ALL, True), (ALL, True), (19, True), (0, False)][:ways]
    for off, *others in runs:
        assert [each[2:] for each in (off, *others)] == wanted
        for each in others:
            assert each[0] == off[0]
            assert each[1] == off[1]
    losses = max(runs, key=lambda each: len(each[0][0]))[0][0]
    assert len(losses) > EPOCHS
    assert losses[0] != losses[-2]
    assert not list(tmp_path.iterdir())


def read_where(rank: int, group: Any) -> list[tuple[int, bool]]:
    """(stages, whether this rank says that it is cached) from one decision to the next, until the
    cache is lost on rank 0."""
    elastic, found = made({"mode": "on"}, stages=2), []
    for epoch in range(3):
        for share in elastic.shares():
            if epoch == 2 and rank == 0:
                elastic._runtime.worker._prefix.detach_cache(OSError("the memory is gone"))
            x, y = networks.rows(share.samples)
            elastic.step(x, y, share=share, lr=0.01)
        found.append((elastic.layout.stages, elastic.is_cached))
        if epoch < 2:
            elastic.decide()
    elastic.close()
    return found


def test_ranks_say_whether_frozen_layers_are_read(world):
    first, second = world(2).run(read_where)
    assert second == [(2, False), (2, True), (1, True)]
    assert first == [(2, False), (2, True), (1, False)]


def test_16_bits_are_the_same_run_read_or_computed():
    rounded = {"stored": torch.bfloat16}
    off, on, exact = run(
        0, None, [{"mode": "off", **rounded}, {"mode": "on", **rounded}, {"mode": "off"}], {}
    )
    assert on[:2] == off[:2]
    assert on[2:] == (ALL, True)
    assert exact[0] != off[0]
    torch.testing.assert_close(torch.tensor(exact[0]), torch.tensor(off[0]), rtol=0.05, atol=0.05)


def test_other_weights_are_not_met_by_what_was_kept_of_the_first(tmp_path):
    one, other = made({"mode": "off"}), made({"mode": "on"})
    trained(one, 2, factor=0.5)
    trained(other, 3)
    save(tmp_path / "saved", one.state_dict())
    other.load_state_dict(load(tmp_path / "saved")[0])
    assert trained(other, 2) == trained(one, 2)
    for each in (one, other):
        each.close()


def _auto(rank: int, group: dist.ProcessGroup) -> list[bool]:
    """With two ranks of which the first alone has frozen layers."""
    found = []
    inner = host_cache.measure
    try:
        for compute in (10.0, 8.0):
            host_cache.measure = lambda *args, compute=compute, **named: (
                inner(*args, **named),
                CacheTimes(compute, 5.0, 4.0),
            )[1]
            keeper = HostCache(
                CacheOptions("auto", example),
                samples=networks.SAMPLES,
                held_out=0,
                control_group=group,
            )
            prefix = (
                FrozenLayers([torch.nn.Linear(7, networks.WIDTH)], chunk=1) if rank == 0 else None
            )
            found.append(keeper.attach(prefix, replica=0))
            assert prefix is None or (prefix.cache is not None) == found[-1]
            if found[-1]:  # deeper, it is not measured again
                host_cache.measure = lambda *args, **named: CacheTimes(0.0, 5.0, 4.0)
                deeper = (
                    FrozenLayers([*prefix.layers, torch.nn.Tanh()], chunk=1)
                    if prefix is not None
                    else None
                )
                found.append(keeper.attach(deeper, replica=0))
                assert deeper is None or deeper.cache is not None
            keeper.close()

        def fail(*args: Any, **named: Any) -> None:
            raise ValueError("rows of another shape")

        host_cache.measure = fail
        keeper = HostCache(
            CacheOptions("auto", example), samples=networks.SAMPLES, held_out=0, control_group=group
        )
        with pytest.raises(ValueError, match="rows of another shape"):
            keeper.attach(
                FrozenLayers([torch.nn.Linear(7, networks.WIDTH)]) if rank == 0 else None, replica=0
            )
        keeper.close()
    finally:
        host_cache.measure = inner
    return found


def test_ranks_without_frozen_layers_decide_as_the_others(world):
    assert world(2).run(_auto) == [[True, True, False]] * 2


def test_a_cache_that_fails_in_training_is_lost_once(monkeypatch, caplog):
    wanted = run(0, None, [{"mode": "off"}], {})[0][0]

    def fail(*args: Any, **named: Any) -> None:
        raise OSError("the memory is gone")

    elastic = made({"mode": "on"})
    said = trained(elastic, 2)
    assert elastic.is_cached
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="pyops"):
        patch.setattr(ActivationCache, "get", fail)
        said += trained(elastic, EPOCHS - 2)
    assert not elastic.is_cached
    elastic.close()
    assert said == wanted
    assert (
        len([record for record in caplog.records if "the memory is gone" in record.getMessage()])
        == 1
    )


def scored(elastic: Elastic, *, held_out: bool, **named: Any) -> float:
    def rows_of(share: Any) -> Any:
        return *networks.rows(share.samples, held_out=held_out), {}

    return elastic.evaluate(networks.HELD_OUT, rows_of, score=networks.loss, **named)


def test_another_set_of_as_many_samples_has_its_own_score():
    with_cache, without = made({"mode": "on"}), made({"mode": "off"})
    for each in (with_cache, without):
        trained(each, 2)
    assert with_cache.is_cached
    assert kept(with_cache) == networks.HELD_OUT + networks.SAMPLES
    wanted = [scored(without, held_out=held_out) for held_out in (True, False)]
    assert wanted[0] != wanted[1]
    assert scored(with_cache, held_out=True, cached=True) == wanted[0]
    assert scored(with_cache, held_out=False) == wanted[1]
    with pytest.raises(
        ValueError, match="count is 5, but cached=True is of the 13 samples of held_out="
    ):
        with_cache.evaluate(
            5, lambda share: (*networks.rows(share.samples), {}), score=networks.loss, cached=True
        )
    for each in (with_cache, without):
        each.close()


def test_bad_options():
    with pytest.raises(ValueError, match="cache mode is 'of'; choose one of auto, on, off"):
        CacheOptions("of")
    with pytest.raises(ValueError, match="needs an example"):
        CacheOptions("auto")


def test_the_next_batch_is_read_from_the_disk_while_this_one_is_computed(tmp_path, monkeypatch):
    elastic = made({"mode": "on", "budget": 4096 + 16 * ALL, "disk": str(tmp_path)})
    trained(elastic, 2)  # the second epoch keeps, the third reads and keeps
    late, inner = [], DiskTier.get

    def get(tier, places, versions):
        before = tier._file.bytes_read
        found = inner(tier, places, versions)
        late[-1] += tier._file.bytes_read - before
        return found

    monkeypatch.setattr(DiskTier, "get", get)
    for share in elastic.shares():
        x, y = networks.rows(share.samples)
        late.append(0)
        elastic.step(x, y, share=share, lr=0.01)
    elastic.close()
    assert late[0] > 0
    assert late[1:] == [0, 0, 0]


def test_a_sampler_tells_what_comes_next():
    for rank in range(2):
        sampler = Sampler(11, batch=4, seed=1, rank=rank, replicas=2)
        for _ in range(2):
            for _ in range(3):
                coming = sampler.peek() if sampler.position < 11 else None
                share = sampler.next()
                assert coming is None or torch.equal(coming, share.samples)
            assert not len(sampler.peek())
