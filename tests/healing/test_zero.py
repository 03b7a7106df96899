"""ZeRO whose ranks are killed and replaced: the losses are those of one process, wherever the rank
dies, and two neighbors at once are an error on all."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.healing import HealingZero, Part, StateLostError
from pyops.healing import zero as healing
from pyops.onebit import OneBitConfig
from pyops.optim import AdamW, OneBitAdam
from pyops.zero import ZeroConfig
from tests.healing.living import (
    STEPS,
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

START, NEWCOMER, KILLED_AT = 4, 4, 3
# What happens when: the ranks that live to the end. Ranks 1 and, last, others, are killed.
MOMENTS: dict[str, tuple[int, ...]] = {
    "backward": (0, 2, 3, NEWCOMER),
    "copying": (0, 2, 3, NEWCOMER),
    "publishing": (0, 2, 3, NEWCOMER),
    "every third step is copied": (0, 2, 3, NEWCOMER),
    "stage 0": (1, 2, 3, NEWCOMER),
    "another while they share out": (0, 2, NEWCOMER),
    "making the optimizer anew": (0, 2, NEWCOMER),
    "in the last step": (0, 2, 3),
    "two neighbors": (),
}
COPY_EVERY = {"every third step is copied": 3}
KILLED = {"every third step is copied": 5, "in the last step": STEPS - 1}


def run(rank: int, group: object, port: int, moment: str) -> Any:
    """A replica's life: (losses by step, values at the end, sizes by step)."""
    dist.destroy_process_group()
    store, killed_at = reached(port), KILLED.get(moment, KILLED_AT)
    joins = NEWCOMER in MOMENTS[moment]
    if rank == NEWCOMER:
        if not joins:
            return None
        store.wait(["healed"])
    elif rank:
        store.wait([f"made {rank - 1}"])
    stage, victim = (0, 0) if moment == "stage 0" else (1, 1)
    model = net(rank)
    replica = HealingZero(
        model,
        torch.optim.AdamW,
        store,
        ZeroConfig(stage=stage, bucket_bytes=128),
        config=quorum_config(START, COPY_EVERY.get(moment, 1)),
        lr=0.05,
        weight_decay=0.1,
    )
    store.set(f"made {rank}", "1")
    losses: dict[int, float] = {}
    sizes: dict[int, int] = {}

    def compute(module: nn.Module, part: Part) -> tuple[Tensor, int]:
        sizes[part.step] = part.size
        if part.step > killed_at and rank == 2:
            store.set("healed", "1")
        loss, rows = squares(module, part)
        killed = part.step == killed_at and (
            rank == victim or (moment == "two neighbors" and rank == 2)
        )
        if killed and moment in ("publishing", "in the last step"):
            assert replica.optimizer is not None
            replica.optimizer.arriving.start = die  # type: ignore[method-assign]
        elif killed:
            loss.register_hook(die)
        return loss, rows

    while replica.steps < STEPS:
        if replica.steps == killed_at:
            if moment == "copying" and rank == victim:
                replica._copies._pass_on = die  # type: ignore[method-assign]
            if moment == "another while they share out" and rank == 3:
                replica._copies.recover = die  # type: ignore[method-assign, assignment]
            if moment == "making the optimizer anew" and rank == 3:
                healing.ZeroOptimizer._own = die  # type: ignore[method-assign]
        alone = sizes.get(replica.steps - 1) != len(MOMENTS[moment])
        if replica.steps == STEPS - 2 and rank != NEWCOMER and joins and alone:
            until_somebody_waits(replica.quorum)
        loss = replica.step(compute)
        losses[replica.steps - 1] = loss
    replica.close()
    return losses, [p.detach() for p in model.parameters()], sizes


def check(moments: tuple[str, ...]) -> None:
    expected, parameters = one_process()
    served = stores(len(moments))
    cases = [(store.port, moment) for store, moment in zip(served, moments, strict=True)]
    for moment, outcomes in zip(moments, spawn_worlds(5, run, cases, timeout=240), strict=True):
        left = MOMENTS[moment]
        if not left:
            for rank in (0, 3):
                error = outcomes[rank].error or ""
                assert StateLostError.__name__ in error, (moment, rank, outcomes[rank])
                assert "states of step 3 that ranks [1] of 4 had are lost" in error, error
            continue
        for rank, outcome in enumerate(outcomes):
            if rank not in left and rank != NEWCOMER:
                assert outcome.exitcode == -signal.SIGKILL, (moment, outcome)
        for rank in left:
            assert outcomes[rank].error is None, (moment, rank, outcomes[rank].error)
            losses, values, sizes = outcomes[rank].result
            steps = sorted(losses)
            found = torch.tensor([losses[step] for step in steps], dtype=torch.float64)
            wanted = torch.tensor([expected[step] for step in steps], dtype=torch.float64)
            assert torch.allclose(found, wanted, rtol=1e-10, atol=0), (moment, rank, found, wanted)
            assert steps[-1] == STEPS - 1
            assert sizes[STEPS - 1] == len(left), (moment, sizes)
            for mine, other, alone in zip(
                values, outcomes[left[0]].result[1], parameters, strict=True
            ):
                assert torch.equal(mine, other), (moment, rank)
                assert torch.allclose(mine, alone, rtol=1e-10, atol=1e-14), (moment, rank)


def test_losses_are_those_of_one_process_though_a_rank_with_states_is_killed():
    check(("publishing",))


@pytest.mark.full
def test_losses_are_those_of_one_process_wherever_a_rank_with_states_is_killed():
    moments = tuple(MOMENTS)
    check(moments[:5])
    check(moments[5:])


def test_what_cannot_be_healed_is_refused():
    store, model = dist.HashStore(), net(0)
    for options, message in (
        ({"stage": 2}, "HealingZero: stage is 2, which spreads"),
        ({"stage": 3}, "HealingZero: stage is 3, which spreads"),
        ({"stage": 1, "offload": "cpu"}, "HealingZero: offload is 'cpu', whose"),
        ({"stage": 1, "symmetric_step": True}, "HealingZero: symmetric_step is True"),
    ):
        with pytest.raises(ValueError, match=message):
            HealingZero(model, AdamW, store, ZeroConfig(**options), lr=0.1)
    with pytest.raises(ValueError, match="copy_every is 0"):
        quorum_config(1, copy_every=0)
    model = net(0).float()
    one_bit = partial(OneBitAdam, config=OneBitConfig(warmup_steps=1), lr=0.1)
    replica = HealingZero(model, one_bit, store, config=quorum_config(1))
    with pytest.raises(ValueError, match="1 bit"):
        replica.step(squares)
    assert not dist.is_initialized()
