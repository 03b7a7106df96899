"""Written in the background: the copy is of the moment of save, errors come up on all ranks, a
killed process harms nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import BackgroundSaver, CheckpointError, Checkpoints, load, writing
from pyops.flat import Shard
from tests.checkpoint.forked_program import start_program
from tests.checkpoint.test_folder import equal, make_state
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only


class Gate:
    """Holds the writing threads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event, inner = threading.Event(), writing.write_tensors

        def held(*arguments: Any) -> Any:
            assert self.event.wait(30)
            return inner(*arguments)

        monkeypatch.setattr(writing, "write_tensors", held)


def test_the_copy_is_of_the_moment_of_save(tmp_path, monkeypatch):
    gate, saver = Gate(monkeypatch), BackgroundSaver()
    state = {
        **make_state(1.0),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(3).bfloat16(),
        "list": [1],
    }
    wanted = {
        **make_state(1.0),
        "strided": state["strided"].clone(),
        "half": state["half"].clone(),
        "list": [1],
    }
    rng = torch.get_rng_state()
    saver.save(tmp_path / "c", state, own=rng)
    assert saver.busy
    for tensor in state["model"]["w"], state["strided"], state["half"]:
        tensor.add_(1)
    state["list"].append(2)
    state["step"] = 5
    assert not (tmp_path / "c").exists()
    gate.event.set()
    saver.wait()
    assert not saver.busy
    found, own = load(tmp_path / "c")
    assert equal(found, wanted)
    assert torch.equal(own, rng)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_one_at_a_time_in_the_same_memory(tmp_path):
    saver = BackgroundSaver()
    for value in (1.0, 2.0, 3.0):
        saver.save(tmp_path / f"c{value:.0f}", make_state(value))
        if value == 2.0:
            assert equal(load(tmp_path / "c1")[0], make_state(1.0)), "the one before is whole"
    saver.release()
    saver.save(tmp_path / "c4", {"large": torch.ones(5000)})
    saver.wait()
    saver.wait()
    for value in (1.0, 2.0, 3.0):
        assert equal(load(tmp_path / f"c{value:.0f}")[0], make_state(value))
    assert threading.active_count() == 1 or not any(
        "checkpoint" in t.name for t in threading.enumerate()
    )


def test_an_error_comes_up_next_time(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(1, make_state(1.0))
    checkpoints.wait()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, name in (writing, "write_tensors"), (writing.os, "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            checkpoints.save(2, make_state(2.0))
            with pytest.raises(
                CheckpointError,
                match=r"step-00000002 can't be written: No space left on device; make room",
            ):
                checkpoints.save(3, make_state(3.0))
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"], name
        checkpoints.wait()
    for step in (4, 5, 6):
        checkpoints.save(step, make_state(step))
    checkpoints.wait()
    assert checkpoints.steps() == [5, 6], "the oldest are removed in the background"


def test_a_mistake_is_raised_at_once(tmp_path):
    saver = BackgroundSaver()
    with pytest.raises(TypeError, match=r"state\['x'\] is a set"):
        saver.save(tmp_path / "c", {"x": {1}})
    with pytest.raises(ValueError, match="timeout is 0"):
        BackgroundSaver(timeout=0)
    assert list(tmp_path.iterdir()) == []


def test_leaving_because_of_an_error(tmp_path, monkeypatch):
    """close() communicates with nobody: what is under way is finished, or given up."""
    gate, saver = Gate(monkeypatch), BackgroundSaver()
    saver.close()
    saver.save(tmp_path / "c", make_state(1.0))
    threading.Timer(0.2, gate.event.set).start()
    saver.close()
    assert not saver.busy
    assert equal(load(tmp_path / "c")[0], make_state(1.0))


def rows(rank: int, size: int, value: float) -> dict[str, Any]:
    return {
        "e": Shard((size, 1000), (rank, 0), torch.full((1, 1000), value + rank)),
        "step": int(value),
    }


def save_on_ranks(rank: int, group: Any, path: str) -> list[Any]:
    told: list[Any] = []
    checkpoints = Checkpoints(path, background=True, group=group)
    checkpoints.save(1, rows(rank, group.size(), 10.0), own={"rank": rank})
    checkpoints.save(2, rows(rank, group.size(), 20.0), own={"rank": rank})
    checkpoints.wait()
    inner = writing.write_tensors
    if rank == 1:
        writing.write_tensors = lambda *a: (_ for _ in ()).throw(
            OSError(errno.ENOSPC, "No space left on device")
        )
    checkpoints.save(3, rows(rank, group.size(), 30.0))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        told.append(str(error))
    writing.write_tensors = inner
    group.barrier().wait()  # rank 0 has removed what was written aside
    told.append(sorted(p.name for p in Path(path).iterdir()))
    group.barrier().wait()
    checkpoints.save(4, rows(rank, group.size(), 40.0), own={"rank": rank})
    checkpoints.wait()
    return told


def test_on_several_ranks(world, tmp_path):
    told = world(3).run(save_on_ranks, str(tmp_path / "run"))
    assert told[0] == told[1] == told[2]
    assert "step-00000003 can't be written: No space left on device" in told[0][0]
    assert told[0][1] == ["step-00000001", "step-00000002"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    for step, value in (2, 20.0), (4, 40.0):
        state, own = load(tmp_path / "run" / f"step-{step:08}")
        assert state["e"][:, 0].tolist() == [value, value + 1, value + 2]
        assert own == {"rank": 0}
        names = sorted(p.name for p in (tmp_path / "run" / f"step-{step:08}").iterdir())
        assert not [n for n in names if n.startswith("done")], names


def lose_rank_1(rank: int, group: Any, path: str) -> str:
    """Rank 1 writes nothing and says nothing; rank 0 does not wait for ever."""
    saver = BackgroundSaver(group=group, timeout=0.5)
    if rank == 1:
        writing.write_tensors = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    saver.save(path, rows(rank, 2, 1.0))
    assert saver._under_way is not None
    saver._under_way.thread.join()
    return str(saver._under_way.commit_error)


def test_a_rank_that_is_killed_while_it_writes(tmp_path):
    saver = BackgroundSaver()
    saver.save(tmp_path / "c", make_state(1.0))
    saver.wait()
    first, second = spawn_ranks(2, lose_rank_1, str(tmp_path / "c"))
    assert second.exitcode == -signal.SIGKILL
    assert "no word of the files of ranks [1]" in first.result
    assert equal(load(tmp_path / "c")[0], make_state(1.0))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


SCRIPT = """
import sys, time, torch
from pyops.checkpoint import BackgroundSaver, writing
saver, inner = BackgroundSaver(), writing.write_tensors
saver.save(sys.argv[1], {"model": {"w": torch.full((50, 20), 1.0)}, "step": 1, "lr": 1.1})
saver.wait()
def slow(*a):
    found = inner(*a)
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    return found
writing.write_tensors = slow
saver.save(sys.argv[1], {"model": {"w": torch.full((50, 20), 2.0)}, "step": 2, "lr": 2.1})
"""


def test_a_process_that_is_killed(tmp_path):
    process, printed = start_program(SCRIPT, str(tmp_path / "c"), "60")
    with printed:
        assert printed.readline() == "writing\n"
    process.kill()
    process.join()
    assert (tmp_path / "c.tmp").exists()
    assert equal(load(tmp_path / "c")[0], make_state(1.0))


def test_a_process_that_ends(tmp_path):
    """An interpreter of its own: how it ends is what is tested."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), "0.3"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert printed.startswith("writing\n")
    assert not (tmp_path / "c.tmp").exists()
    assert equal(load(tmp_path / "c")[0], make_state(2.0))
