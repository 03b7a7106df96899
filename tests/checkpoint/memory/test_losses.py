"""What is lost and what is not: ranks killed anywhere in a save, hosts that are lost or changed, a
memory that is full, and attempts of a run that came to other numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pyops import failure
from pyops.checkpoint import CheckpointError
from pyops.checkpoint.memory import checkpoints, exchange
from pyops.checkpoint.memory.claims import Claim, newest
from tests.checkpoint.memory.tiny_state import (
    RUN,
    check,
    memory_of,
    recover,
    save,
    save_step,
    snapshot,
)
from tests.workers import spawn_worlds

pytestmark = pytest.mark.cpu_only


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(path: Path, tensors: object) -> None:
    path.write_bytes(b"half of a file")
    die()


# Where rank 1 is killed: what is replaced by its death.
MOMENTS: dict[str, Callable[[], Any]] = {
    "before": lambda: mock.patch.object(checkpoints, "prepare", die),
    "own state half written": lambda: mock.patch(
        "pyops.checkpoint.writing.write_tensors", half_written
    ),
    "before its copy is sent": lambda: mock.patch.object(checkpoints, "exchange", die),
    "while its copy is sent": lambda: mock.patch.object(exchange, "_read", die_later()),
    "while it copies": lambda: mock.patch.object(exchange.shutil, "copyfile", die),
    "before it keeps the copy": lambda: mock.patch.object(
        checkpoints, "put_in_place", place_but_once()
    ),
}


def die_later() -> Callable[..., Any]:
    """Read the first piece, and die at the second."""
    inner, read = exchange._read, []

    def call(path: Path, start: int, length: int) -> Any:
        read.append(path)
        return inner(path, start, length) if len(read) == 1 else die()

    return call


def place_but_once() -> Callable[..., Any]:
    """Put the own snapshot in place, and die when it is the neighbor's turn."""
    inner, placed = checkpoints.put_in_place, []

    def call(aside: Path, folder: Path) -> None:
        placed.append(folder)
        inner(aside, folder) if len(placed) == 1 else die()

    return call


def save_and_die(rank: int, group: object, folder: Path, moment: str) -> None:
    # Seconds for the notes of the only other rank, which was killed and leaves none.
    failure.PATIENCE = failure.GRACE = 0.5
    memory = memory_of(rank, folder, by_messages="sent" in moment)
    for step in (10, 20):
        save_step(memory, step, rank)
    with MOMENTS[moment]() if rank == 1 else contextlib.nullcontext():
        save_step(memory, 30, rank)


def test_a_rank_killed_in_a_save_leaves_a_step_that_all_have(world, tmp_path):
    # The step that is there then: where both hosts are left, and where one of them is lost.
    expected = {
        "before": (20, 20, 20),
        "own state half written": (20, 20, 20),
        "before its copy is sent": (30, 20, 20),
        "while its copy is sent": (30, 20, 20),
        "while it copies": (30, 20, 30),
        "before it keeps the copy": (30, 20, 30),
    }
    cases = [(tmp_path / moment, moment) for moment in MOMENTS]
    ends = spawn_worlds(2, save_and_die, cases, group_timeout=20)
    for (folder, moment), (first, second) in zip(cases, ends, strict=True):
        assert second.exitcode == -signal.SIGKILL, moment
        assert first.error is not None
        assert "died" in first.error, first.error
        for lost, step in zip((None, 0, 1), expected[moment], strict=True):
            run = tmp_path / f"{moment}, host {lost} lost"
            shutil.copytree(folder, run)
            if lost is not None:
                shutil.rmtree(snapshot(run, lost, 0, 0).parent)
            told = world(2).run(recover, run)
            found = told[0][0]
            assert found == f"step-{step:08}", (moment, lost, told[0][3])
            check([(*each[:3], []) for each in told], step)


