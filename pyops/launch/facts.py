"""What `pyops doctor` asks of every rank: versions, clock, network, folders, limits, speed.

Each rank gathers its own; `gathered` brings them together.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyops
from pyops.comm.agreement import gather, on_first_rank
from pyops.host_memory import free_memory
from pyops.launchers import Launch
from pyops.ops import library

__all__ = ["Facts", "gathered"]

MESSAGE = 4 << 20  # bytes, of a message that is timed
TRIES = 3
SHARED = Path("/dev/shm")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Facts:
    """What one rank found out about itself."""

    rank: int
    """Of this process."""
    host: str = ""
    """Its host's name."""
    local_rank: int = 0
    """Its number on that host."""
    launcher: str = "alone"
    """Which started it."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what has to be equal on all ranks."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, that have to be equal as well."""
    devices: int = 0
    """GPUs that torch sees."""
    device: str = ""
    """The one that this rank takes; "" for none."""
    clock: float = 0.0
    """Seconds that its clock is ahead of rank 0's."""
    address: str = ""
    """The address from which it reaches the host where the ranks meet."""
    sees_folder: bool = True
    """Whether it sees in the folder of the runs what rank 0 has written there."""
    folder: str = "runs"
    """That folder."""
    disk_free: float = float("inf")
    """Bytes, in that folder."""
    shared_free: float = float("inf")
    """Bytes of shared memory, in /dev/shm."""
    memory_free: float = float("inf")
    """Bytes of the host."""
    open_files: float = float("inf")
    """How many files it may have open."""
    cores: int = 1
    """That it may use."""
    threads: int = 1
    """That torch uses."""
    seconds: float = 0.0
    """Of a message of 4 MiB that comes from the rank before; 0 for one rank."""


def gathered(launch: Launch, folder: Path) -> list[Facts]:
    """The facts of all ranks, in rank order. Collective.

    Args:
        launch: How this process was started.
        folder: Where runs lie.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    sees, free = _folder(folder)
    own = Facts(
        rank=rank,
        host=socket.gethostname(),
        local_rank=launch.local_rank,
        launcher=launch.launcher,
        versions=_versions(),
        variables={name: os.environ.get(name, "") for name in VARIABLES},
        devices=torch.cuda.device_count(),
        device=_device(launch.local_rank),
        clock=_clock(),
        address=_address(),
        sees_folder=sees,
        folder=str(folder),
        disk_free=free,
        shared_free=_free(SHARED),
        memory_free=_or(lambda: float(free_memory())),
        open_files=float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        seconds=_seconds(),
    )
    return gather(own)


def _versions() -> dict[str, str]:
    info = library.build_info()
    nccl = ""
    if torch.cuda.is_available():
        with suppress(RuntimeError, AttributeError):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "",
        "NCCL": nccl,
        "NVIDIA driver": _driver(),
        "pyops": pyops.__version__,
        "kernels": "built" if info["extension"] else "plain torch",
        "instruction set": str(library.isa()),
    }


def _driver() -> str:
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "")
    return ""


def _device(local_rank: int) -> str:
    if local_rank >= torch.cuda.device_count():
        return ""
    found = torch.cuda.get_device_properties(local_rank)
    return str(getattr(found, "uuid", f"{found.name} {local_rank}"))


def _clock() -> float:
    """Seconds that this rank's clock is ahead of rank 0's: the smallest of some rounds, since ranks
    leave a barrier at different times."""
    rounds = []
    for _ in range(TRIES):
        gather(None)
        times = gather(time.time())
        rounds.append(times[dist.get_rank() if len(times) > 1 else 0] - times[0])
    return min(rounds, key=abs)


def _address() -> str:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        return ""
    with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _folder(folder: Path) -> tuple[bool, float]:
    """Whether what rank 0 writes is seen here, and the bytes that are free."""

    def write() -> str:
        mark = folder / f".doctor-{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text("seen")
        except OSError:
            return ""
        return mark.name

    written = on_first_rank(write)
    mark = folder / written
    found = bool(written) and _or(lambda: mark.read_text() == "seen", False)
    gather(None)  # all have looked
    if found:
        mark.unlink(missing_ok=True)
    return found, _free(folder)


def _free(folder: Path) -> float:
    return float(_or(lambda: shutil.disk_usage(folder).free))


def _or(call: Callable[[], Any], otherwise: Any = float("inf")) -> Any:
    try:
        return call()
    except OSError:
        return otherwise


def _seconds() -> float:
    """Of a message from the rank before to this one, one pair after the other: ranks that all send
    at once would share what is slow."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    rank, size = dist.get_rank(), dist.get_world_size()
    nccl = dist.get_backend() == "nccl"
    message = torch.ones(MESSAGE, dtype=torch.uint8, device="cuda" if nccl else "cpu")
    own = 0.0
    for receiver in range(size):
        sender = (receiver - 1) % size
        if rank == sender:
            for _ in range(TRIES + 1):
                dist.send(message, receiver)
        elif rank == receiver:
            own = statistics.median(_received(message, sender) for _ in range(TRIES + 1))
        gather(None)
    return own


def _received(message: torch.Tensor, sender: int) -> float:
    started = time.perf_counter()
    dist.recv(message, sender)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
