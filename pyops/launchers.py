"""Which launcher started this process, and as which rank of how many: read from the environment
alone.

    torchrun     RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    Open MPI     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    Hydra        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS     (MPICH, Intel MPI)
    srun         SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, within a step
    none         alone

The first one in this order that is there counts. A launcher may start another one (srun starts
torchrun's agents, mpirun starts its daemons by srun), and the inner one is above. What no nesting
explains is refused.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "MPI",
    "Launch",
    "LaunchError",
    "check_world",
    "first_host",
    "recognized",
    "started_together",
]

MPI = ("Open MPI", "Hydra")
PORTS = 20000, 12000  # the first, and how many: below those that systems hand out from 32768 on


class LaunchError(ValueError):
    """The environment, or the machine, does not fit how this process was to be started."""


@dataclass(frozen=True)
class Launch:
    """How this process was started."""

    launcher: str
    """"torchrun", "environment" (torchrun's variables, set by something else), "Open MPI", "Hydra",
    "srun" or "alone"."""
    rank: int = 0
    """Of this process, from 0."""
    size: int = 1
    """Ranks altogether."""
    local_rank: int = 0
    """Of this process among those of its host."""
    local_size: int = 1
    """Ranks of this host; 0 where the launcher does not tell."""
    address: str | None = None
    """The host where the ranks meet; None where the launcher tells none."""
    port: int | None = None
    """The port there."""

    def variables(self) -> dict[str, str]:
        """torchrun's variables with these values: what torch.distributed and pyops read."""
        if self.launcher == "alone":
            return {}
        found = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
        }
        if self.local_size:
            found["LOCAL_WORLD_SIZE"] = str(self.local_size)
        if self.address is not None and self.port is not None:
            found |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        return found


def recognized(environment: Mapping[str, str]) -> Launch:
    """The launcher whose variables these are.

    Args:
        environment: os.environ, or another mapping.

    Returns:
        What they say. Open MPI and Hydra name no host where ranks meet, but for ranks of one host.

    Raises:
        LaunchError: Variables that contradict one another, are no numbers, or are there in part.
    """
    inner = [
        found
        for found in (_open_mpi(environment), _hydra(environment), _srun(environment))
        if found is not None
    ]
    given = _given(environment)
    if given is not None:
        if given.launcher != "torchrun":
            for other in inner[:1]:
                _check_equal(given, other)
        return given
    _check_unranked(environment, inner)
    if not inner:
        return Launch("alone")
    if [each.launcher for each in inner[:2]] == list(MPI):
        _check_equal(*inner[:2])
    return inner[0]


def check_world(found: Launch, world: tuple[int, int], library: str) -> None:
    """LaunchError where the world of mpi4py is not that of the launcher.

    Args:
        found: What the launcher says.
        world: The rank of this process and the number of ranks, as mpi4py sees them.
        library: The name of its MPI, for the error.
    """
    if world != (found.rank, found.size):
        raise LaunchError(
            f"{found.launcher} started this process as rank {found.rank} of {found.size}, but "
            f"mpi4py sees rank {world[0]} of {world[1]}: it found another MPI ({library}) than "
            "that of mpirun; put the mpirun of that MPI first on the PATH, or install mpi4py for "
            "the MPI that mpirun is of"
        )


def started_together(environment: Mapping[str, str]) -> tuple[str, int]:
    """The variable that says how many ranks were started, and how many; ("", 1) for one process.
    Checks nothing.

    Args:
        environment: os.environ, or another mapping.
    """
    names = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"]
    names += ["PMI_SIZE"] if "MPI_LOCALRANKID" in environment else []
    names += ["SLURM_STEP_NUM_TASKS"] if "SLURM_PROCID" in environment else []
    for name in names:
        size = environment.get(name, "")
        if size.isdigit() and int(size) > 1:
            return name, int(size)
    return "", 1


