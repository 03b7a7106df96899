"""The sampler: every sample once an epoch, in an order that no number of replicas changes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.elastic import Sampler

pytestmark = pytest.mark.cpu_only

CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6
)  # (batches, replicas from then on)


def run(
    samples: int, batch: int, changes: list[tuple[int, int]], policy: str, *, seed: int = 1
) -> list[list[tuple[int, list]]]:
    """For each batch, of each replica (epoch, samples), while replicas come and go: new ones load
    the state of replica 0."""
    everyone = [
        Sampler(samples, batch=batch, seed=seed, batch_policy=policy, rank=r, replicas=3)
        for r in range(3)
    ]
    found = []
    for batches, replicas in changes:
        for _ in range(batches):
            shares = [each.next() for each in everyone]
            assert len({(each.batch, each.epoch) for each in shares}) == 1
            assert sum(len(each.samples) for each in shares) == shares[0].batch
            assert sum(each.weight for each in shares) == pytest.approx(1.0)
            sizes = [len(each.samples) for each in shares]
            assert max(sizes) - min(sizes) <= 1
            found.append([(each.epoch, each.samples.tolist()) for each in shares])
        state = json.loads(json.dumps(everyone[0].state_dict()))
        assert all(each.state_dict() == state for each in everyone)
        for rank, each in enumerate(everyone := everyone[:replicas]):
            each.resize(rank=rank, replicas=replicas)
        for rank in range(len(everyone), replicas):
            new = Sampler(
                samples, batch=batch, seed=seed, batch_policy=policy, rank=rank, replicas=replicas
            )
            new.load_state_dict(state)
            everyone.append(new)
    return found


def in_order(found: list[list[tuple[int, list]]]) -> list[tuple[int, int]]:
    return [(epoch, sample) for batch in found for epoch, samples in batch for sample in samples]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 17), CHANGES, st.sampled_from(["global", "replica"]))
def test_every_sample_once_an_epoch(samples, batch, changes, policy):
    seen = in_order(run(samples, batch, changes, policy))
    assert [epoch for epoch, _ in seen] == sorted(epoch for epoch, _ in seen)
    for epoch in range(seen[-1][0] + 1):
        mine = [sample for e, sample in seen if e == epoch]
        assert len(set(mine)) == len(mine), "none twice"
        if epoch < seen[-1][0]:
            assert sorted(mine) == list(range(samples)), "none left out"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 17), CHANGES)
def test_the_global_batches_are_those_of_one_replica(samples, batch, changes):
    found = run(samples, batch, changes, "global")
    alone = Sampler(samples, batch=batch, seed=1)
    for shares in found:
        whole = alone.next()
        assert [sample for _, part in shares for sample in part] == whole.samples.tolist()
        assert {epoch for epoch, _ in shares} == {whole.epoch}


def test_by_hand():
    first, second = run_order(10, 0), run_order(10, 1)
    found = run(10, 4, [(2, 2), (2, 1)], "global", seed=0)
    assert found[1] == [(0, first[4:5]), (0, first[5:6]), (0, first[6:8])]
    assert found[2] == [(0, first[8:9]), (0, first[9:])]
    assert found[3] == [(1, second[:2]), (1, second[2:4])]


def run_order(samples: int, epoch: int) -> list[int]:
    whole = Sampler(samples, batch=samples, seed=0)
    return [whole.next().samples.tolist() for _ in range(epoch + 1)][-1]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [run_order(20, epoch) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert Sampler(20, batch=20, seed=9).next().samples.tolist() not in orders
    still = Sampler(5, batch=5, seed=0, shuffle=False)
    assert [still.next().samples.tolist() for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2


def test_fewer_samples_than_replicas():
    parts = [Sampler(2, batch=8, seed=0, rank=rank, replicas=4) for rank in range(4)]
    for epoch in range(3):
        shares = [part.next() for part in parts]
        assert sorted(torch.cat([share.samples for share in shares]).tolist()) == [0, 1]
        assert [len(share.samples) for share in shares] == [0, 1, 0, 1]
        assert [share.weight for share in shares] == [0.0, 0.5, 0.0, 0.5]
        assert {share.epoch for share in shares} == {epoch}


def test_an_epoch_at_a_time():
    sampler = Sampler(10, batch=4, seed=0)
    sampler.next()
    assert [len(share.samples) for share in sampler.rest()] == [4, 2]
    assert [(len(share.samples), share.epoch) for share in sampler.rest()] == [
        (4, 1),
        (4, 1),
        (2, 1),
    ]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("constant", 1.0)])
def test_the_learning_rate_follows_the_global_batch(rule, factor):
    sampler = Sampler(100, batch=4, seed=0, replicas=2, batch_policy="replica", lr_rule=rule)
    assert (sampler.global_batch, sampler.lr_factor) == (8, 1.0)
    sampler.resize(rank=5, replicas=8)
    assert (sampler.global_batch, sampler.lr_factor) == (32, factor)
    late = Sampler(100, batch=4, seed=0, rank=7, replicas=8, batch_policy="replica", lr_rule=rule)
    assert late.lr_factor == 1.0
    late.load_state_dict(sampler.state_dict())
    assert late.lr_factor == factor, "of the batch of the start, when it was not there"
    kept = Sampler(100, batch=8, seed=0, replicas=2, lr_rule=rule)
    kept.resize(rank=0, replicas=8)
    assert (kept.global_batch, kept.lr_factor) == (8, 1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"batch": 2.0}, "batch is 2.0"),
        ({"rank": 2}, "replica 2 of 2"),
        ({"replicas": 0}, "replica 0 of 0"),
        ({"batch_policy": "mine"}, "batch_policy is 'mine'; choose one of global, replica"),
        ({"lr_rule": "steep"}, "lr_rule is 'steep'; choose one of constant, linear, sqrt"),
    ],
)
def test_bad_input(changed, message):
    arguments = {"samples": 10, "batch": 4, "seed": 0, "replicas": 2, **changed}
    with pytest.raises(ValueError, match=message):
        Sampler(arguments.pop("samples"), **arguments)


@pytest.mark.parametrize("changed", [{"samples": 11}, {"seed": 1}, {"shuffle": False}])
def test_the_state_of_another_order_is_refused(changed):
    arguments = {"samples": 10, "batch": 4, "seed": 0}
    state = Sampler(**arguments).state_dict()
    other = Sampler(**{**arguments, **changed})
    other.next()
    before = other.state_dict()
    with pytest.raises(ValueError, match="the state is of a sampler with"):
        other.load_state_dict(state)
    assert other.state_dict() == before
