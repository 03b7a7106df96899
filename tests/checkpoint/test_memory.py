"""Checkpoints in host memory and at a neighbor: what was lost, torn, damaged or is another run's is
not taken, and all ranks take one step."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyops.checkpoint import CheckpointError, MemoryCheckpoints, load
from pyops.checkpoint.memory import neighbor_distance
from pyops.checkpoint.snapshot import HEADER, snapshot_name
from pyops.flat import Shard

pytestmark = pytest.mark.cpu_only

RUN = "a1b2"
NUMEL = 6  # of the sharded tensor, over all ranks
STEPS = (10, 20, 30)  # the first is gone after the last


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    numel = NUMEL // size
    part = torch.arange(rank * numel, (rank + 1) * numel) + float(step)
    shard = Shard((NUMEL,), (rank * numel,), part)
    return {"whole": torch.full((3,), float(step)), "step": step, "moments": {"w": shard}}


def _save(rank: int, group: object, folder: Path, steps: tuple[int, ...] = STEPS) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    memory = MemoryCheckpoints(folder / "memory", run=RUN)
    for step in steps:
        own = {"seed": torch.tensor([step, rank])}
        memory.save(step, state_of(step, rank, size), own=own)


def _recover(rank: int, group: object, folder: Path, newer_than: int = -1) -> Any:
    """(name of the checkpoint, state, own, what was said)."""
    memory = MemoryCheckpoints(folder / "memory", run=RUN)
    found, said = memory.recover(folder / "disk", newer_than=newer_than)
    if found is None:
        return None, None, None, said
    state, own = load(found, compare=True)
    return found.name, state, own, said


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    world(2).run(_save, folder)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy of a run of two ranks that has ended in the middle."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def snapshot(run: Path, keeper: int, step: int, source: int) -> Path:
    return run / "memory" / f"pyops-{RUN}" / f"rank-{keeper:05}" / snapshot_name(step, source)


def check(told: list[Any], step: int | None, *said: str) -> None:
    """All ranks have this step whole, and were told the same."""
    for rank, (name, state, own, notes) in enumerate(told):
        assert all(any(part in note for note in notes) for part in said), notes
        assert said or not notes, notes
        assert notes == told[0][3]
        if step is None:
            assert name is None
            continue
        assert name == f"step-{step:08}"
        assert state["step"] == step
        assert torch.equal(state["whole"], torch.full((3,), float(step)))
        assert torch.equal(state["moments"]["w"], torch.arange(NUMEL) + float(step))
        assert torch.equal(own["seed"], torch.tensor([step, rank]))


def damage(folder: Path) -> None:
    """Change the last byte of the sharded state."""
    (path,) = folder.glob("shards-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_the_newest_step_is_taken_and_two_are_kept(world, run):
    check(world(2).run(_recover, run), 30)
    kept = sorted(path.name for path in snapshot(run, 1, 30, 1).parent.iterdir())
    assert kept == [snapshot_name(step, rank) for step in (20, 30) for rank in (0, 1)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_comes_back_from_its_neighbor(world, run, lost):
    shutil.rmtree(snapshot(run, lost, 30, lost).parent)
    check(world(2).run(_recover, run), 30)


def test_nothing_is_there_when_both_are_lost(world, run):
    shutil.rmtree(run / "memory")
    check(world(2).run(_recover, run), None)


def test_what_is_on_the_disk_is_taken_when_it_is_as_new(world, run):
    check(world(2).run(_recover, run, 30), None)


def test_a_damaged_copy_gives_way_to_the_neighbors(world, run):
    damage(snapshot(run, 1, 30, 1))
    check(world(2).run(_recover, run), 30, "rank-00001/step-00000030.of-00001 is refused: shards-")


def test_all_ranks_take_the_older_step_when_one_has_no_newer(world, run):
    for keeper in (0, 1):
        damage(snapshot(run, keeper, 30, 1))
    check(world(2).run(_recover, run), 20, "rank-00000/step", "rank-00001/step")


def test_a_torn_copy_is_not_taken(world, run):
    for keeper in (0, 1):
        torn = snapshot(run, keeper, 30, 0)
        torn.rename(torn.with_name(torn.name + ".tmp"))
    check(world(2).run(_recover, run), 20, "not written to its end")


def test_a_damaged_header_is_refused(world, run):
    for keeper in (0, 1):
        path = snapshot(run, keeper, 30, 0) / HEADER
        path.write_text(path.read_text().replace("30", "31"))
    check(world(2).run(_recover, run), 20, "its checksum is another")


def test_the_copy_of_another_run_is_refused(world, run):
    for keeper in (0, 1):
        path = snapshot(run, keeper, 30, 0) / HEADER
        text = json.loads(path.read_text())["header"].replace(RUN, "c3d4")
        path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "header": text}))
    check(world(2).run(_recover, run), 20, f"is of run c3d4, this is run {RUN}")


def test_the_copies_of_another_number_of_ranks_are_refused(world, run):
    check(world(3).run(_recover, run), None, "of a run on 2 ranks, this run has 3")


def test_one_process_keeps_its_own(tmp_path):
    _save(0, None, tmp_path)
    check([_recover(0, None, tmp_path)], 30)


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


@pytest.mark.parametrize(
    ("hosts", "distance"),
    [("a", 0), ("aa", 1), ("ab", 1), ("aabb", 2), ("aabbcc", 2), ("aaab", 1)],
)
def test_the_neighbor_is_on_another_host(hosts, distance):
    assert neighbor_distance(hosts) == distance


def _unread(rank: int, group: object, folder: Path) -> str:
    memory = MemoryCheckpoints(folder / "memory", run=RUN)
    failing = mock.patch("pyops.checkpoint.memory.np.fromfile", side_effect=OSError(5, "no medium"))
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
