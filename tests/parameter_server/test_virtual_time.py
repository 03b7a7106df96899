"""Downpour SGD in virtual time: what its replicas and shards compute, whatever the delays."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pyops.comm import BF16, Int8, OneBit
from pyops.flat import FlatBuffer
from pyops.optim import SGD, Adagrad, AdamW
from pyops.parameter_server import (
    DownpourConfig,
    ParameterShard,
    ShardConfig,
    VirtualTime,
    VirtualWorker,
)
from pyops.parameter_server.messages import Reply, Request
from tests.grids import cut, full
from tests.parameter_server.replicas import (
    adagrad,
    gradient,
    model,
    quadratic,
    run,
    sgd,
    uneven,
)

pytestmark = pytest.mark.cpu_only

PLAIN = {
    "sgd": lambda p: SGD(p, lr=0.07, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shards", [1, 3])
def test_one_replica_is_the_plain_optimizer_bit_for_bit(name: str, shards: int):
    plain = model()
    optimizer = PLAIN[name](plain.parameters())
    for step in range(7):
        gradient(plain, 0, step)
        optimizer.step()
        optimizer.zero_grad()
    virtual = run(
        [VirtualWorker(latency=0.1, steps=7)],
        lambda p: PLAIN[name]([p]),
        fetch_delay=0,
        shards=shards,
    )
    assert not torch.equal(flat(plain), flat(model()))
    assert torch.equal(flat(virtual.clients[0].model), flat(plain))
    assert all(shard.version == 7 for shard in virtual.shards)
    assert virtual.clients[0].staleness == Counter({0: 7 * shards})


def test_pushes_carry_one_gradient_then_n_push_of_them():
    """Both tests of the paper's pseudo-code come before step += 1: pushes follow minibatches 1,
    4, 7."""
    counts = []
    virtual = VirtualTime(
        model,
        gradient,
        sgd(0.1),
        [VirtualWorker(steps=8)],
        config=DownpourConfig(push_every=3, fetch_every=2),
    )
    shard = virtual.shards[0]
    served = shard.push

    def push(request, vector, **options):
        counts.append(request.count)
        return served(request, vector, **options)

    shard.push = push
    virtual.run()
    assert counts == [1, 3, 3, 1]  # the last one as the replica leaves
    assert virtual.clients[0].pushed_gradients == 8


def test_own_steps_are_of_single_gradients_whatever_is_pushed():
    virtual = run(
        [VirtualWorker(steps=5)], sgd(0.1), push_every=3, fetch_every=100, local_lr=0.05, mean=True
    )
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        gradient(plain, 0, step)
        optimizer.step()
    assert torch.equal(flat(virtual.clients[0].model), flat(plain))


def test_a_push_is_the_sum_of_gradients_and_with_mean_their_mean():
    ways = {}
    for mean in (False, True):
        virtual = run(
            [VirtualWorker(steps=4)],
            sgd(0.1),
            push_every=3,
            fetch_every=9,
            mean=mean,
        )
        ways[mean] = virtual.parameters() - flat_backward(model())
    first, others = model(), model()
    gradient(first, 0, 0)
    for step in (1, 2, 3):
        gradient(others, 0, step)
    one, three = flat_backward(first, grads=True), flat_backward(others, grads=True)
    torch.testing.assert_close(ways[False], -0.1 * (one + three), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ways[True], -0.1 * (one + three / 3), rtol=1e-5, atol=1e-6)


def flat_backward(module: torch.nn.Module, *, grads: bool = False) -> torch.Tensor:
    """The parameters or gradients as the shards have them: in reverse, aligned."""
    buffer = FlatBuffer(module.named_parameters())
    return (buffer.grad if grads else buffer.data).clone()


@pytest.mark.parametrize("optimizer", [sgd(0.05), adagrad(0.05)], ids=["sgd", "adagrad"])
def test_a_replayed_order_gives_the_same_bits_on_any_number_of_shards(optimizer):
    first = run(uneven(4, steps=9), optimizer, shard_config=ShardConfig(record=True))
    log = first.shards[0].log
    assert len({entry[1] for entry in log[:12]}) > 2  # not one worker after the other
    other = run(uneven(4, steps=9, seed=5), optimizer)
    assert not torch.equal(other.parameters(), first.parameters())
    for shards in (1, 2, 3):
        again = run(
            uneven(4, steps=9, seed=5),
            optimizer,
            shards=shards,
            shard_config=ShardConfig(replay=log, record=True),
        )
        assert torch.equal(again.parameters(), first.parameters())
        assert all(shard.log == log for shard in again.shards)


def test_a_replica_may_leave_a_replay_before_its_last_fetch_is_asked_for():
    """Threads answer a fetch whose replica is about to leave; virtual time drops it."""
    workers = uneven(2, steps=4)
    first = run(workers, adagrad(0.05), shard_config=ShardConfig(record=True))
    log = list(first.shards[0].log)
    last = max(n for n, (kind, *_) in enumerate(log) if kind == "push")
    gone = 1 - log[last][1]
    assert ("push", gone, 4) in log[:last]
    asked = sum(kind == "fetch" and worker == gone for kind, worker, _ in log)
    log.insert(last, ("fetch", gone, asked + 1))
    again = run(workers, adagrad(0.05), shard_config=ShardConfig(replay=log))
    assert again.shards[0].version == first.shards[0].version == 8
    assert torch.equal(again.parameters(), first.parameters())


class three(nn.Module):
    """The sum of three numbers, which up to three shards hold."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(3))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum()


