"""How much memory is free to this process: of the machine, and of the control groups that limit a container or a job.

/proc/meminfo                       MemAvailable                                  of the machine
/sys/fs/cgroup/job/memory.max       less memory.current, but for cached files     of each group up to the root; also version 1
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_memory"]

# Where groups are mounted, and of each its limit, what is in use, and the part of it that is given back when memory is needed.
VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_memory(root: Path | str = "/") -> int:
    """Bytes. root: the folder that has proc and sys."""
    root = Path(root)
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return max(0, min([free, *_left(root)]))


def _left(root: Path) -> Iterator[int]:
    """Of each group that this process is in and that has a limit."""
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
                told = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                yield int(limit) - int((folder / used).read_text()) + int(told.get(cached, 0))
            if folder == top:
                break
