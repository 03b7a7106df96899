"""Ranks that wait and ranks that die: who is idle sleeps, and every rank hears of a lost one,
wherever it stands."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops import failure
from pyops.comm import CommunicationError
from pyops.comm.collectives.transport import ProcessGroupTransport
from pyops.elastic import (
    Bound,
    Layout,
    LayoutGroups,
    abort_on_failure,
    agree_on,
    carry,
    make_control_group,
)
from pyops.elastic.layout import process_groups
from pyops.pipeline import Pipeline, schedule
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.elastic.layout.test_layer_moves import states_of
from tests.grids import full
from tests.workers import spawn_ranks, spawn_worlds

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

SECONDS = 2.0


def caught(call) -> tuple[str, tuple[int, ...]]:
    try:
        call()
    except CommunicationError as error:
        return str(error), error.ranks
    raise AssertionError("nothing was raised")


def idle_body(rank, group):
    """Ranks 0 and 1 train, 2 and 3 wait for a decision; rank 1 dies in its second step."""
    failure.PATIENCE = 6.0  # seconds for the note of the rank that has died
    message = make_control_group()
    layout = Layout(4, 2, 1, (0, 1, 2), 0, 2)
    active = LayoutGroups(layout, control_group=message)
    if layout.is_active(rank):
        layers = [nn.Linear(8, 8) for _ in range(2)]
        plan = schedule("1f1b", num_stages=2, num_microbatches=2)
        pipeline = Pipeline(
            layers, schedule=plan, group=active.pp_group, loss=nn.functional.mse_loss
        )
        x = torch.randn(4, 8)
        pipeline.step(x, x)
        if rank == 1:
            time.sleep(SECONDS)
            os._exit(7)

        def step():
            with abort_on_failure(message):
                pipeline.step(x, x)

        return 0.0, *caught(step)
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.monotonic()
    error = caught(lambda: agree_on(1, message))
    assert time.monotonic() - begin > SECONDS / 2
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, *error


def test_idle_ranks_sleep_and_hear_of_a_rank_that_died_elsewhere():
    outcomes = spawn_ranks(4, idle_body, timeout=60, group_timeout=20.0)
    assert outcomes[1].exitcode == 7
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.error is None, outcome.error
        seconds, message, ranks = outcome.result
        assert ranks == (1,), (outcome.rank, message)
        assert "rank 1 died or stalled" in message
        assert seconds < SECONDS / 4, "an idle rank burns the processor"


def carry_body(rank, group, victim):
    """Rank 0 gives eight layers on to 1, 1 to 2, 2 to 3, and has the rest from the others; the
    victim dies amidst that."""
    old, new = Layout(4, 4, 1, (0, 8, 9, 10, 11)), Layout(4, 1, 4, (0, 11))
    post, posts = ProcessGroupTransport.post, []

    def counting(self, sends, receives):
        posts.append(1)
        if rank == victim and len(posts) == 5:
            os._exit(7)
        return post(self, sends, receives)

    ProcessGroupTransport.post = counting
    return caught(lambda: carry(states_of(old)[rank], old, new, group=group))


@pytest.mark.parametrize("victim", [1, full(3)])
def test_a_rank_that_dies_while_layers_are_carried(victim):
    outcomes = spawn_ranks(4, carry_body, victim, timeout=60, group_timeout=20.0)
    assert outcomes[victim].exitcode == 7
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.error
            message, ranks = outcome.result
            assert ranks == (victim,), (outcome.rank, message)


# --------------------------------------------------------------------------------------------------
# an elastic run

TIMEOUT = 4.0  # seconds, of the default group; idle ranks would wait for a day


def wait_until_all_heard(ranks: int) -> None:
    """For ever, if one of the others does not hear of it: the test's own timeout ends that."""
    store = dist.distributed_c10d._get_default_store()
    while sum(store.check([f"heard {rank}"]) for rank in range(ranks)) < ranks - 1:
        time.sleep(0.1)


def lost_body(rank, group, place, victim, replicate):
    """What each rank hears of the victim, which dies or hangs at this place in a run of four
    stages, then of two."""
    failure.PATIENCE, process_groups.GRACE = 1.0, 3.0
    made = []

    def optimizer(named):
        if place == "hangs in a change" and rank == victim and made:
            wait_until_all_heard(4)
            os._exit(7)
        made.append(1)
        return networks.optimizer(named)

    def rows_of(share):
        if place == "dies in scoring" and rank == victim:
            os._exit(7)
        return *networks.rows(share.samples, held_out=True), {}

    elastic = make_elastic(
        networks.layers(6),
        optimizer=optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=4,
        policy=Bound(1 / 3),
        replicate=replicate,
    )
    for decisions in range(3):
        for share in elastic.shares():
            elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
        if decisions == (0 if place == "hangs in a change" else 2):
            break
        elastic.decide()
    if place != "hangs in a change":
        assert [elastic.layout.is_active(each) for each in range(4)] == [
            True,
            True,
            replicate,
            replicate,
        ]
    if place == "hangs before a decision" and rank == victim:
        wait_until_all_heard(4)
    if place.endswith("before a decision") and rank == victim:
        os._exit(7)
    if place == "dies in scoring":
        heard = caught(lambda: elastic.evaluate(networks.HELD_OUT, rows_of, score=networks.right))
    else:
        heard = caught(elastic.decide)
    dist.distributed_c10d._get_default_store().set(f"heard {rank}", "")
    wait_until_all_heard(4)  # the end of a process would tell others
    return heard


@pytest.mark.parametrize(
    "cases",
    [
        [("dies in scoring", 0, False), ("hangs in a change", 3, False)],
        # an idle rank
        full([("dies before a decision", 1, True), ("hangs before a decision", 2, False)]),
        full([("dies in scoring", 0, True), ("hangs before a decision", 0, True)]),
        full([("hangs before a decision", 0, False)]),  # a rank at work
    ],
    ids=str,
)
def test_all_ranks_of_a_run_hear_of_one_that_is_lost(cases):
    """In two worlds at a time: ranks that hang, or wait for one that does, compute nothing."""
    worlds = spawn_worlds(4, lost_body, cases, timeout=50, group_timeout=TIMEOUT)
    for case, outcomes in zip(cases, worlds, strict=True):
        victim = case[1]
        for outcome in outcomes:
            if outcome.rank != victim:
                assert outcome.error is None, (case, outcome.error)
                message, ranks = outcome.result
                assert ranks == (victim,), (case, outcome.rank, message)
                assert f"rank {victim} died or stalled" in message
