"""What replicas and shards refuse, by value and fix, before anything is changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pyops.comm import Int8, PowerSGD
from pyops.optim import LAMB, LARS, SGD, Adafactor, Adagrad
from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    ParameterShard,
    Request,
    ServerConfig,
    ShardConfig,
    VirtualTime,
    VirtualWorker,
    serve,
)
from pyops.parameter_server.messages import Kind, Verdict
from pyops.parameter_server.vectors import all_finite
from tests.parameter_server.replicas import adagrad, gradient, model, sgd
from tests.parameter_server.shard_threads import tcp_store

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (DownpourConfig, {"fetch_every": 0}, "fetch_every is 0; give a whole number, 1 or more"),
        (DownpourConfig, {"push_every": 1.5}, "push_every is 1.5; give a whole number"),
        (DownpourConfig, {"fetch_delay": 2}, "fetch_delay is 2, .*give fetch_delay <= fetch_every"),
        (DownpourConfig, {"local_lr": -1.0}, "local_lr is -1.0; give a number, 0 or more"),
        (DownpourConfig, {"local_lr": math.nan}, "local_lr is nan"),
        (DownpourConfig, {"buffers": "mean"}, "buffers is 'mean'; give"),
        (DownpourConfig, {"push_codec": "int8"}, "push_codec is 'int8'; give a codec"),
        (DownpourConfig, {"fetch_codec": PowerSGD()}, "fetch_codec is PowerSGD.*; give a codec"),
        (ShardConfig, {"warm_start": -1}, "warm_start is -1; give a whole number, 0 or more"),
        (ShardConfig, {"max_staleness": True}, "max_staleness is True; .* or None"),
        (ShardConfig, {"drop_after": -2}, "drop_after is -2; .* or None"),
        (ShardConfig, {"snapshot_every": 0}, "snapshot_every is 0; give a whole number, 1"),
        (ShardConfig, {"record": 1}, "record is 1; give True or False"),
        (ServerConfig, {"lease": 0.0}, "lease is 0.0; give seconds, above 0"),
        (ConnectConfig, {"patience": -1.0}, "patience is -1.0; give seconds, above 0"),
    ],
)
def test_options_out_of_range_are_refused(kind: type, given: dict[str, object], text: str):
    with pytest.raises(ValueError, match=text):
        kind(**given)


@pytest.mark.parametrize("rule", [LAMB, LARS, Adafactor])
def test_optimizers_that_go_by_norms_are_refused(rule: type):
    with pytest.raises(ValueError, match=f"{rule.__name__} goes by the norms of whole layers"):
        ParameterShard(64, lambda flat: rule([flat], lr=0.1))
    with pytest.raises(ValueError, match=f"{rule.__name__} goes by the norms of whole layers"):
        serve(tcp_store(), lambda flat: rule([flat], lr=0.1))


def test_clipping_by_a_part_of_the_gradients_is_refused():
    with pytest.raises(ValueError, match=r"Adagrad has max_grad_norm.*clip in the replicas"):
        ParameterShard(64, lambda flat: Adagrad([flat], lr=0.1, max_grad_norm=1.0))


def half() -> nn.Module:
    return nn.Linear(4, 4).half()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (half, {}, "'weight' is torch.float16 on cpu; .*torch.autocast"),
        (frozen, {}, "no parameter with requires_grad"),
        (batch_norm, {}, r"'1\.running_mean' is a running statistic.*buffers=\"own\""),
        (lambda: model().double(), {"push_codec": Int8()}, "torch.float64, and codecs write fp32"),
    ],
)
def test_models_that_shards_can_not_hold_are_refused(make, options, text: str):
    module = make()
    places = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ValueError, match=text):
        VirtualTime(
            lambda: module,
            gradient,
            sgd(0.1),
            [VirtualWorker(steps=1)],
            config=DownpourConfig(**options),
        ).run()
    assert [p.data_ptr() for p in module.parameters()] == places


def test_buffers_may_be_each_replica_s_own():
    def step(module: nn.Module, worker: int, number: int) -> None:
        module(torch.randn(6, 4)).square().sum().backward()

    virtual = VirtualTime(
        batch_norm,
        step,
        sgd(0.01),
        [VirtualWorker(steps=2)],
        config=DownpourConfig(buffers="own"),
    ).run()
    assert virtual.shards[0].version == 2
    assert int(virtual.clients[0].model[1].num_batches_tracked) == 2


def test_more_shards_than_parts_are_refused():
    with pytest.raises(ValueError, match=r"shards is 50, .* give 7 shards"):
        VirtualTime(model, gradient, sgd(0.1), [VirtualWorker()], shards=50)


def test_a_run_without_workers_is_refused():
    with pytest.raises(ValueError, match="there are no workers"):
        VirtualTime(model, gradient, sgd(0.1), [])


def push(sequence: int, incarnation: int = 1, **options: int) -> Request:
    return Request(Kind.PUSH, 0, incarnation, sequence=sequence, **options)


def test_a_shard_applies_each_push_once_and_refuses_what_it_must():
    shard = ParameterShard(4, lambda flat: SGD([flat], lr=1.0))
    shard.join(0, 1)
    shard.initialize(torch.zeros(4))
    ones = torch.ones(4)
    assert shard.push(push(1), ones).verdict == Verdict.APPLIED
    assert shard.push(push(1), ones).verdict == Verdict.REPEATED
    assert shard.push(push(2), torch.tensor([1.0, math.nan, 1.0, 1.0])).verdict == (
        Verdict.NOT_FINITE
    )
    assert shard.push(push(3, epoch=1), ones).verdict == Verdict.OLD_EPOCH
    shard.join(0, 2)
    shard.join(0, 1)  # the old process comes back: nothing changes
    assert shard.push(push(3), ones).verdict == Verdict.OLD_INCARNATION
    assert shard.push(Request(Kind.PUSH, 9, 1, sequence=1), ones).verdict == (
        Verdict.OLD_INCARNATION
    )
    assert torch.equal(shard.parameter.detach(), -ones)
    assert shard.version == shard.counts.applied == 1
    assert shard.counts.refused == {"NOT_FINITE": 1, "OLD_EPOCH": 1, "OLD_INCARNATION": 2}
    assert shard.push(push(1, 2), ones).verdict == Verdict.APPLIED


def test_the_rate_is_divided_by_one_plus_the_staleness():
    shard = ParameterShard(
        2, lambda flat: SGD([flat], lr=1.0), config=ShardConfig(rate_by_staleness=True)
    )
    shard.join(0, 1)
    shard.initialize(torch.zeros(2))
    for sequence, seen in ((1, 0), (2, 1), (3, 0)):
        shard.push(push(sequence, seen=seen), torch.ones(2))
    assert shard.parameter.tolist() == pytest.approx([-(1 + 1 + 1 / 3)] * 2)
    assert shard.optimizer.param_groups[0]["lr"] == 1.0


def test_a_state_goes_on_bit_for_bit_and_that_of_another_model_is_refused():
    shard, other = (ParameterShard(5, adagrad(0.1)) for _ in range(2))
    shard.join(0, 1)
    shard.initialize(torch.zeros(5))
    for sequence in (1, 2, 3):
        if sequence == 3:
            other.load_state_dict(shard.state_dict())
            other.join(0, 1)
            other.push(push(3), torch.arange(5.0))
        shard.push(push(sequence), torch.arange(5.0))
    assert torch.equal(shard.parameter, other.parameter)
    assert (other.version, other.members[0].known) == (3, 3)
    # A shard that was killed may have served so many pushes behind its snapshot.
    again = ParameterShard(5, adagrad(0.1), config=ShardConfig(snapshot_every=7))
    again.load_state_dict(shard.state_dict(), restarted=True)
    assert again.version == 3 + 7
    with pytest.raises(ValueError, match=r"the state has \(5,\) parameters .* this shard \(6,\)"):
        ParameterShard(6, adagrad(0.1)).load_state_dict(shard.state_dict())


def test_numbers_are_finite_though_their_sum_is_not():
    large = torch.full((64,), 3e38)
    assert not large.sum().isfinite()
    assert all_finite(large)
    large[:32] *= -1
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not all_finite(torch.cat([large, torch.tensor([bad])]))
    assert not all_finite(torch.tensor([float("inf"), float("-inf")]))


def test_a_fetch_behind_a_push_waits_for_it_whatever_becomes_of_it():
    """Applied or refused; that of another replica does not count."""
    shard = ParameterShard(4, lambda flat: SGD([flat], lr=1.0))
    shard.join(0, 1)
    shard.join(1, 1)
    shard.initialize(torch.zeros(4))
    behind = [Request(Kind.FETCH, 0, 1, after=number) for number in (0, 1, 2)]
    assert [shard.ready(fetch) for fetch in behind] == [True, False, False]
    shard.push(Request(Kind.PUSH, 1, 1, sequence=1), torch.ones(4))
    assert [shard.ready(fetch) for fetch in behind] == [True, False, False]
    shard.push(push(1), torch.ones(4))
    assert [shard.ready(fetch) for fetch in behind] == [True, True, False]
    shard.push(push(2), torch.full((4,), math.nan))
    assert all(shard.ready(fetch) for fetch in behind)