@pytest.fixture(scope="module")
def on_three_hosts(world, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hosts")
    world(3).run(save, folder, (10, 20), "abc")
    return folder


@pytest.mark.parametrize(
    ("hosts", "step"),
    [
        ("xbc", 20),  # a is lost, and its rank begins on an empty host
        ("cab", 20),  # ranks begin in another order
        ("xab", 20),  # both
        ("xyc", None),  # a and its neighbor are lost
        ("xyz", None),
    ],
)
def test_ranks_begin_on_other_hosts(world, tmp_path, on_three_hosts, hosts, step):
    shutil.copytree(on_three_hosts, tmp_path / "run")
    check(world(3).run(recover, tmp_path / "run", -1, hosts), step)


def test_fewer_ranks_go_on_where_a_host_is_lost(world, tmp_path, on_three_hosts):
    shutil.copytree(on_three_hosts, tmp_path / "run")
    check(world(2).run(recover, tmp_path / "run", -1, "ca"), 20, saved_by=3)


def test_the_first_save_of_an_attempt_removes_what_others_left(world, tmp_path, on_three_hosts):
    shutil.copytree(on_three_hosts, tmp_path / "run")
    world(2).run(save, tmp_path / "run", (30,), "ba")
    left = {
        host: sorted(path.name for path in (tmp_path / "run").glob(f"host-{host}/pyops-{RUN}/*"))
        for host in "abc"
    }
    assert left == {"a": ["rank-00001"], "b": ["rank-00000"], "c": ["rank-00002"]}
    # What a host without a rank still has is the attempt's before.
    check(world(2).run(recover, tmp_path / "run", -1, "ba"), 30)


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL = {
    "own": "pyops.checkpoint.writing.write_tensors",
    "neighbor's": "pyops.checkpoint.memory.exchange.shutil.copyfile",
    "neighbor's, in messages": "pyops.checkpoint.memory.exchange.open",
}


def _fill(rank: int, group: object, folder: Path, copy: str) -> list[str]:
    """Save 10 and 20, meet a memory that is full on rank 1 twice, and, on the way, what is left."""
    memory, told = memory_of(rank, folder, by_messages="messages" in copy), []
    for step in (10, 20):
        save_step(memory, step, rank)
    full = mock.patch(FULL[copy], side_effect=NO_ROOM, create=True)
    with full if rank == 1 else contextlib.nullcontext():
        for step in (30, 40):
            with pytest.raises(CheckpointError) as caught:
                save_step(memory, step, rank)
            told.append(str(caught.value))
    return [*told, *sorted(path.name for path in memory.own_folder.glob("*.tmp"))]


@pytest.mark.parametrize("copy", FULL)
def test_a_full_memory_leaves_the_step_before_whole(world, tmp_path, copy):
    first, second = world(2).run(_fill, tmp_path, copy)
    assert len(first) == 2, first
    assert all("No space left on device; make room there" in text for text in first)
    assert first == second
    for lost in (0, 1):
        run = tmp_path / f"{lost} lost"
        shutil.copytree(tmp_path / "memory", run / "memory")
        shutil.rmtree(snapshot(run, lost, 0, 0).parent)
        # Rank 0 has received what rank 1 could not keep: the states of both.
        (name, *_), _ = world(2).run(recover, run)
        assert name == ("step-00000040" if lost == 1 and copy != "own" else "step-00000020")


def _set_back(rank: int, group: object, folder: Path) -> None:
    save(rank, group, folder, (10, 20, 30, 20))


def test_a_run_that_was_set_back_goes_on_from_there(world, tmp_path):
    world(2).run(_set_back, tmp_path)
    check(world(2).run(recover, tmp_path), 20)


def _recover_to_a_full_disk(rank: int, group: object, folder: Path) -> str:
    full = mock.patch.object(checkpoints.shutil, "copyfile", side_effect=NO_ROOM)
    with full if rank == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError) as told:
        recover(rank, group, folder)
    return str(told.value)


def test_a_full_disk_leaves_the_copies_for_another_start(world, tmp_path):
    world(2).run(save, tmp_path)
    first, second = world(2).run(_recover_to_a_full_disk, tmp_path)
    assert "step-00000030 can't be written from memory: No space left" in first
    assert first == second
    assert not list((tmp_path / "disk").iterdir())
    check(world(2).run(recover, tmp_path), 30)


def claim(step: int, source: int, attempt: int = 1, world: int = 2, seen_by: int = 0) -> Claim:
    folder = f"/memory/rank-{seen_by:05}/step-{step:08}.of-{source:05}"
    return Claim(step, attempt, world, source, seen_by, ("a", 1), folder)


def test_states_of_two_attempts_are_no_step():
    whole = [claim(20, 0), claim(20, 1)]
    assert newest([*whole, claim(30, 0), claim(30, 1, attempt=2)], newer_than=-1) == whole
    assert newest([*whole, claim(30, 0), claim(30, 1, world=3)], newer_than=-1) == whole
    later = [claim(20, 0, attempt=2), claim(20, 1, attempt=2)]
    assert newest([*whole, *later], newer_than=-1) == later
    assert newest(whole, newer_than=20) == []


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    with mock.patch("pyops.checkpoint.memory.room.os.geteuid", return_value=os.geteuid() + 1):
        yield


def test_the_copies_of_another_user_are_neither_taken_nor_removed(tmp_path):
    save(0, None, tmp_path)
    with another_user():
        check([recover(0, None, tmp_path)], None, "belongs to user")
        for method in ("check_room", "save"):
            arguments = ({},) if method == "check_room" else (40, {})
            with pytest.raises(CheckpointError, match=r"belongs to user .* remove it"):
                getattr(memory_of(0, tmp_path), method)(*arguments)
    check([recover(0, None, tmp_path)], 30)
