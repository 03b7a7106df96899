"""A checkpoint is whole or not there; what is wrong with one is said by name, on every rank."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from pyops.checkpoint import CheckpointError, Checkpoints, load, save, writing
from pyops.checkpoint.format import tensor_file
from pyops.checkpoint.format.manifest import seal
from tests.checkpoint.forked_program import start_program

pytestmark = pytest.mark.cpu_only

SHARED, OWN = "shared.safetensors", "own-00000.safetensors"


def make_state(value: float) -> dict[str, object]:
    return {"model": {"w": torch.full((50, 20), value)}, "step": int(value), "lr": 0.1 + value}


def equal(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return (
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else bool(a == b)
    )


def test_round_trip_and_replacement(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path / "c", make_state(value), own=torch.get_rng_state())
        state, own = load(tmp_path / "c")
        assert equal(state, make_state(value))
        assert torch.equal(own, torch.get_rng_state())
    assert not equal(state, make_state(1.0))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_only_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    assert checkpoints.latest() is None
    (tmp_path / "run" / "step-00000007.tmp").mkdir(
        parents=True
    )  # left by a process that was killed
    for step in (5, 10, 100):
        checkpoints.save(step, make_state(step))
    assert checkpoints.steps() == [10, 100]
    assert checkpoints.latest() == checkpoints.path(100)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "step-00000010",
        "step-00000100",
    ]
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def exchange(path: Path) -> None:
    """Another checkpoint's file, whole in itself."""
    save(path.parent.parent / "other", make_state(9.0), own={"rng": torch.ones(5)})
    shutil.copy(path.parent.parent / "other" / path.name, path)


def other_version(path: Path) -> None:
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    path.write_text(json.dumps(seal({**manifest, "version": 99})))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (SHARED, flip, "checksum"),
        (SHARED, truncate, "bytes"),
        (SHARED, exchange, "checksum"),
        (SHARED, Path.unlink, "can't be read"),
        (OWN, flip, "checksum"),
        (OWN, exchange, "checksum"),
        ("manifest.json", truncate, "damaged"),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace("0.1", "0.2").replace("1.1", "1.2")),
            "damaged",
        ),
        ("manifest.json", lambda p: p.write_text("{}"), "no manifest of pyops"),
        ("manifest.json", lambda p: p.write_text("[1]"), "no manifest of pyops"),
        ("manifest.json", Path.unlink, "no checkpoint of pyops"),
        ("manifest.json", other_version, "version 99"),
    ],
)
def test_damage_is_named(tmp_path, name, damage, message):
    save(tmp_path / "c", make_state(1.0), own={"rng": torch.zeros(5)})
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path / "c")
    assert str(tmp_path / "c") in str(caught.value)
    assert name in str(caught.value)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nothing")


def test_a_full_disk_leaves_the_old_one_whole(tmp_path, monkeypatch):
    save(tmp_path / "c", make_state(1.0))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in [
        (tensor_file.os, "fsync"),
        (tensor_file.os, "write"),
        (writing.os, "rename"),
        (writing.json, "dump"),
    ]:
        with (
            monkeypatch.context() as patch,
            pytest.raises(CheckpointError, match=r"No space left on device.*; make room"),
        ):
            patch.setattr(module, name, full)
            save(tmp_path / "c", make_state(2.0))
        assert equal(load(tmp_path / "c")[0], make_state(1.0)), name
        assert [p.name for p in tmp_path.iterdir()] == ["c"], name


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="can't be written"):
        save(tmp_path / "file" / "c", make_state(1.0))


SLOW_SAVE = """
import sys, time, torch
from pyops.checkpoint import save
from pyops.checkpoint.format import tensor_file
inner, count = tensor_file.zlib.crc32, 0
def slow(*a):
    global count
    count += 1
    if count == 2:
        print("writing", flush=True)
        time.sleep(60)
    return inner(*a)
tensor_file.zlib.crc32 = slow
save(sys.argv[1], {"model": {"w": torch.full((50, 20), 2.0)}, "step": 2})
"""


