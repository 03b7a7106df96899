"""Checkpoints in host memory and at a neighbor: what was lost, torn, damaged or is another run's is
not taken, and all ranks take one step."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from pyops.checkpoint import CheckpointError, MemoryCheckpoints
from pyops.checkpoint.memory.checkpoints import neighbor_distance
from pyops.checkpoint.memory.snapshot import HEADER, snapshot_name
from tests.checkpoint.memory.tiny_state import (
    RUN,
    check,
    memory_of,
    recover,
    save,
    save_step,
    snapshot,
    state_of,
)

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    world(2).run(save, folder)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy of a run of two ranks that has ended in the middle."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def damage(folder: Path) -> None:
    """Change the last byte of the sharded state."""
    (path,) = folder.glob("shards-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_the_newest_step_is_taken_and_two_are_kept(world, run):
    check(world(2).run(recover, run), 30)
    kept = sorted(path.name for path in snapshot(run, 1, 30, 1).parent.iterdir())
    assert kept == [snapshot_name(step, rank) for step in (20, 30) for rank in (0, 1)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_comes_back_from_its_neighbor(world, run, lost):
    shutil.rmtree(snapshot(run, lost, 30, lost).parent)
    check(world(2).run(recover, run), 30)


def test_nothing_is_there_when_both_are_lost(world, run):
    shutil.rmtree(run / "memory")
    check(world(2).run(recover, run), None)


def test_what_is_on_the_disk_is_taken_when_it_is_as_new(world, run):
    check(world(2).run(recover, run, 30), None)


def test_a_damaged_copy_gives_way_to_the_neighbors(world, run):
    damage(snapshot(run, 1, 30, 1))
    check(world(2).run(recover, run), 30, "rank-00001/step-00000030.of-00001 is refused: shards-")


def test_all_ranks_take_the_older_step_when_one_has_no_newer(world, run):
    for keeper in (0, 1):
        damage(snapshot(run, keeper, 30, 1))
    check(world(2).run(recover, run), 20, "rank-00000/step", "rank-00001/step")


def test_a_torn_copy_is_not_taken(world, run):
    for keeper in (0, 1):
        torn = snapshot(run, keeper, 30, 0)
        torn.rename(torn.with_name(torn.name + ".tmp"))
    check(world(2).run(recover, run), 20, "not written to its end")


def test_a_damaged_header_is_refused(world, run):
    for keeper in (0, 1):
        path = snapshot(run, keeper, 30, 0) / HEADER
        path.write_text(path.read_text().replace("30", "31"))
    check(world(2).run(recover, run), 20, "its checksum is another")


def test_the_copy_of_another_run_is_refused(world, run):
    for keeper in (0, 1):
        path = snapshot(run, keeper, 30, 0) / HEADER
        text = json.loads(path.read_text())["header"].replace(RUN, "c3d4")
        path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "header": text}))
    check(world(2).run(recover, run), 20, f"is of run c3d4, this is run {RUN}")


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_takes_them(world, run, size):
    shutil.rmtree(snapshot(run, 1, 30, 1).parent)
    told = world(3).run(recover, run) if size == 3 else [recover(0, None, run)]
    check(told, 30, saved_by=2)


def test_one_process_keeps_its_own(tmp_path):
    save(0, None, tmp_path)
    check([recover(0, None, tmp_path)], 30)


def _refused(rank: int, group: object, folder: Path) -> str:
    memory = MemoryCheckpoints(folder / "memory", run=RUN)
    state = state_of(1, rank, dist.get_world_size())
    memory.check_room(state)
    with pytest.raises(CheckpointError) as caught:
        memory.check_room(state, states_to_come=1 << 60)
    return str(caught.value)


def test_a_memory_that_is_too_small_is_refused_before_the_first_step(world, tmp_path):
    first, second = world(2).run(_refused, tmp_path)
    assert first == second
    # Two steps, each of both ranks twice; 3 numbers of shards on each, 3 + of rank 0.
    wanted = int(first.split(" take ")[1].split(" bytes")[0])
    states = 4 * (1 << 60) * (3 + 3 + 3)
    assert 0 < wanted - 4 * states < 1 << 20
    assert f"{tmp_path / 'memory'} has " in first
    assert not list((tmp_path / "memory").iterdir())


def test_the_copies_of_other_runs_stay(world, run):
    other = run / "memory" / "pyops-other" / "rank-00000"
    other.mkdir(parents=True)
    world(2).run(_remove, run)
    assert list((run / "memory").iterdir()) == [other.parent]


def _remove(rank: int, group: object, folder: Path) -> None:
    MemoryCheckpoints(folder / "memory", run=RUN).remove()


def _handed(rank: int, group: object, folder: Path, by_messages: bool) -> int:
    """Messages that a rank sends in a save, whose copy at the neighbor is a file of its own."""
    memory = memory_of(rank, folder, by_messages=by_messages)
    with mock.patch("torch.distributed.isend", wraps=dist.isend) as sends:
        save_step(memory, 10, rank)
    own, kept = (
        sorted(snapshot(folder, keeper, 10, rank).iterdir()) for keeper in (rank, 1 - rank)
    )
    for ours, theirs in zip(own, kept, strict=True):
        assert ours.name == theirs.name
        assert ours.read_bytes() == theirs.read_bytes()
        assert not ours.samefile(theirs)
    return sends.call_count


def test_a_neighbor_of_the_same_host_copies_without_a_message(world, tmp_path):
    assert world(2).run(_handed, tmp_path / "copied", False) == [0, 0]
    first, second = world(2).run(_handed, tmp_path / "sent", True)
    assert min(first, second) > 0


@pytest.mark.parametrize(
    ("hosts", "distance"),
    [("a", 0), ("aa", 1), ("ab", 1), ("aabb", 2), ("aabbcc", 2), ("aaab", 1)],
)
def test_the_neighbor_is_on_another_host(hosts, distance):
    assert neighbor_distance(hosts) == distance


def _unread(rank: int, group: object, folder: Path) -> str:
    memory = memory_of(rank, folder, by_messages=True)
    failing = mock.patch(
        "pyops.checkpoint.memory.exchange.np.fromfile", side_effect=OSError(5, "no medium")
    )
    with failing if rank == 1 else contextlib.nullcontext():
        try:
            memory.save(10, state_of(10, rank, 2))
        except CheckpointError as error:
            return str(error)
    return "saved"


def test_memory_that_one_rank_can_not_read_is_an_error_on_all(world, tmp_path):
    first, second = world(2).run(_unread, tmp_path, timeout=30)
    assert "no medium" in first
    assert first == second
