"""Replicas that are processes, of which one is killed in a step and another comes: the losses are
those of one process, and the states have the same bits everywhere."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm import CommunicationError
from pyops.healing import HealingDataParallel, Part, QuorumConfig
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.workers import spawn_worlds

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

ROWS, STEPS, KILLED_AT = 7, 9, 2
VICTIM, NEWCOMER = 1, 3
CONFIG = QuorumConfig(start_replicas=3, lease=3.0, timeout=15.0, meeting_timeout=60.0)
# Where the victim is killed; in the last, also the newcomer, while it joins.
MOMENTS = ("forward", "backward", "optimizer", "half applied", "joining")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 4, generator=draws, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def squares(module: nn.Module, part: Part) -> tuple[Tensor, int]:
    rows = part.rows(ROWS)
    inputs, targets = batch(part.step)
    error = module(inputs[rows]) - targets[rows]
    return error.square().sum(), len(inputs[rows])


def one_process() -> list[float]:
    model = net(0)
    optimizer = adam(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = squares(model, Part(step, 0, 1))[0] / ROWS
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int, group: object, port: int, moment: str) -> Any:
    """A replica's life: (losses by step, values and states at the end, sizes by step)."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    if rank == NEWCOMER:
        store.wait(["healed"])
    elif rank:
        store.wait([f"made {rank - 1}"])
    model = net(rank)
    optimizer = adam(model)
    replica = HealingDataParallel(model, optimizer, store, config=CONFIG)
    store.set(f"made {rank}", "1")
    losses, sizes = {}, {}
    take = optimizer.step

    def compute(module: nn.Module, part: Part) -> tuple[Tensor, int]:
        sizes[part.step] = part.size
        if part.step > KILLED_AT and not rank:
            store.set("healed", "1")
        if rank == VICTIM and part.step == KILLED_AT and moment in ("forward", "joining"):
            die()
        loss, rows = squares(module, part)
        if rank == VICTIM and part.step == KILLED_AT and moment == "backward":
            loss.register_hook(lambda _: die())
        return loss, rows

    def step(*arguments: Any) -> Any:
        if replica.steps == KILLED_AT and moment in ("optimizer", "half applied"):
            if rank == VICTIM:
                die()
            if rank == 0 and moment == "half applied" and not hasattr(replica, "gave_up"):
                replica.gave_up = True  # type: ignore[attr-defined]
                raise CommunicationError("came to this rank alone")
        return take(*arguments)

    optimizer.step = step  # type: ignore[method-assign]
    if rank == NEWCOMER and moment == "joining":
        replica._begin_alike = lambda _: die()  # type: ignore[method-assign, assignment]
    while replica.steps < STEPS:
        if replica.steps == STEPS - 3 and rank in (0, 2) and not store.check(["seen"]):
            until = time.monotonic() + 90
            while not replica.quorum.somebody_waits() and time.monotonic() < until:
                time.sleep(0.02)
        now = replica.steps
        loss = replica.step(compute)
        losses[max(now, replica.steps - 1)] = loss
        if max(sizes) >= STEPS - 3:
            store.set("seen", "1")
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    replica.close()
    values = [p.detach() for p in model.parameters()]
    return losses, [*values, *(v for v in states if isinstance(v, Tensor))], sizes


def check(moments: tuple[str, ...]) -> None:
    expected = one_process()
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in moments
    ]
    cases = [(store.port, moment) for store, moment in zip(stores, moments, strict=True)]
    for moment, outcomes in zip(moments, spawn_worlds(4, run, cases, timeout=240), strict=True):
        assert outcomes[VICTIM].exitcode == -signal.SIGKILL, (moment, outcomes[VICTIM])
        left = [0, 2] if moment == "joining" else [0, 2, NEWCOMER]
        for rank in left:
            assert outcomes[rank].error is None, (moment, rank, outcomes[rank].error)
        states = [outcomes[rank].result[1] for rank in left]
        for other in states[1:]:
            assert len(other) == len(states[0]) > 4
            assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True)), moment
        for rank in left:
            losses, _, sizes = outcomes[rank].result
            found = torch.tensor([losses[step] for step in sorted(losses)], dtype=torch.float64)
            wanted = torch.tensor([expected[step] for step in sorted(losses)], dtype=torch.float64)
            assert torch.allclose(found, wanted, rtol=1e-10, atol=0), (moment, rank, found, wanted)
            assert sizes[STEPS - 1] == len(left), (moment, sizes)
        if moment != "joining":
            assert min(outcomes[NEWCOMER].result[0]) > KILLED_AT


def test_losses_are_those_of_one_process_though_a_replica_is_killed():
    check(("half applied",))


@pytest.mark.full
def test_losses_are_those_of_one_process_wherever_a_replica_is_killed():
    check(MOMENTS)


def test_what_cannot_be_healed_is_refused():
    model = net(0)
    store = dist.HashStore()
    with pytest.raises(ValueError, match=r"ZeroOptimizer, which.*spread"):
        zero = ZeroOptimizer(net(1).float(), AdamW, ZeroConfig(stage=1), lr=0.1)
        HealingDataParallel(model, zero, store)
    with pytest.raises(ValueError, match="not the model's"):
        HealingDataParallel(model, adam(net(1)), store)
    with pytest.raises(ValueError, match="steps is -1"):
        HealingDataParallel(model, adam(model), store, steps=-1)
    with pytest.raises(ValueError, match="min_replicas is 0"):
        QuorumConfig(min_replicas=0)
    with pytest.raises(ValueError, match="meeting_timeout is 30"):
        QuorumConfig(meeting_timeout=30.0)