def delayed(drawn: random.Random, replicas: int, *, lost: bool) -> list[VirtualWorker]:
    """Replicas whose steps and messages take from a hundredth of a second to ten, each another
    time; with `lost`, some join late, and some die."""

    def seconds(slow: float) -> Callable[[int], float]:
        times = [slow * 10 ** drawn.uniform(-1, 1) for _ in range(14)]
        return lambda step: times[step % 14]

    return [
        VirtualWorker(
            seconds(10 ** drawn.uniform(-1, 0)),
            latency=drawn.choice([0.0, 10 ** drawn.uniform(-2, 0)]),
            starts=drawn.choice([0.0, drawn.uniform(0, 10)]) if lost else 0.0,
            dies=drawn.choice([None, None, drawn.uniform(1, 30)]) if lost else None,
            steps=14,
        )
        for _ in range(replicas)
    ]


def watched(
    workers: list[VirtualWorker], config: DownpourConfig, shard_config: ShardConfig, shards: int
) -> tuple[VirtualTime, int]:
    """A run to its end, and by how many pushes a replica was ahead of the slowest one, at most,
    when a fetch of it was answered."""
    virtual = VirtualTime(
        three,
        lambda module, worker, step: module().backward(),
        sgd(0.01),
        workers,
        shards=shards,
        config=config,
        shard_config=shard_config,
    )
    ahead = [0]

    def watch(shard: ParameterShard) -> None:
        served = shard.fetch

        def fetch(request: Request) -> tuple[Reply, torch.Tensor]:
            clocks = [m.clock for m in shard.members.values() if m.live and m.clock is not None]
            own = shard.members[request.worker].clock
            if own is not None:
                ahead.append(own - min(clocks))
            return served(request)

        shard.fetch = fetch  # type: ignore[method-assign]

    for shard in virtual.shards:
        watch(shard)
    return virtual.run(), max(ahead)


DELAYS = cut([(n,) for n in range(40)], keep=[(0,)])  # 25 draws each: 1,000


@pytest.mark.parametrize("part", DELAYS)
def test_the_bound_on_staleness_holds_and_is_reached_under_random_delays(part: int):
    """No fetch of a replica more than `max_staleness` pushes ahead of the slowest is answered, and
    nobody waits for ever. So a replica that fetches at each step is overtaken by each other one at
    most 2 max_staleness + 1 times before its push is applied."""
    reached: set[tuple[str, int]] = set()
    for seed in range(25 * part, 25 * part + 25):
        drawn, bound = random.Random(seed), seed % 3
        lost = drawn.random() < 0.5
        replicas = drawn.choice([2, 2, 3, 5])
        workers = delayed(drawn, replicas, lost=lost)
        every = drawn.choice([1, 1, 2])
        config = DownpourConfig(
            fetch_every=every,
            push_every=drawn.choice([1, every]),
            fetch_delay=drawn.choice([0, 0, 1]),
        )
        shards = drawn.choice([1, 2, 3])
        virtual, ahead = watched(workers, config, ShardConfig(max_staleness=bound), shards)
        assert ahead <= bound, seed
        reached |= {("ahead", bound)} if ahead == bound else set()
        for number, worker in enumerate(workers):
            if worker.dies is None:
                assert virtual.clients[number].step_number == 14, (seed, number)
        if every == 1 and config.fetch_delay == 0:
            most = (replicas - 1) * (2 * bound + 1)
            stale = max(max(shard.staleness) for shard in virtual.shards)
            assert stale <= most, seed
    assert reached >= {("ahead", bound) for bound in range(3)}


@pytest.mark.parametrize("part", DELAYS)
def test_no_push_older_than_drop_after_is_applied_under_random_delays(part: int):
    reached = set()
    for seed in range(25 * part, 25 * part + 25):
        drawn, bound = random.Random(seed), seed % 5
        workers = delayed(drawn, drawn.choice([2, 3, 5]), lost=False)
        config = DownpourConfig(fetch_delay=drawn.choice([0, 1]))
        virtual, _ = watched(workers, config, ShardConfig(drop_after=bound), 1 + seed % 3)
        for shard in virtual.shards:
            assert max(shard.staleness) <= bound, seed
            reached |= {bound} if max(shard.staleness) == bound else set()
            assert shard.version + shard.counts.refused["TOO_STALE"] == 14 * len(workers)
    assert reached == set(range(5))


