"""The clock of virtual replicas: computed by hand, and the same for any order of threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from pyops.comm import CommunicationError, Int8
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import Link, run_replicas

pytestmark = pytest.mark.cpu_only

NUMEL = 1000
LINK = Link(bytes_per_second=1000.0, latency=0.25)


def replica_of(me, config: LocalSGDConfig, steps: int, seconds) -> Any:
    net = nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    outer = LocalSGD(net, optimizer, config, group=me.exchange)
    begun, sent = me.clock, me.bytes_sent
    for step in range(steps):
        me.compute(seconds(me.number, step))
        outer.step()
    outer.finish()
    return me.clock - begun, me.bytes_sent - sent, me.computed


def test_a_meeting_begins_with_the_last_and_takes_what_its_bytes_need():
    config = LocalSGDConfig(method="local_sgd", every=2)
    found = run_replicas(3, lambda me: replica_of(me, config, 2, lambda n, _: n + 1.0), link=LINK)
    traffic = 2 * 2 / 3 * 4 * NUMEL
    agreement = 0.25  # a small message
    for number, (clock, sent, computed) in enumerate(found):
        assert clock == pytest.approx(2 * 3.0 + 2 * 0.25 + traffic / 1000 + agreement)
        assert sent == pytest.approx(traffic)
        assert computed == 2 * (number + 1)


@pytest.mark.parametrize(("codec", "nbytes"), [("none", 4 * NUMEL), (Int8(), NUMEL + 4 * 4)])
def test_bytes_are_those_of_the_codec_once_in_a_period(codec, nbytes):
    config = LocalSGDConfig(every=5, codec=codec)
    found = run_replicas(2, lambda me: replica_of(me, config, 50, lambda *_: 0.0), link=LINK)
    assert [sent for _, sent, _ in found] == [pytest.approx(10 * nbytes)] * 2


def test_what_is_sent_late_is_hidden_behind_steps():
    late = LocalSGDConfig(method="local_sgd", every=10, delay=8)
    found = run_replicas(2, lambda me: replica_of(me, late, 20, lambda *_: 1.0), link=LINK)
    assert found[0][0] == pytest.approx(20 + 0.25 + 4.5 + 0.25)  # the last one is waited for
    late = LocalSGDConfig(method="local_sgd", every=10, delay=2)
    found = run_replicas(2, lambda me: replica_of(me, late, 12, lambda *_: 1.0), link=LINK)
    assert found[0][0] == pytest.approx(10 + 4.5 + 0.25)


def test_a_hundred_replicas_have_the_same_clocks_each_time():
    def body(me):
        spread = random.Random(me.number)
        config = LocalSGDConfig(method="local_sgd", every=4)
        return replica_of(me, config, 8, lambda *_: 1 + spread.random())

    first = run_replicas(100, body, link=LINK)
    assert first == run_replicas(100, body, link=LINK)
    assert max(row[0] for row in first) > 8 + 2 * 2 * 99 / 100 * 4
    computing = sum(row[2] for row in first) / sum(row[0] for row in first)
    assert 0.3 < computing < 0.9


def test_a_death_is_heard_of_in_the_next_exchange_and_by_all():
    def body(me):
        if me.number == 2:
            me.compute(3.0)
            me.die()
        with pytest.raises(CommunicationError, match="replica 2 died") as caught:
            me.exchange.gather(1)
        return caught.value.ranks, me.regroup({0, 1}).gather(me.number)

    assert run_replicas(3, body) == [((2,), [0, 1])] * 2 + [None]
