"""How layouts begin and end: replicas alike, decisions when they are due, and nothing of the old
one left."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.elastic import Callback, Elastic, Sampler
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only

BLOCKS = 4


def make(*, seed: int = 3, **options: Any) -> Elastic:
    return make_elastic(
        networks.layers(BLOCKS, seed=seed),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        **options,
    )


def steps(elastic: Elastic) -> None:
    for share in elastic.shares():
        elastic.step(*networks.rows(share.samples), share=share, lr=0.01)


def values(elastic: Elastic) -> dict[str, Tensor]:
    return {
        name: t.clone()
        for each in elastic.states().values()
        for name, t in each["parameters"].items()
    }


def begun_otherwise(rank: int, group: Any) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    elastic = make(seed=3 + rank, stages=2)
    found = [values(elastic)]
    steps(elastic)
    found.append(values(elastic))
    elastic.close()
    return found


def test_replicas_begin_with_the_values_of_the_first(world):
    ranks = world(4).run(begun_otherwise)
    for first, second in ((0, 2), (1, 3)):
        for mine, theirs in zip(ranks[first], ranks[second], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    drawn = {
        f"{name}.{key}": t
        for seed in (3, 4)
        for name, layer in networks.layers(BLOCKS, seed=seed).items()
        for key, t in layer.state_dict().items()
        if (name in ("head", "blocks.3")) == (seed == 4)
    }
    begun = ranks[0][0] | ranks[1][0]
    for name in ("embedding.weight", "blocks.3.up.weight", "head.bias"):
        assert torch.equal(begun[name], drawn[name])
    assert not torch.equal(ranks[0][0]["embedding.weight"], ranks[0][1]["embedding.weight"]), (
        "nothing was learnt"
    )


@pytest.mark.parametrize(
    ("every", "due"),
    [(0, [4, 8, 12, 16]), (6, [6, 12]), (3, [3, 6, 9, 12, 15]), (4, [4, 8, 12, 16])],
)
def test_decisions_come_every_so_many_steps_over_the_ends_of_epochs(every, due):
    asked: list[int] = []

    def noting(norms: Any, frozen: int) -> int:
        asked.append(elastic.steps)
        return frozen

    elastic = make(every=every, policy=Callback(noting))
    while elastic.steps < 16:  # 4 make an epoch
        steps(elastic)
        if elastic.is_due:
            elastic.decide()
    assert asked == due
    elastic.close()


def test_what_a_layout_had_is_gone_with_it():
    """At once: where it waited for Python to look for circles, old gradients and states would lie
    beside the new ones."""
    elastic = make(policy=Callback(lambda norms, frozen: frozen + 1))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            worker = elastic._runtime.worker
            old = [weakref.ref(each) for each in (worker, *worker.buffers, worker.optimizer)]
            assert len(old) > 2
            del worker
            steps(elastic)
            assert elastic.decide() is not None
            assert [each() for each in old] == [None] * len(old)
    finally:
        gc.enable()
    elastic.close()


def idle(rank: int, group: Any) -> bool:
    """Whether the memory of the stage that a rank had is gone when the rank has no work."""
    elastic = make(stages=2, policy=Callback(lambda norms, frozen: len(norms)), replicate=False)
    old = weakref.ref(elastic.layers["blocks.3"].up.weight)  # a part of the stage's one buffer
    steps(elastic)
    elastic.decide()
    gone = elastic.is_active or old() is None
    elastic.close()
    return gone


def test_an_idle_rank_keeps_nothing_of_its_stage(world):
    assert world(2).run(idle) == [True, True]


def test_a_kept_global_batch_keeps_its_learning_rate_whatever_the_batch_was():
    before = Sampler(100, batch=8, seed=1)
    for policy, factor in (("global", 1.0), ("replica", 2.0)):
        after = Sampler(100, batch=16, seed=1, batch_policy=policy, lr_rule="linear")
        after.load_state_dict(before.state_dict())
        assert after.lr_factor == factor