def test_pushes_older_than_drop_after_are_refused_and_counted():
    virtual = run(uneven(6, steps=10), sgd(0.01), shard_config=ShardConfig(drop_after=4))
    shard = virtual.shards[0]
    refused = shard.counts.refused["TOO_STALE"]
    assert refused > 0
    assert max(shard.staleness) == 4
    assert shard.version + refused == 60
    assert sum(c.refused["TOO_STALE"] for c in virtual.clients.values()) == refused


@pytest.mark.parametrize("staleness", [0, full(1), 2, full(4), 8])
def test_a_quadratic_diverges_at_the_rate_that_theory_says(staleness: int):
    """alpha l < 2 sin(pi / (4 tau + 2)), within one percent; replicas in turn have tau = R - 1."""
    bound = 2 * math.sin(math.pi / (4 * staleness + 2))
    growth = {}
    for factor in (0.99, 1.01):
        sizes: list[float] = []
        virtual = VirtualTime(
            quadratic,
            lambda m, worker, step: m().backward(),
            lambda p, rate=factor * bound: torch.optim.SGD([p], lr=rate),
            [VirtualWorker(1.0, starts=r / 16) for r in range(staleness + 1)],
            config=DownpourConfig(fetch_delay=0),
        )
        shard = virtual.shards[0]
        while shard.version < 240:
            virtual.run(virtual.clock.now + 1 / 16)
            sizes.append(abs(shard.parameter.item()))
        assert shard.staleness[staleness] >= 240 - staleness
        growth[factor] = max(sizes[-40 * 16 // (staleness + 1) :]) / max(sizes[: len(sizes) // 2])
    assert growth[0.99] < 1 < growth[1.01]


def test_warm_start_is_made_by_the_first_replica_alone():
    virtual = run(
        uneven(4, steps=12), adagrad(0.05), shard_config=ShardConfig(warm_start=7, record=True)
    )
    pushes = [entry[1] for entry in virtual.shards[0].log if entry[0] == "push"]
    assert pushes[:7] == [0] * 7
    assert set(pushes[7:11]) != {0}
    assert len(pushes) == 48


def test_a_warm_start_whose_replica_dies_is_made_by_the_next_one():
    workers = [VirtualWorker(steps=30, dies=3.5), *uneven(2, steps=10)]
    virtual = run(workers, sgd(0.01), shard_config=ShardConfig(warm_start=8, record=True))
    pushes = [entry[1] for entry in virtual.shards[0].log if entry[0] == "push"]
    assert set(pushes[:3]) == {0}
    assert set(pushes[3:8]) <= {0, 1}
    assert pushes[8:].count(2) > 5


def test_replicas_that_die_leave_the_others_their_way():
    workers = uneven(120, steps=2)
    for number in range(0, 120, 4):
        workers[number] = VirtualWorker(1.0, latency=0.3, dies=0.31 + 0.02 * number, steps=2)
    virtual = run(workers, adagrad(0.01), shards=2, shard_config=ShardConfig(max_staleness=2))
    for shard in virtual.shards:
        assert shard.counts.lost_members > 15
        assert 180 <= shard.version < 240
        assert sum(m.live for m in shard.members.values()) == 0


@pytest.mark.parametrize("codec", [BF16(), Int8(), OneBit()], ids=lambda c: c.name)
def test_codecs_both_ways_send_fewer_bytes_and_lose_nothing_for_good(codec):
    """Differences carry what earlier fetches left out, and errors what pushes did."""
    plain = run(uneven(2, steps=25), sgd(0.05))
    coded = run(uneven(2, steps=25), sgd(0.05), push_codec=codec, fetch_codec=codec)
    assert coded.clients[0].links.bytes < 0.75 * plain.clients[0].links.bytes
    moved = (plain.parameters() - flat_backward(model())).norm()
    apart = (plain.parameters() - coded.parameters()).norm()
    assert 0 < float(apart) < 0.35 * float(moved)
    client, shard = coded.clients[0], coded.shards[0]
    behind = (client._known - shard.parameter.detach()).norm()
    assert float(behind) < 0.35 * float(moved)


def test_gradients_that_are_not_finite_are_in_no_push():
    def poisoned(module, worker, step):
        gradient(module, worker, step)
        if (worker, step) == (1, 2):
            next(module.parameters()).grad[0, 0] = math.nan

    virtual = VirtualTime(
        model, poisoned, sgd(0.05), [VirtualWorker(steps=5) for _ in range(2)]
    ).run()
    assert [virtual.clients[w].skipped for w in (0, 1)] == [0, 1]
    assert virtual.shards[0].version == 9
    assert bool(virtual.parameters().isfinite().all())