def _given(environment: Mapping[str, str]) -> Launch | None:
    """What torchrun's variables say; None without RANK."""
    if "RANK" not in environment:
        return None
    if "WORLD_SIZE" not in environment:
        raise LaunchError(
            f"RANK={environment['RANK']} is in the environment, but no WORLD_SIZE; start the ranks "
            "by torchrun, or unset RANK for one process"
        )
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"
    return _launch(
        environment,
        launcher,
        names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        address=environment.get("MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else None,
    )


def _open_mpi(environment: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    stem = "OMPI_COMM_WORLD_"
    names = tuple(stem + each for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _mpi(environment, "Open MPI", names, job=environment.get("PMIX_NAMESPACE"))


def _hydra(environment: Mapping[str, str]) -> Launch | None:
    # Slurm's own PMI sets PMI_RANK, too: that is srun's.
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _mpi(environment, "Hydra", names, job=None)


def _mpi(
    environment: Mapping[str, str], launcher: str, names: tuple[str, ...], *, job: str | None
) -> Launch:
    address = environment.get("MASTER_ADDR")
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else None
    found = _launch(environment, launcher, names=names, address=address, port=port)
    one_host = found.local_size == found.size
    if address is None and one_host:
        address = "127.0.0.1"
    if address is not None and port is None and job is not None:
        port = _port(zlib.crc32(job.encode()))
    return _launch(environment, launcher, names=names, address=address, port=port)


def _srun(environment: Mapping[str, str]) -> Launch | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS as well, but is no task of a step.
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    else:
        job, step = (_number(environment, f"SLURM_{each}") for each in ("JOB_ID", "STEP_ID"))
        port = _port(job + 101 * step)
    found = _launch(
        environment,
        "srun",
        names=("SLURM_PROCID", size, "SLURM_LOCALID", ""),
        address=address,
        port=port,
    )
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "")
    if node.isdigit() and int(node) < len(counts):
        return Launch(**{**vars(found), "local_size": counts[int(node)]})
    return found


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]; [] for what is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it.

    Args:
        nodes: "gpu[003-008,011],login1", say.

    Returns:
        "gpu003".
    """
    found = re.match(r"([^\[,]+)(?:\[([^\]]*)\])?([^\[,]*)", nodes)
    if found is None:
        raise LaunchError(f"{nodes!r} is no list of hosts as Slurm writes it; set MASTER_ADDR")
    numbers = re.split(r"[-,]", found[2])[0] if found[2] else ""
    return f"{found[1]}{numbers}{found[3]}"


def _launch(
    environment: Mapping[str, str],
    launcher: str,
    *,
    names: tuple[str, ...],
    address: str | None,
    port: int | None,
) -> Launch:
    """A launch of the variables called rank, size, local rank and local size."""
    rank, size = (_number(environment, name) for name in names[:2])
    local_rank = _number(environment, names[2]) if names[2] in environment else 0
    local_size = _number(environment, names[3]) if names[3] in environment else 0
    if not rank < size:
        raise LaunchError(
            f"{names[0]}={rank}, but {names[1]}={size}: ranks are 0 to {size - 1}; start the "
            f"ranks by one launcher, or unset both for one process"
        )
    if local_size and not local_rank < local_size <= size:
        raise LaunchError(
            f"{names[2]}={local_rank}, {names[3]}={local_size} and {names[1]}={size} contradict "
            "one another; start the ranks by one launcher, or unset them for one process"
        )
    return Launch(launcher, rank, size, local_rank, local_size, address, port)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise LaunchError(
            f"{name}={text!r} in the environment is no whole number of 0 or more; start the ranks "
            "by torchrun, mpirun or srun, or unset it for one process"
        )
    return int(text)


def _port(number: int) -> int:
    return PORTS[0] + number % PORTS[1]


def _check_equal(first: Launch, second: Launch) -> None:
    if (first.rank, first.size) != (second.rank, second.size):
        words = [
            "RANK and WORLD_SIZE say" if each.launcher == "environment" else f"{each.launcher} says"
            for each in (first, second)
        ]
        raise LaunchError(
            f"{words[0]} rank {first.rank} of {first.size}, but {words[1]} rank {second.rank} of "
            f"{second.size}; unset the variables of the one that did not start these processes"
            + (" (RANK, WORLD_SIZE, LOCAL_RANK)" if first.launcher == "environment" else "")
        )


def _check_unranked(environment: Mapping[str, str], inner: list[Launch]) -> None:
    """Refuse a number of ranks without the rank of this process."""
    size = environment.get("WORLD_SIZE")
    if size is not None and size != "1":
        for each in inner[:1]:
            if size != str(each.size):
                raise LaunchError(
                    f"WORLD_SIZE={size} in the environment, but {each.launcher} started "
                    f"{each.size}; unset WORLD_SIZE, or start {size} ranks"
                )
        if not inner:
            raise LaunchError(
                f"WORLD_SIZE={size} in the environment, but no RANK, so this process does not know "
                "which one it is; start the ranks by torchrun, mpirun or srun, or unset WORLD_SIZE "
                "for one process"
            )
    tasks = environment.get("SLURM_NTASKS", "1")
    if not inner and "SLURM_JOB_ID" in environment and tasks.isdigit() and int(tasks) > 1:
        raise LaunchError(
            f"Slurm gave this job {tasks} tasks (SLURM_NTASKS), but this process was started "
            "without srun and would be the only one; write srun in front of the command, or "
            "srun --ntasks=1 for one process"
        )
