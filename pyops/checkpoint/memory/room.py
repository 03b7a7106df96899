"""Whose a run's folder in host memory is, and how much fits beside what is there.

/dev/shm                 what its filesystem has left, and what the machine, the container or
    pyops-RUN/           the job has left of its memory; what an earlier start of the run
    pyops-OTHER/         holds goes at the first save, what other runs hold stays
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.host_memory import free_memory

__all__ = ["Room", "check_owner", "device_of", "is_memory", "machine", "room_in"]

BOOT = Path("/proc/sys/kernel/random/boot_id")
MOUNTS = Path("/proc/self/mountinfo")
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")  # filesystems whose files are host memory


def machine() -> str:
    """The same text for all processes of a machine, and for no others: host names may be alike on
    all machines of a cluster, or differ between containers of one."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def device_of(folder: Path) -> int:
    """The number of the filesystem in which the folder lies, within its machine; 0: it is not
    there."""
    try:
        return os.stat(folder).st_dev
    except OSError:
        return 0


def is_memory(folder: Path) -> bool:
    """Whether files in this folder take host memory."""
    device = device_of(folder)
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return False
    mounted = (line.partition(" - ") for line in lines)
    return any(of.split()[2] == number and at.split()[0] in MEMORY for of, _, at in mounted)


def check_owner(folder: Path) -> None:
    """Refuse the folder of a run that another user has made: it would be read, or removed.

    Raises:
        CheckpointError: It is of another user, or is no folder.
    """
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        return
    what = f"belongs to user {found.st_uid}, and this process to user {os.geteuid()}"
    if not stat.S_ISDIR(found.st_mode):
        what = "is no folder"
    raise CheckpointError(
        f"{folder} is refused: it {what}; remove it, or name another folder for checkpoints in "
        "memory"
    )


@dataclass(frozen=True)
class Room:
    """What one rank may write to the folder of its run.

    Attributes:
        place: Machine and filesystem; ranks that have the same share the room.
        disk: Bytes that the filesystem has left.
        memory: Bytes of host memory that are left; None where files take none.
        held: Bytes that the run holds there, which go at the first save.
        others: Bytes that other runs hold there.
        wanted: Bytes that this rank will write.
    """

    place: tuple[str, int]
    disk: int
    memory: int | None
    held: int
    others: int
    wanted: int

    def refusal(self, root: Path, everyone: Iterable[Room]) -> CheckpointError | None:
        """What there is to say if the ranks of this place need more than there is.

        Args:
            root: Of the runs' folders.
            everyone: The rooms of all ranks.
        """
        same = [room for room in everyone if room.place == self.place]
        wanted = sum(room.wanted for room in same)
        ranks = "1 rank" if len(same) == 1 else f"{len(same)} ranks"
        text = (
            f"the checkpoints in memory of {ranks} on {socket.gethostname()} take {wanted} bytes, "
            "and "
        )
        other = f" ({self.others} are taken by pyops-* of other runs)" if self.others else ""
        if wanted > self.disk + self.held:
            return CheckpointError(
                f"{text}{root} has {self.disk + self.held}{other}: mount more memory there (mount "
                "-o remount,size=...; for a container --shm-size), remove what runs have left "
                "there, name another folder, or take none"
            )
        if self.memory is not None and wanted > self.memory + self.held:
            return CheckpointError(
                f"{text}{self.memory + self.held} bytes of host memory are free{other}: ask for "
                "more (for a job --mem, for a container --memory), remove what runs have left in "
                f"{root}, name a folder on a disk of the host, or take none"
            )
        return None


def room_in(root: Path, run: Path, *, wanted: int) -> Room:
    """The room for a rank.

    Args:
        root: Of the runs' folders; it is made.
        run: The folder of this run in it, which need not be there.
        wanted: Bytes that this rank will write.

    Raises:
        CheckpointError: The run's folder is of another user.
        OSError: The root can't be made, or not be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    check_owner(run)
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "this user may not write there")
    disk = os.statvfs(root)
    memory: int | None = None
    if is_memory(root):
        with contextlib.suppress(OSError):  # a system without /proc
            memory = free_memory()
    held = {path: _bytes_in(path) for path in root.glob("pyops-*") if path.is_dir()}
    return Room(
        place=(machine(), device_of(root)),
        disk=disk.f_bavail * disk.f_frsize,
        memory=memory,
        held=held.pop(run, 0),
        others=sum(held.values()),
        wanted=wanted,
    )


def _bytes_in(run: Path) -> int:
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):  # another run removes its own
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
