"""Room for checkpoints in memory: what the filesystem has left, and what the machine, the container
or the job has; and whose the memory is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.memory import room
from pyops.checkpoint.memory.room import Room, check_owner, is_memory, machine, room_in

pytestmark = pytest.mark.cpu_only

MEMORY = 1000  # bytes that the job has left


@pytest.fixture
def in_memory(monkeypatch):
    """Folders of the test take memory, of which there is little."""
    monkeypatch.setattr(room, "is_memory", lambda folder: True)
    monkeypatch.setattr(room, "free_memory", lambda: MEMORY)


def test_the_limit_of_a_job_counts_where_files_take_memory(tmp_path, in_memory):
    enough = room_in(tmp_path, tmp_path / "pyops-a", wanted=MEMORY)
    assert enough.refusal(tmp_path, [enough]) is None
    # Two ranks of a host share it; those of other hosts have their own.
    other = Room(("another", 1), 1, MEMORY, 0, 0, MEMORY)
    assert enough.refusal(tmp_path, [enough, other]) is None
    told = str(enough.refusal(tmp_path, [enough, other, enough]))
    assert f"of 2 ranks on {os.uname().nodename} take {2 * MEMORY} bytes, and {MEMORY}" in told
    assert "for a job --mem" in told


def test_what_the_run_holds_goes_and_what_others_hold_stays(tmp_path, in_memory):
    for name, size in (("pyops-a", 300), ("pyops-b", 70)):
        (tmp_path / name / "rank-00000").mkdir(parents=True)
        (tmp_path / name / "rank-00000" / "file").write_bytes(bytes(size))
    (tmp_path / "pyops-region").write_bytes(bytes(5))  # of a collective
    wanted = room_in(tmp_path, tmp_path / "pyops-a", wanted=MEMORY + 300)
    assert (wanted.held, wanted.others) == (300, 70)
    assert wanted.refusal(tmp_path, [wanted]) is None
    more = room_in(tmp_path, tmp_path / "pyops-a", wanted=MEMORY + 301)
    told = str(more.refusal(tmp_path, [more]))
    assert "1300 bytes of host memory are free (70 are taken by pyops-* of other runs)" in told


def test_a_folder_on_a_disk_takes_no_memory(tmp_path):
    assert not is_memory(Path("/proc"))
    assert not is_memory(tmp_path / "none")
    if os.path.ismount("/dev/shm"):
        assert is_memory(Path("/dev/shm"))
    assert machine() == machine() != ""


def test_a_folder_that_is_none_or_not_to_be_written_is_refused(tmp_path, monkeypatch):
    check_owner(tmp_path / "not-there")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="is no folder; remove it"):
            check_owner(tmp_path / name)
    monkeypatch.setattr(room.os, "access", lambda path, mode: False)
    with pytest.raises(OSError) as caught:
        room_in(tmp_path, tmp_path / "pyops-a", wanted=1)
    assert caught.value.errno == errno.EACCES
