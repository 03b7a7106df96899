"""Replicas that are processes, and replicas of several processes: the numbers of virtual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pyops.comm import CommunicationError, Communicator
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import run_replicas
from pyops.optim import SGD, AdamW
from pyops.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.local_sgd.replicas import adam, batch, model, run, sgd, train, values

pytestmark = pytest.mark.cpu_only

CONFIGS = [
    LocalSGDConfig(method="local_sgd", every=2),
    LocalSGDConfig(every=4, fragments=2, delay=1, codec="int8", keep_local=0.25),
    LocalSGDConfig(method="easgd", every=2, codec="int4"),
]


def over_group(rank, group, config: LocalSGDConfig, steps: int) -> Any:
    net = model(seed=rank)
    optimizer = adam(net)
    outer = LocalSGD(net, optimizer, config, group=group)
    before = Communicator.of(group).bytes_sent
    for step in range(1, steps + 1):
        train(net, optimizer, rank, step)
        outer.step()
    outer.finish()
    return values(net), outer.rounds, Communicator.of(group).bytes_sent - before


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_processes_compute_what_virtual_replicas_do(world, config):
    found = world(2).run(over_group, config, 8)
    expected = run(2, config, 8)
    for (mine, rounds, _), (theirs, outer) in zip(found, expected, strict=True):
        assert rounds == outer.rounds == 4
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(found[0][0][0], model()[0].weight)


def sent_over_group(rank, group, codec: str) -> float:
    net = nn.Linear(200, 200)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    outer = LocalSGD(net, optimizer, LocalSGDConfig(every=4, codec=codec), group=group)
    before = Communicator.of(group).bytes_sent
    for _ in range(40):
        outer.step()
    return Communicator.of(group).bytes_sent - before


@pytest.mark.parametrize(("codec", "nbytes"), [("none", 4.0), ("int8", 1 + 4 / 256)])
def test_bytes_of_ten_periods_are_ten_messages(world, codec, nbytes):
    expected = 10 * 2 * (2 - 1) / 2 * nbytes * (200 * 200 + 200)
    for sent in world(2).run(sent_over_group, codec):
        assert sent == pytest.approx(expected, rel=0.02)


def buffers_and_states(rank, group) -> Any:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    net.register_buffer("table", torch.full((2,), 1 / 3), persistent=False)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    config = LocalSGDConfig(method="local_sgd", every=2, states="average")
    outer = LocalSGD(net, optimizer, config, group=group)
    for step in range(2):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * rank + step)) + rank
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = net[0].running_mean.clone()
        moment = optimizer.state[net[1].weight]["exp_avg"].clone()
        outer.step()
    after = net[0].running_mean, optimizer.state[net[1].weight]["exp_avg"], net.table
    return own, moment, *after


def test_buffers_and_states_become_their_means_and_computed_buffers_stay(world):
    a, b = world(2).run(buffers_and_states)
    assert not torch.equal(a[0], b[0])
    for number in (0, 1):
        expected = (a[number] + b[number]) / 2
        torch.testing.assert_close(a[2 + number], expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(a[2 + number], b[2 + number])
    assert torch.equal(a[4], torch.full((2,), 1 / 3))


def of_two_ranks_each(rank, group, stage: int, dtype: torch.dtype, config: LocalSGDConfig) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    own = mesh["dp"].get_group()
    net = model(seed=rank).to(dtype)
    zero = ZeroConfig(stage=stage, units=[net[0], net[2], net[4]] if stage == 3 else None)
    make, lr = (SGD, 0.1) if dtype == torch.float32 else (AdamW, 1e-2)
    optimizer = ZeroOptimizer(net, make, zero, group=own, lr=lr)
    outer = LocalSGD(net, optimizer, config, mesh=mesh, within=own)
    for step in range(1, 7):
        x, y = batch(rank // 2, step, dtype)
        half = slice(0, 3) if rank % 2 == 0 else slice(3, 6)
        (net(x[half]) - y[half]).square().mean().backward()
        optimizer.step()
        outer.step()
    with optimizer.whole_parameters():
        found = values(net)
    optimizer.close()
    return found


STREAMED = LocalSGDConfig(every=3, fragments=3)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32)]
)
def test_replicas_may_share_out_their_own_states_and_parameters(world, stage, dtype):
    config = STREAMED if dtype == torch.float32 else LocalSGDConfig(every=3)
    found = world(4).run(of_two_ranks_each, stage, dtype, config)
    for other in found[1:]:  # six steps end with a meeting of the last fragment
        assert all(torch.equal(a, b) for a, b in zip(found[0][4:], other[4:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    if dtype != torch.float32:
        assert not torch.equal(found[0][0].float(), model()[0].weight)
        return

    alone = run(2, config, 6, make=sgd)
    for replica in (0, 1):
        for a, b in zip(found[2 * replica], alone[replica][0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def whole_values(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=random) / 2 for n in ((8, 5), (8,), (3, 8), (3,))]


def learn(net: nn.Module, outer: LocalSGD, optimizer: Any, replica: int) -> list[torch.Tensor]:
    for step in range(1, 7):
        train(net, optimizer, replica, step)
        outer.step()
    return values(net)


def of_tensor_parallel_ranks(rank, group, config: LocalSGDConfig) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    tp = mesh["tp"].get_group()
    net = nn.Sequential(
        ColumnParallelLinear(5, 8, group=tp), nn.Tanh(), RowParallelLinear(8, 3, group=tp)
    )
    part = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
    whole = whole_values(rank // 2)
    own = [whole[0][part], whole[1][part], whole[2][:, part], whole[3]]
    with torch.no_grad():
        for p, value in zip(net.parameters(), own, strict=True):
            p.copy_(value)
    optimizer = sgd(net)
    outer = LocalSGD(net, optimizer, config, mesh=mesh, within=tp)
    return learn(net, outer, optimizer, rank // 2)


@pytest.mark.parametrize("config", [LocalSGDConfig(every=3), LocalSGDConfig("local_sgd", every=2)])
def test_replicas_may_be_tensor_parallel(world, config):
    def body(replica):
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for p, value in zip(net.parameters(), whole_values(replica.number), strict=True):
                p.copy_(value)
        optimizer = sgd(net)
        outer = LocalSGD(net, optimizer, config, group=replica.exchange)
        return learn(net, outer, optimizer, replica.number)

    found = world(4).run(of_tensor_parallel_ranks, config)
    for replica, expected in enumerate(run_replicas(2, body)):
        first, second = found[2 * replica], found[2 * replica + 1]
        joined = [
            torch.cat([first[0], second[0]]),
            torch.cat([first[1], second[1]]),
            torch.cat([first[2], second[2]], 1),
            first[3],
        ]
        for a, b in zip(joined, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert not torch.equal(joined[0], whole_values(0)[0])


def one_rank_fails(rank, group) -> Any:
    """The first ranks of two replicas cannot exchange: their other ranks hear of it and write
    nothing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    net = nn.Linear(3, 2)
    optimizer = sgd(net)
    config = LocalSGDConfig("local_sgd", every=1)
    outer = LocalSGD(net, optimizer, config, mesh=mesh, within=mesh["tp"].get_group())
    begin = outer.exchange.begin_mean

    def failing(flat: torch.Tensor, **options: Any) -> Any:
        if rank % 2 == 0:
            raise CommunicationError("the link is down")
        return begin(flat, **options)

    outer.exchange.begin_mean = failing  # type: ignore[method-assign]
    with torch.no_grad():
        net.weight.fill_(float(rank))
    with pytest.raises(CommunicationError, match="the link is down"):
        outer.step()
    assert torch.equal(net.weight, torch.full_like(net.weight, rank))
    return outer.rounds


def test_an_exchange_that_fails_for_one_rank_of_a_replica_fails_for_all(world):
    assert world(4).run(one_rank_fails) == [0] * 4
