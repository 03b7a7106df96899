"""join: the ranks that any launcher started become one process group.

    environment -> recognized -> torchrun's variables -> Rendezvous -> init_process_group
                       |
                  Open MPI, Hydra on several hosts: rank 0's address, told over MPI

Whatever reads torchrun's variables then works under every launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pyops.launch.interfaces import interface_trouble
from pyops.launch.rendezvous import Rendezvous
from pyops.launchers import MPI, PORTS, Launch, LaunchError, check_world, recognized

__all__ = ["join", "launched"]

MPI_BACKEND = "mpi4py"  # as pyops.comm.mpi calls it, which is imported where MPI is asked for


def join(*, backend: str = "auto") -> Launch:
    """Join the ranks that torchrun, mpirun or srun started: afterwards the default process group is
    there, and torchrun's variables are in the environment. Collective: every rank must call it.

    A process that was started alone, or has a process group, keeps what it has.

    Args:
        backend: Of the process group: "auto" (Gloo, with NCCL for CUDA tensors), "mpi" (see
            `pyops.comm.mpi`), or what torch.distributed takes.

    Returns:
        The launcher that was recognized, and this process's rank, size and local rank.

    Raises:
        LaunchError: Variables of launchers that contradict one another, mpi4py of another MPI than
            mpirun's, no way to the host where the ranks meet, or, on every rank alike, a network
            interface that a rank's host does not have.
        TimeoutError: A rank did not come; the error names it.
    """
    found = launched()
    if found.size == 1 or dist.is_initialized():
        return found
    if backend == "mpi":
        backend = _mpi_backend(found)
    elif backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available() and found.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(found.local_rank)
    nccl, over_mpi = torch.cuda.is_available(), backend == MPI_BACKEND
    trouble = "" if over_mpi else interface_trouble(found.rank, nccl=nccl)
    meeting = Rendezvous.of_environment(trouble=trouble)
    dist.init_process_group(
        backend, store=meeting.store, rank=meeting.rank, world_size=meeting.size
    )
    return found


def launched(environment: MutableMapping[str, str] | None = None) -> Launch:
    """How this process was started; puts torchrun's variables into the environment where another
    launcher did not.

    Args:
        environment: os.environ, or another mapping.

    Raises:
        LaunchError: See `join`.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in environment and dist.is_initialized():
        return Launch("environment", dist.get_rank(), dist.get_world_size(), local_size=0)
    found = recognized(environment)
    if found.size > 1 and (found.address is None or found.port is None):
        found = _with_address(found, environment)
    environment.update(found.variables())
    return found


def _with_address(found: Launch, environment: MutableMapping[str, str]) -> Launch:
    """With the host and the port where the ranks meet, of which the launcher said nothing."""
    if found.launcher not in MPI:
        raise LaunchError(
            f"rank {found.rank} of {found.size} has no host where the ranks meet: set MASTER_ADDR "
            "to the host of rank 0 and MASTER_PORT to a free port there, the same for all ranks"
        )
    told = told_by_mpi(found, world=_mpi_world)
    if told is not None:
        return replace(found, address=told[0], port=told[1])
    if found.local_size == found.size:  # the ranks' parent is the same
        return replace(found, port=PORTS[0] + os.getppid() % PORTS[1])
    raise LaunchError(
        f"{found.launcher} started {found.size} ranks on several hosts and does not tell where "
        "they meet: pip install mpi4py, or pass MASTER_ADDR and MASTER_PORT to all ranks (mpirun "
        "-x MASTER_ADDR=host -x MASTER_PORT=29500 with Open MPI, -genv with Hydra)"
    )


def told_by_mpi(found: Launch, *, world: Callable[[], Any]) -> tuple[str, int] | None:
    """The host of rank 0 and a free port there, told to all ranks by MPI. A collective.

    Args:
        found: What the launcher says.
        world: Gives MPI's world, with mpi4py's methods, and the name of its library; None where
            there is no mpi4py, or it finds no MPI.

    Raises:
        LaunchError: The world of mpi4py is not the launcher's: it is of another MPI.
    """
    given = world()
    if given is None:
        return None
    comm, library = given
    check_world(found, (comm.Get_rank(), comm.Get_size()), library)
    own = None
    if found.rank == 0:
        host = "127.0.0.1" if found.local_size == found.size else socket.gethostname()
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            own = (host, probe.getsockname()[1])
    host, port = comm.bcast(own, root=0)
    return host, port


def _mpi_backend(found: Launch) -> str:
    """The name of the backend of MPI, made known to torch, with the launcher's ranks."""
    from pyops.comm.mpi.process_group import BACKEND, register

    try:
        world = register()
    except ValueError as error:
        raise LaunchError(str(error)) from None
    given = _mpi_world()
    check_world(found, (world.Get_rank(), world.Get_size()), "" if given is None else given[1])
    return BACKEND


def _mpi_world() -> tuple[Any, str] | None:
    try:
        from mpi4py import MPI as mpi
    except (ImportError, RuntimeError, OSError):  # none, or it finds no library
        return None
    return mpi.COMM_WORLD, mpi.Get_library_version().splitlines()[0].strip()
