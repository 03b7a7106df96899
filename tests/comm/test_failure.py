"""A rank that dies or stalls: every other rank gets an error within the timeout that names rank,
collective and bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm import CommunicationError, all_reduce
from pyops.comm.failure import ranks_without_note
from pyops.ops.library import native
from tests.grids import full
from tests.workers import ROOT, Outcome, spawn_ranks, spawn_worlds

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

GROUP_TIMEOUT = 3.0
VICTIM = 1


def _lose_a_rank(
    rank: int, group: Any, algorithm: str, how: str, async_op: bool
) -> tuple[str, tuple[int, ...], float, str]:
    x = torch.ones(500_000)
    for _ in range(2):
        all_reduce(x, group=group, algorithm=algorithm)
    if rank == VICTIM:
        if how == "dies":
            os._exit(7)
        others = [f"gave up {other}" for other in range(group.size()) if other != VICTIM]
        dist.distributed_c10d._get_default_store().wait(others, timedelta(seconds=50))
    start = time.monotonic()
    try:
        found = all_reduce(
            x, group=group, algorithm=algorithm, label="bucket 3 of 7", async_op=async_op
        )
        if async_op:
            found.wait()
    except CommunicationError as error:
        took = time.monotonic() - start
        dist.distributed_c10d._get_default_store().set(f"gave up {rank}", "")
        try:
            all_reduce(x, group=group, algorithm=algorithm)
        except CommunicationError as second:
            return str(error), error.ranks, took, str(second)
        raise AssertionError("a group that lost a rank went on") from None
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "lost",
    [
        [("two_shot", "dies"), ("shared_memory", "stalls")],
        full([("ring", "dies"), ("ring", "stalls")]),
        full([("shared_memory", "dies"), ("native", "dies")]),
    ],
    ids=str,
)
def test_every_other_rank_names_the_lost_one(lost: list[tuple[str, str]]):
    """In two worlds at a time: who stalls, and who waits for it, computes nothing."""
    if "shared_memory" in dict(lost) and native() is None:
        pytest.skip("built without kernels")
    cases = [(algorithm, how, algorithm == "ring") for algorithm, how in lost]
    worlds = spawn_worlds(4, _lose_a_rank, cases, timeout=60, group_timeout=GROUP_TIMEOUT)
    for (_, how), outcomes in zip(lost, worlds, strict=True):
        check(how, outcomes)


def check(how: str, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.rank == VICTIM and how == "dies":
            assert outcome.exitcode == 7
            continue
        assert outcome.error is None, outcome.error
        message, ranks, took, second = outcome.result
        assert "all_reduce of bucket 3 of 7 (500000 elements of torch.float32" in message
        assert "was not started, after: " in second
        if outcome.rank == VICTIM:
            continue
        assert ranks == (VICTIM,), message
        assert f"rank {VICTIM} died" in message or f"rank {VICTIM} stalled" in message
        assert took < GROUP_TIMEOUT + 6


def _left(before: set[str]) -> list[str]:
    """The names of shared memory which stay: those of tests that run beside this one go at once."""
    names, end = set(os.listdir("/dev/shm")) - before, time.monotonic() + 10
    names = {name for name in names if name.startswith("pyops")}
    while names and time.monotonic() < end:
        time.sleep(0.05)
        names &= set(os.listdir("/dev/shm"))
    return sorted(names)


def _leave_memory_behind(rank: int, group: Any) -> None:
    all_reduce(torch.ones(5), group=group, algorithm="shared_memory")
    os._exit(9)


@pytest.mark.skipif(native() is None, reason="built without kernels")
def test_nothing_is_left_in_dev_shm_after_a_crash():
    before = set(os.listdir("/dev/shm"))
    outcomes = spawn_ranks(2, _leave_memory_behind, timeout=30)
    assert [o.exitcode for o in outcomes] == [9, 9]
    assert _left(before) == []


def _die_before_mapping(rank: int, group: Any) -> list[str]:
    before = set(os.listdir("/dev/shm"))
    if rank == VICTIM:
        os._exit(9)
    with pytest.raises(CommunicationError):
        all_reduce(torch.ones(5), group=group, algorithm="shared_memory")
    return _left(before)


@pytest.mark.skipif(native() is None, reason="built without kernels")
def test_nothing_is_left_in_dev_shm_when_a_rank_never_maps_it():
    first, _ = spawn_ranks(2, _die_before_mapping, timeout=30, group_timeout=GROUP_TIMEOUT)
    assert first.error is None, first.error
    assert first.result == []


SCRIPT = """
import torch, torch.distributed as dist
from pyops.comm import all_reduce
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
work = all_reduce(torch.ones(3), async_op=True)
work.wait()
{end}
print("the end")
"""


# Gloo's threads copy while the process ends, and then let go of tensors that nobody else has.
OPEN = """
import sys
sys.setswitchinterval(60)
held = dist.group.WORLD
for _ in range(6):
    dist.all_gather([torch.empty(1 << 20)], torch.ones(1 << 20), async_op=True)
"""


@pytest.mark.parametrize(
    "end",
    [
        full("dist.destroy_process_group()", id="destroyed"),
        full("all_reduce(torch.ones(1 << 20), async_op=True)", id="pending"),
        pytest.param(OPEN, id="held"),
    ],
)
def test_a_program_ends_when_it_is_at_its_end(end: str):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def _notes_of_two_groups(rank: int, group: Any) -> list[int] | None:
    made = [dist.new_group([0, 1]) for _ in range(2)]
    if rank == 1:
        ranks_without_note(made[0], note="gave up there", grace=0.0)
    dist.barrier(group)
    missing = ranks_without_note(made[1], note="gave up here", grace=0.2) if rank == 0 else []
    dist.barrier(group)
    for each in made:
        dist.destroy_process_group(each)
    dist.distributed_c10d._get_default_store().delete_key(f"pyops/failure/of rank {rank}")
    return missing


def test_a_rank_that_gave_up_in_another_group_is_alive(world):
    assert world(2).run(_notes_of_two_groups) == [[], []]
