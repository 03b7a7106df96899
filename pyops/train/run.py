"""train: a run from its configuration to its outcome.

    ranks at hand -> layout -> process group -> folder -> TrainingLoop -> Outcome

The same code runs as one process and under torchrun.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.config import Config
from pyops.elastic.membership import Choice
from pyops.launch.joining import launched
from pyops.launch.requeue import requeue
from pyops.train.host.memory import check_memory
from pyops.train.host.observed import check_progress, observed
from pyops.train.host.ranks import StopRequest, joined_ranks, stand_by
from pyops.train.host.replica import RunReplica
from pyops.train.host.run_folder import continues, finished, only_run_in
from pyops.train.loop import Training, TrainingLoop
from pyops.train.pretrained.folder_training import FolderTraining
from pyops.train.report.notes import collected_notes
from pyops.train.report.outcome import Outcome
from pyops.train.sample_training import SampleTraining
from pyops.train.setup.adapted_layout import adapted, started_ranks, trouble_ahead
from pyops.train.text_training import TextTraining

__all__ = ["train"]


def train(config: Config, *, resume: bool = False) -> Outcome:
    """Train as `config` says; outputs go to config.folder.

    Runs alone, or as one of the ranks that torchrun, mpirun or srun started (see
    `pyops.launch.join`). When torchrun or Slurm starts the ranks again, they go on by themselves.

    Args:
        config: The run's configuration.
        resume: Continue from the newest checkpoint in the folder, if there is one. Otherwise a
            folder of an earlier run is moved aside.

    Returns:
        How the run ended.

    Raises:
        ConfigError, CorpusError, CheckpointError: On every rank alike, for what the user can put
            right.
        LaunchError: Variables of launchers that contradict one another.
    """
    launched()
    config, chosen = adapted(config, started_ranks(), idle=not dist.is_initialized())
    if chosen.idle and int(os.environ["RANK"]) >= chosen.grid.ranks:
        return Outcome(0, None, None, 0, stand_by())
    if config.healing.on:
        return _healed(config, chosen, resume=resume)
    check_memory(config, ranks=chosen.grid.ranks)
    return _trained(config, chosen, resume=resume, request=StopRequest())


def _healed(config: Config, chosen: Choice, *, resume: bool) -> Outcome:
    """Train as one of the ranks of which those that die are replaced: where one is lost, the others
    leave everything that has to do with the process group, meet again, and go on."""
    replica = RunReplica(config.healing, device=config.train.device)
    check_memory(config, ranks=chosen.grid.ranks)
    with StopRequest() as request:
        while True:
            replica.meet()
            lost = ""
            try:
                outcome = _trained(
                    config, chosen, resume=resume or replica.begun, request=request, replica=replica
                )
            except DisagreementError:
                raise
            except CommunicationError as error:
                lost = str(error)
            if lost:  # the error itself is gone, and with it the frames that held the training
                gc.collect()
                replica.lost(CommunicationError(lost))
            elif replica.end():
                return outcome


def _trained(
    config: Config,
    chosen: Choice,
    *,
    resume: bool,
    request: StopRequest,
    replica: RunReplica | None = None,
) -> Outcome:
    """Join the other ranks, and train to the end, or to the signal that ends the run early."""
    joined = joined_ranks(config.train, active=chosen.grid.ranks, request=request)
    with joined as device, only_run_in(config.folder), collected_notes() as notes:
        restarted = continues(config.folder)
        resume = restarted or resume
        if replica is None or not replica.begun:  # later meetings are no restarts
            check_progress(config, restarted=restarted)
        loop = _make_loop(config, device=device, resume=resume, replica=replica)
        if replica is not None:
            replica.begin()
        notes.show(loop.display.note)
        if chosen.reason:
            loop.display.note(f"{chosen.reason}{trouble_ahead()}")
        if loop.training.is_over:
            loop.display.note(_already_finished(config, loop.training.num_steps))
        first_step = loop.training.step
        try:
            # Where ranks are replaced, signals are listened to between two meetings, too.
            with request if replica is None else nullcontext(), observed(config):
                # A signal that ends a run with its last step leaves nothing to go on with.
                stopped = loop.run(request) and not loop.training.is_over
            request.number = _first_signal(request.number) if stopped else 0
            outcome = loop.finish(stopped_by=request.number)
        except BaseException:
            loop.abandon()
            raise
        if loop.rank == 0 and not stopped:
            finished(config.folder)
        if stopped:
            _go_on_later(loop, request.number, progressed=loop.training.step > first_step)
        return outcome


def _first_signal(number: int) -> int:
    """This rank's signal, or that of the first rank that was sent one. A collective."""
    numbers = gather(number)
    return number or next((each for each in numbers if each), int(signal.SIGTERM))


def _go_on_later(loop: TrainingLoop, number: int, *, progressed: bool) -> None:
    """Have Slurm start a run again that a signal ended, once all ranks have written their part of
    the checkpoint: Slurm ends what is left of the job at once."""
    gather(None)
    if loop.rank == 0 and (told := requeue(number, progressed=progressed)):
        loop.display.note(told)


def _make_loop(
    config: Config, *, device: torch.device, resume: bool, replica: RunReplica | None
) -> TrainingLoop:
    def make_training(checkpoint: Path | None) -> Training:
        if config.over_samples:
            return SampleTraining(config, device=device, checkpoint=checkpoint)
        if config.model_folder.given:
            return FolderTraining(config, device=device)
        return TextTraining(config, device=device)

    return TrainingLoop(make_training, config, resume=resume, replica=replica)


def _already_finished(config: Config, num_steps: int) -> str:
    key = "task.num_epochs" if config.over_samples and config.task.num_epochs else "train.num_steps"
    return (
        f"already finished: {config.folder} has all {num_steps} steps; set {key} to more, or "
        "leave out --resume to begin anew"
    )
