"""Slurm starts a job again that its time limit or a preemption has ended, if steps are left.

    SIGUSR1 (time limit) or SIGTERM (preemption) -> checkpoint -> scontrol requeue, by rank 0, once

A job that saves and ends within its grace time counts as done, and Slurm does not requeue it by
itself. A cancelled one, one that may not be requeued, and one that took no step since it was
requeued last are left alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping

__all__ = ["requeue"]

TIMEOUT = 60.0  # seconds that Slurm's controller has to answer
GOES_ON = ("RUNNING", "PREEMPTED", "SUSPENDED", "STOPPED")  # not what somebody cancelled


def requeue(number: int, *, progressed: bool, environment: Mapping[str, str] | None = None) -> str:
    """Have Slurm start this job again. For rank 0 of a run that a signal ended with steps left.

    Args:
        number: The signal.
        progressed: Whether a step was taken since the job was started last.
        environment: os.environ, or another mapping.

    Returns:
        What was done or why not, in a line; "" where Slurm did not start the job, or the signal is
        a person's.
    """
    environment = os.environ if environment is None else environment
    job = environment.get("SLURM_JOB_ID", "")
    if not job or number not in (signal.SIGUSR1, signal.SIGTERM):
        return ""
    if not progressed and environment.get("SLURM_RESTART_COUNT", "0") != "0":
        return (
            f"Slurm's job {job} was requeued before and took no step since: not requeued again; "
            "give it more time, or a longer --signal=USR1@SECONDS"
        )
    told, trouble = _scontrol("show", "job", job)
    if trouble:
        return f"Slurm's job {job} was not requeued: {trouble}"
    state = re.search(r"\bJobState=(\w+)", told)
    if state is not None and state[1] not in GOES_ON:
        return f"Slurm's job {job} is {state[1]}: not requeued"
    if "Requeue=0" in told:
        return f"Slurm's job {job} may not be requeued; submit it with sbatch --requeue"
    _, trouble = _scontrol("requeue", job)
    if trouble:
        return f"Slurm's job {job} was not requeued: {trouble}"
    return f"Slurm's job {job} is requeued and goes on from the checkpoint"


def _scontrol(*arguments: str) -> tuple[str, str]:
    """What scontrol printed, and what went wrong, "" for nothing."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=TIMEOUT
        )
    except FileNotFoundError:
        return "", "scontrol is not on the PATH of rank 0's host; install Slurm's client there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"scontrol {arguments[0]} failed: {error}"
    if done.returncode:
        return "", f"scontrol {arguments[0]} says: {(done.stderr or done.stdout).strip()}"
    return done.stdout, ""
