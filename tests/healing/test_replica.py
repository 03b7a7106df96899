"""Replicas that are processes, of which one is killed in a step and another comes: the losses are
those of one process, and the states have the same bits everywhere."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm import CommunicationError
from pyops.data_parallel import DataParallel
from pyops.healing import HealingDataParallel, Part, QuorumConfig, StateLostError
from pyops.healing import replica as healing
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.healing.living import (
    STEPS,
    adam,
    die,
    net,
    one_process,
    quorum_config,
    reached,
    squares,
    stores,
    until_somebody_waits,
)
from tests.workers import spawn_worlds

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

KILLED_AT = 2
VICTIM, NEWCOMER = 1, 3
# Where the victim is killed, or what else happens then; and the ranks that live to the end.
MOMENTS = {
    "forward": (0, 2, NEWCOMER),
    "backward": (0, 2, NEWCOMER),
    "between buckets": (0, 2, NEWCOMER),
    "optimizer": (0, 2, NEWCOMER),
    "half applied": (0, 2, NEWCOMER),
    "two at once": (0, NEWCOMER),
    "another while they agree": (0, NEWCOMER),
    "another once they agreed": (0, NEWCOMER),
    "the newcomer before it joins": (0, 2),
    "the newcomer while it takes the state": (0, 2),
}
IN_FORWARD = set(MOMENTS) - {"backward", "between buckets", "optimizer", "half applied"}


def run(rank: int, group: object, port: int, moment: str) -> Any:
    """A replica's life: (losses by step, values and states at the end, sizes by step)."""
    dist.destroy_process_group()
    store = reached(port)
    if rank == NEWCOMER:
        store.wait(["healed"])
    elif rank:
        store.wait([f"made {rank - 1}"])
    model = net(rank)
    optimizer = adam(model)
    healing.DataParallel = partial(DataParallel, bucket_bytes=64)  # type: ignore[misc, assignment]
    replica = HealingDataParallel(model, optimizer, store, config=quorum_config(3))
    store.set(f"made {rank}", "1")
    losses, sizes = {}, {}
    take = optimizer.step

    def compute(module: nn.Module, part: Part) -> tuple[Tensor, int]:
        sizes[part.step] = part.size
        if part.step > KILLED_AT and not rank:
            store.set("healed", "1")
        killed = part.step == KILLED_AT and (
            rank == VICTIM or (rank == 2 and moment == "two at once")
        )
        if killed and moment in IN_FORWARD:
            die()
        loss, rows = squares(module, part)
        if killed and moment == "backward":
            loss.register_hook(die)
        if killed and moment == "between buckets":  # its gradient is the last
            model[0].weight.register_hook(die)
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
    if rank == NEWCOMER and moment == "the newcomer before it joins":
        replica._begin = die  # type: ignore[method-assign, assignment]
    if rank == NEWCOMER and moment == "the newcomer while it takes the state":
        healing.send_state = lambda *_, group, **__: (  # type: ignore[assignment]
            dist.broadcast_object_list([None], group=group, group_src=0),
            die(),
        )
    while replica.steps < STEPS:
        if replica.steps == KILLED_AT and rank == 2:
            if moment == "another while they agree":
                replica.quorum._closed = die  # type: ignore[method-assign, assignment]
            if moment == "another once they agreed":
                replica.quorum._join = die  # type: ignore[method-assign, assignment]
        alone = sizes.get(replica.steps - 1) != 3  # the newcomer is not there yet
        if replica.steps == STEPS - 3 and rank != NEWCOMER and alone and not store.check(["seen"]):
            until_somebody_waits(replica.quorum)
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
    expected, _ = one_process()
    served = stores(len(moments))
    cases = [(store.port, moment) for store, moment in zip(served, moments, strict=True)]
    for moment, outcomes in zip(moments, spawn_worlds(4, run, cases, timeout=240), strict=True):
        assert outcomes[VICTIM].exitcode == -signal.SIGKILL, (moment, outcomes[VICTIM])
        left = MOMENTS[moment]
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
        if NEWCOMER in left:
            assert min(outcomes[NEWCOMER].result[0]) > KILLED_AT


def test_losses_are_those_of_one_process_though_a_replica_is_killed():
    check(("half applied",))


@pytest.mark.full
def test_losses_are_those_of_one_process_wherever_a_replica_is_killed():
    moments = tuple(MOMENTS)
    check(moments[:5])
    check(moments[5:])


def alone(store: dist.Store) -> HealingDataParallel:
    model = net(0)
    config = QuorumConfig(lease=0.2, timeout=5.0)
    return HealingDataParallel(model, adam(model), store, config=config)


def test_a_newcomer_to_a_run_that_is_over_does_not_begin_it_anew():
    store = dist.HashStore()
    first = alone(store)
    first.step(squares)
    first.close()
    with pytest.raises(StateLostError, match=r"has taken 1 steps, and none .* \(0 steps\)"):
        alone(store).step(squares)
    assert not dist.is_initialized()


def test_a_step_that_always_fails_ends_though_nobody_is_lost():
    calls = []

    def compute(module: nn.Module, part: Part) -> tuple[Tensor, int]:
        calls.append(part)
        raise CommunicationError("too slow")

    with pytest.raises(CommunicationError, match=r"0 failed 3 times, though .*\[1\].*too slow"):
        alone(dist.HashStore()).step(compute)
    assert len(calls) == 3
    assert not dist.is_initialized()


def test_without_the_store_a_replica_ends():
    served = stores(1)
    replica = alone(dist.TCPStore("127.0.0.1", served[0].port, is_master=False))
    replica.step(squares)
    served.clear()
    with pytest.raises(CommunicationError, match=r"store in which replicas meet is gone"):
        replica.step(squares)
    assert not dist.is_initialized()


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
