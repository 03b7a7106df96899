"""RunReplica: this process as one of the ranks of a run whose dead ranks are replaced one by one.

    rank 0   step 7 | copies of state 8 | step 8 ... error | meets | state 8 | step 8 again
    rank 1   step 7 | copies of state 8 | killed
             its replacement                               | meets | state 8 | step 8 again

A run of so many ranks has so many ranks always, in the same order, so its losses are those of a run
in which no rank was lost, bit for bit.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.comm.collectives.communicator import Communicator, groups_in_use, release
from pyops.config import ConfigError, HealingConfig
from pyops.failure import CommunicationError
from pyops.healing import Quorum, StateLostError
from pyops.healing.peer_copies import PeerCopies
from pyops.launch.supervisor import STARTED

__all__ = ["RunReplica", "StateHeld"]


TRIES = 3  # of a step, by the same processes
REACHED = timedelta(seconds=60)
BEGUN, OVER = "begun", "over"  # keys in the store


@dataclass(frozen=True)
class StateHeld:
    """A state that the ranks have kept for each other."""

    step: int
    """How many steps have led to it."""
    state: Mapping[str, Any]
    """What a checkpoint holds, of all ranks."""
    own: Any
    """The same, of this rank."""


class RunReplica:
    """This rank, the processes with which it meets, and the copies of states that they keep.

    Args:
        options: How ranks meet, and how often states are copied.
        device: As [train] says.

    Attributes:
        rank: As whoever started this process says.
        begun: Whether the run had begun before the last meeting: it goes on from what there is.

    Raises:
        ConfigError: The process was started by something that starts no replacements, or would
            train on a GPU.
        CommunicationError: The store is not reached.
    """

    def __init__(self, options: HealingConfig, *, device: str) -> None:
        if device == "auto" and torch.cuda.is_available():
            raise ConfigError(
                f"healing.copy_every is {options.copy_every}, which takes process groups of Gloo "
                "alone, but train.device is 'auto', which is a GPU here; set it to 'cpu', or "
                "healing.copy_every to 0"
            )
        if STARTED not in os.environ:
            raise ConfigError(
                f"healing.copy_every is {options.copy_every}, but nobody starts replacements for "
                "ranks that die: start this run with pyops launch CONFIG.toml --ranks-per-node N, "
                "or set healing.copy_every to 0"
            )
        self.rank, self._size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        self._every = options.copy_every
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        given = dist.TCPStore(host, port, is_master=False, timeout=REACHED)
        self._store = dist.PrefixStore("pyops/run", given)
        self._quorum = Quorum(given, options.quorum(self._size), place=self.rank)
        self._copies = PeerCopies()
        self._held: StateHeld | None = None
        self._saved = False
        self._failures, self._failed_with = 0, (-1, [-1])
        self._step = 0
        self.begun = False

    def meet(self) -> None:
        """Form the process group of all ranks, and find the newest state that they have. Returns
        when every rank, or the replacement of one, has come.

        Raises:
            CommunicationError: A rank does not come in time, or the store is gone.
        """
        while True:
            group = self._quorum.meet()
            try:
                self._copies.join(group)
                self._held = self._recovered()
                self.begun = any(gather(self._store.check([BEGUN])))
                self._saved = False
                return
            except CommunicationError as error:
                self.lost(error)

    def take_held(self) -> StateHeld | None:
        """The state to go on from, once; None where only a checkpoint on the disk may have it."""
        held, self._held = self._held, None
        if held is not None:
            self._step = held.step
        return held

    def begin(self) -> None:
        """Note that the folder of the run is there: from now on nobody begins anew."""
        self._store.set(BEGUN, "1")

    def due(self, step: int) -> bool:
        """Whether the state is copied that this number of steps has led to."""
        return not self._saved or step % self._every == 0

    def save(self, step: int, state: Mapping[str, Any], own: Any) -> None:
        """Copy the state into the memory of this rank and of its neighbor. A collective.

        Args:
            step: How many steps have led to it.
            state: What a checkpoint holds, of all ranks.
            own: The same, of this rank.

        Raises:
            CommunicationError: A rank is lost.
        """
        if self._saved:
            self._copies.settle()  # every rank has ended the last save: a whole step came after it
        self._copies.save(step, {"state": state, "own": {self.rank: pickle.dumps(own)}})
        self._saved, self._step = True, step
        if self.rank == 0:
            self._quorum.note_progress(step)

    def lost(self, error: CommunicationError) -> None:
        """Leave the process group after an error; raise it where nobody is lost who could be the
        reason.

        Raises:
            CommunicationError: The same processes have failed at the same step again and again.
        """
        failed_with = self._step, list(self._quorum.members)
        self._failures = self._failures + 1 if failed_with == self._failed_with else 1
        self._failed_with = failed_with
        for group in groups_in_use():
            with suppress(CommunicationError):  # has the others fail who wait in shared memory
                Communicator.of(group).leave(error, device=torch.device("cpu"))
        self._let_go()
        if self._failures >= TRIES:
            self._quorum.leave()
            raise CommunicationError(
                f"rank {self.rank}: the steps after step {self._step} failed {TRIES} times, though "
                f"all ranks live: {error}"
            ) from None

    def end(self) -> bool:
        """Leave when the run is over on every rank; False where one is lost whose work the others
        do again. A collective."""
        try:
            gather(None)
        except CommunicationError as error:
            # Who has come through has heard from all.
            if not self._store.check([OVER]):
                self.lost(error)
                return False
        self._store.set(OVER, "1")
        self._let_go()
        self._quorum.leave()
        return True

    def _let_go(self) -> None:
        """Of every group, whole or not."""
        for group in groups_in_use():
            release(group)
        self._quorum.abandon()

    def _recovered(self) -> StateHeld | None:
        try:
            found = self._copies.recover(lambda path, shape: None)
        except StateLostError:  # on every rank alike; the disk may have a checkpoint
            self._copies = PeerCopies()
            assert dist.group.WORLD is not None
            self._copies.join(dist.group.WORLD)
            return None
        if found is None:
            return None
        step, saved = found
        return StateHeld(step, saved["state"], pickle.loads(saved["own"][self.rank]))
