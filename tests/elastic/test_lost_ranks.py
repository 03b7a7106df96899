"""Ranks that wait and ranks that die: who is idle sleeps, and every rank hears of a lost one, wherever it stands."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch
from torch import nn

from pyops.comm import CommunicationError
from pyops.comm.transport import ProcessGroupTransport
from pyops.elastic import Active, Layout, agree_on, carry, giving_up, message_group
from pyops.pipeline import Pipeline, schedule
from tests.elastic.test_transition import states_of
from tests.workers import spawn_ranks

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
    message = message_group()
    layout = Layout(4, 2, 1, (0, 1, 2), 0, 2)
    active = Active(layout, message=message)
    if layout.is_active(rank):
        layers = [nn.Linear(8, 8) for _ in range(2)]
        plan = schedule("1f1b", num_stages=2, num_microbatches=2)
        pipeline = Pipeline(layers, schedule=plan, group=active.pipeline, loss=nn.functional.mse_loss)
        x = torch.randn(4, 8)
        pipeline.step(x, x)
        if rank == 1:
            time.sleep(SECONDS)
            os._exit(7)

        def step():
            with giving_up(message):
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
    """Rank 0 gives eight layers on to 1, 1 to 2, 2 to 3, and has the rest from the others; the victim dies amidst that."""
    old, new = Layout(4, 4, 1, (0, 8, 9, 10, 11)), Layout(4, 1, 4, (0, 11))
    post, posts = ProcessGroupTransport.post, []

    def counting(self, sends, receives):
        posts.append(1)
        if rank == victim and len(posts) == 5:
            os._exit(7)
        return post(self, sends, receives)

    ProcessGroupTransport.post = counting
    return caught(lambda: carry(states_of(old)[rank], old, new, group=group))


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_that_dies_while_layers_are_carried(victim):
    outcomes = spawn_ranks(4, carry_body, victim, timeout=60, group_timeout=20.0)
    assert outcomes[victim].exitcode == 7
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.error
            message, ranks = outcome.result
            assert ranks == (victim,), (outcome.rank, message)