def test_a_killed_save_leaves_the_old_one_whole(tmp_path):
    save(tmp_path / "c", make_state(1.0))
    process, printed = start_program(SLOW_SAVE, str(tmp_path / "c"))
    with printed:
        assert printed.readline() == "writing\n"
    process.kill()
    process.join()
    assert (tmp_path / "c.tmp").exists(), "it was killed too late to prove anything"
    assert equal(load(tmp_path / "c")[0], make_state(1.0))
    save(tmp_path / "c", make_state(3.0))
    assert equal(load(tmp_path / "c")[0], make_state(3.0))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_killed_between_the_two_renames(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1.0))
    os.rename(checkpoints.path(1), str(checkpoints.path(1)) + ".old")
    latest = checkpoints.latest()
    assert latest is not None
    assert equal(load(latest)[0], make_state(1.0))


def save_and_load(rank, group, path):
    save(
        path,
        {"w": torch.full((4,), 1.0 + rank)},
        own={"rank": torch.tensor(rank), "none": None},
        group=group,
    )
    state, own = load(path, group=group)
    return state["w"].tolist(), int(own["rank"])


def test_the_state_of_rank_0_and_each_ranks_own(world, tmp_path):
    assert world(2).run(save_and_load, str(tmp_path / "c")) == [([1.0] * 4, 0), ([1.0] * 4, 1)]
    state, own = load(tmp_path / "c")  # one process reads what two wrote
    assert state["w"].tolist() == [1.0] * 4
    assert int(own["rank"]) == 0


def fail_on_rank_1(rank, group, path):
    """A full disk on one rank, then damage that one rank sees; what each rank is told."""
    told = []
    inner = writing.write_tensors
    if rank == 1:
        writing.write_tensors = lambda *a: (_ for _ in ()).throw(
            OSError(errno.ENOSPC, "No space left on device")
        )
    try:
        save(path, {"w": torch.zeros(4)}, own=1, group=group)
    except CheckpointError as error:
        told.append(str(error))
    finally:
        writing.write_tensors = inner
    told.append(Path(path).exists())
    save(path, {"w": torch.zeros(4)}, own={"rng": torch.ones(3)}, group=group)
    if rank == 1:
        flip(Path(path) / "own-00001.safetensors")
    group.barrier().wait()
    try:
        load(path, group=group)
    except CheckpointError as error:
        told.append(str(error))
    return told


def test_all_ranks_are_told_alike(world, tmp_path):
    first, second = world(2).run(fail_on_rank_1, str(tmp_path / "c"))
    assert first == second
    assert "No space left" in first[0]
    assert first[1] is False
    assert "own-00001.safetensors is damaged" in first[2]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def an_unexpected_error(rank, group, folder):
    def broken(*_):
        raise ZeroDivisionError("nobody has thought of this one")

    if rank:
        writing.write_tensors = broken
    try:
        with pytest.raises(ZeroDivisionError, match="nobody"):
            save(folder, make_state(1.0), own={"x": torch.ones(2)})
    finally:
        writing.write_tensors = tensor_file.write_tensors
    return Path(folder).exists()


def test_an_error_that_nobody_has_thought_of_is_told_to_all_ranks(world, tmp_path):
    assert world(2).run(an_unexpected_error, str(tmp_path / "c")) == [False, False]


def test_negative_views(tmp_path):
    """Their memory is that of another tensor: what is saved and filled is what they are."""
    saved = torch._neg_view(torch.arange(6.0))
    save(tmp_path / "c", {"x": saved})
    assert load(tmp_path / "c")[0]["x"].tolist() == [-float(i) for i in range(6)]
    into = torch._neg_view(torch.zeros(6))
    load(tmp_path / "c", into={"x": into})
    assert into.tolist() == saved.tolist()


def test_a_save_replaces_a_checkpoint_and_nothing_else(tmp_path):
    """What else is there is neither moved nor removed: a folder of one's own, a file, a checkpoint
    with notes in it."""
    save(tmp_path / "c", {"x": torch.ones(2)})
    save(tmp_path / "c", {"x": torch.zeros(3)})
    assert torch.equal(load(tmp_path / "c")[0]["x"], torch.zeros(3))
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", {"x": 1})
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "thesis").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "c" / "notes").write_text("mine")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "shared.safetensors").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, what in (
        ("mine", "holds deep"),
        ("file", "is no folder"),
        ("c", "holds notes"),
        ("bare", r"has no manifest\.json"),
    ):
        with pytest.raises(
            CheckpointError,
            match=f"{name} is there already and {what}.*; remove it|{what}.*: remove it",
        ):
            save(tmp_path / name, {"x": 5})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
