"""How much host memory this process may use: of the machine, and of the control groups that limit a
container or a job.

/proc/meminfo                   MemAvailable and MemTotal of the machine
/sys/fs/cgroup/job/memory.max   less memory.current, but for cached files, of each group up to the
                                root; also those of version 1
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["free_memory", "paged_empty", "pinned_empty", "total_memory"]

# Where groups are mounted, and of each its limit, what is in use, and the part of it that is given
# back when memory is needed.
VERSION_1 = (
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_memory(root: Path | str = "/") -> int:
    """Bytes that are free to this process.

    Args:
        root: The folder that has proc and sys.

    Raises:
        OSError: Where there is no /proc.
    """
    root = Path(root)
    return max(
        0,
        min([_of_machine(root, "MemAvailable"), *(limit - used for limit, used in _groups(root))]),
    )


def total_memory(root: Path | str = "/") -> int:
    """Bytes that this process could have if nothing else took any.

    Args:
        root: As for `free_memory`. OSError likewise.
    """
    root = Path(root)
    return min([_of_machine(root, "MemTotal"), *(limit for limit, _ in _groups(root))])


def paged_empty(nbytes: int) -> Tensor:
    """Fresh host memory, uint8 [at least nbytes], whose first use costs a page fault for 2 MiB, not
    for 4 KiB, where the system can."""
    return torch.frombuffer(_huge_pages(mmap.mmap(-1, max(1, nbytes))), dtype=torch.uint8)


def pinned_empty(nbytes: int) -> Tensor:
    """Uninitialised uint8 [nbytes] of host memory that begins at a page and is pinned.

    torch.empty(pin_memory=True) takes the next power of two: 32 GiB for 18 GB.

    Raises:
        RuntimeError: where CUDA pins no more.
    """
    memory = _PinnedPages(-1, max(1, nbytes))
    whole = torch.frombuffer(_huge_pages(memory), dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(whole), 0)
    if int(error):
        raise RuntimeError(
            f"CUDA could not pin {nbytes} bytes of host memory: error {int(error)}; ask for less"
        )
    memory.address = whole.data_ptr()
    return whole[:nbytes]


class _PinnedPages(mmap.mmap):
    """Pages that CUDA knows of until they go."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # the interpreter may be at its end
                torch.cuda.synchronize()  # copies may still be under way
                torch.cuda.cudart().cudaHostUnregister(self.address)


def _huge_pages(memory: mmap.mmap) -> mmap.mmap:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _of_machine(root: Path, key: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that are not given back) of each group that this process is in and that
    has a limit."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, most, used, cached = VERSION_1 if controllers else VERSION_2
        top = root / mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # one that a container does not show is not there
            if (folder / most).exists() and (limit := (folder / most).read_text().strip()) != "max":
                told = dict(
                    each.split() for each in (folder / "memory.stat").read_text().splitlines()
                )
                yield int(limit), int((folder / used).read_text()) - int(told.get(cached, 0))
            if folder == top:
                break
