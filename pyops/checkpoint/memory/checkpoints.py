"""MemoryCheckpoints: every rank's state in its own host memory and in that of a neighbor.

    node A, rank 0   [state of 0] [state of 1]        /dev/shm/pyops-RUN/rank-00000
                          |   ^
                          v   |
    node B, rank 1   [state of 0] [state of 1]        /dev/shm/pyops-RUN/rank-00001

A process that is killed leaves its node's memory as it is; a node that is lost has a neighbor that
keeps its state. After a restart, on any number of ranks and in any order of the hosts, the newest
step of which every rank's state is there somewhere is written to the run's folder as an ordinary
checkpoint, from which the run goes on as from any (Wang et al., Gemini, SOSP 2023; the local
checkpoints of Megatron Core).

What is whole, while step 30 is saved over the copies of step 20:

    of       own memory   neighbor's
    rank 0   20, 30       20            killed now: 30, which both have in their own memory, or,
    rank 1   20, 30       20            where a node is lost as well, 20
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.memory.claims import claims_of, newest
from pyops.checkpoint.memory.exchange import exchange
from pyops.checkpoint.memory.room import check_owner, device_of, machine, room_in
from pyops.checkpoint.memory.snapshot import (
    Header,
    Snapshot,
    put_in_place,
    rank_folder,
    snapshot_name,
    write_header,
)
from pyops.checkpoint.writing import Plan, commit, discard, make_empty, prepare, write
from pyops.comm.agreement import agree, gather, on_first_rank, ranks_agree

__all__ = ["MemoryCheckpoints", "neighbor_distance"]

KEPT = 2  # last steps; a rank that is killed while it writes one has the step before
HEADER_BYTES = 1 << 16  # about what a header takes
FP32_BYTES = 4


def neighbor_distance(hosts: Sequence[str]) -> int:
    """How many ranks farther the neighbor of each rank is: on another host, for as many ranks as it
    can be.

    Args:
        hosts: What names each rank's host, in rank order.
    """
    size = len(hosts)

    def apart(distance: int) -> int:
        return sum(hosts[rank] != hosts[(rank + distance) % size] for rank in range(size))

    return max(range(1, size), key=lambda distance: (apart(distance), -distance), default=0)


class MemoryCheckpoints:
    """The last two checkpoints of a run in host memory, each in two copies.

    All ranks of the default group make one, and call its methods together.

    Args:
        folder: In memory, such as /dev/shm; a folder of the run is made in it.
        run: The run's id, letters, digits and -; a run that goes on has the id that it began with.
    """

    def __init__(self, folder: Path | str, *, run: str) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._run, self._root = run, Path(folder)
        self.folder = self._root / f"pyops-{run}"
        self._machine = machine()
        told = gather((self._machine, time.time_ns()))
        self._attempt = told[0][1]
        self._begun = False  # whether this attempt has saved
        self._newest: int | None = None  # the last step that all ranks and their neighbors have
        distance = neighbor_distance([host for host, _ in told])
        self._to = (self._rank + distance) % self._size
        self._from = (self._rank - distance) % self._size

    @property
    def own_folder(self) -> Path:
        """Where this rank keeps its own state and that of the rank whose neighbor it is."""
        return self.folder / rank_folder(self._rank)

    def check_room(self, state: Any, *, own: Any = None, states_to_come: int = 0) -> None:
        """Refuse a memory that is too small, before anything is written there. A collective.

        Args:
            state, own: What `save` will be given.
            states_to_come: Numbers of fp32 that the optimizer will add for each number of `state`.

        Raises:
            CheckpointError: On all ranks alike, with the bytes wanted and there.
        """
        plan = prepare(self.own_folder, state, own=own, group=None, place=False)
        extra = states_to_come * FP32_BYTES * plan.numel
        sizes = gather(plan.nbytes + HEADER_BYTES + extra)
        wanted = KEPT * sum(sizes[rank] for rank in {self._rank, self._from})
        room, error = None, None
        try:
            room = room_in(self._root, self.folder, wanted=wanted)
        except OSError as caught:
            error = self._refusal(caught)
        except CheckpointError as caught:
            error = caught
        everyone = gather(room)
        if room is not None:
            error = room.refusal(self._root, [each for each in everyone if each is not None])
        agree(error)

    def save(self, step: int, state: Any, *, own: Any = None) -> None:
        """Write this rank's state to its memory, and hand a copy to its neighbor. A collective.

        Args:
            step: Steps that were taken.
            state, own: As `pyops.checkpoint.save` takes them.

        Raises:
            CheckpointError: On all ranks alike, if the memory is full, say. The checkpoint before
                is still whole then.
            TypeError: For a state that a checkpoint can't hold, before anything is written.
        """
        folder = self.own_folder / snapshot_name(step, self._rank)
        if not self._begun:
            self._remove_left()
        plan = prepare(folder, state, own=own, group=None, place=False)
        files: list[tuple[str, int]] = []
        with ranks_agree():
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.own_folder.mkdir(exist_ok=True)
                self._keep_only(self._newest)
                make_empty(plan.aside)
                header = Header(self._run, self._attempt, step, self._rank, self._size, write(plan))
                write_header(plan.aside, replace(header, state_tree=plan.state_tree))
                files = [(path.name, path.stat().st_size) for path in plan.aside.iterdir()]
                put_in_place(plan.aside, folder)
            except (OSError, CheckpointError) as error:  # the memory is full, say
                shutil.rmtree(plan.aside, ignore_errors=True)
                raise self._refusal(error.__cause__ or error) from None
        if self._size > 1:
            self._swap_and_keep(folder, files, step)
        before, self._newest = self._newest, step
        if before is not None and before > step:  # the run was set back: it goes on from here
            self._keep_only(step)

    def _remove_left(self) -> None:
        """Remove what an earlier attempt left on this host, before any rank writes: the newest that
        was whole is on the disk, as this attempt began with it or with something newer."""
        with ranks_agree():
            check_owner(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._begun = True

    def _keep_only(self, step: int | None) -> None:
        """Of what this rank has, leave the copies of this step: one that not all ranks have whole
        is not what they go on from, and a killed process leaves parts."""
        kept = set[str]()
        if step is not None:
            kept = {snapshot_name(step, source) for source in (self._rank, self._from)}
        for path in self.own_folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _swap_and_keep(self, folder: Path, files: Sequence[tuple[str, int]], step: int) -> None:
        """Hand this rank's snapshot over, and keep that of the rank whose neighbor it is."""
        kept = self.own_folder / snapshot_name(step, self._from)
        aside = kept.with_name(kept.name + ".tmp")
        error = exchange(folder, files, aside, to=self._to, source=self._from, host=self._machine)
        with ranks_agree():
            try:
                if error is not None:
                    raise error
                put_in_place(aside, kept)
            except OSError as caught:
                shutil.rmtree(aside, ignore_errors=True)
                raise self._refusal(caught) from None

    def recover(self, folder: Path, *, newer_than: int) -> tuple[Path | None, list[str]]:
        """Write the newest step that is in memory, of every rank, to the disk as a checkpoint. A
        collective.

        Args:
            folder: Of the run's checkpoints, which all ranks see.
            newer_than: The step of the newest checkpoint in it; -1: there is none.

        Returns:
            The folder of the new checkpoint, or None where memory has nothing newer; and what there
            is to say of copies that were refused, the same on every rank.

        Raises:
            CheckpointError: On all ranks alike, if it can't be written.
        """
        snapshots, notes = self._look()
        place = (self._machine, device_of(self.folder))
        told = gather((claims_of(snapshots.values(), seen_by=self._rank, place=place), notes))
        claims = [claim for found, _ in told for claim in found]
        said = dict.fromkeys(note for _, found in told for note in found)
        while True:
            chosen = newest(claims, newer_than=newer_than)
            if not chosen:
                return None, list(said)
            mine = [snapshots[claim.folder] for claim in chosen if claim.seen_by == self._rank]
            refused: list[tuple[tuple[str, int], str, str]] = []
            for each in mine:
                try:
                    each.compare()
                except CheckpointError as error:
                    refused.append((place, str(each.folder), str(error)))
            bad = {(where, path): text for found in gather(refused) for where, path, text in found}
            if not bad:
                break
            said.update(dict.fromkeys(bad.values()))
            claims = [claim for claim in claims if (claim.place, claim.folder) not in bad]
        return self._to_disk(folder, chosen[0].step, mine), list(said)

    def _look(self) -> tuple[dict[str, Snapshot], list[str]]:
        """Snapshots that this rank sees in its host's memory, by folder, and what it refuses."""
        found: dict[str, Snapshot] = {}
        notes: list[str] = []
        try:
            check_owner(self.folder)
        except (CheckpointError, OSError) as error:
            return {}, [str(error)]
        for path in sorted(self.folder.glob("rank-*/step-*")):
            if path.suffix == ".tmp":
                notes.append(f"the copy {path} is refused: it was not written to its end")
                continue
            try:
                found[str(path)] = Snapshot.read(path, run=self._run)
            except CheckpointError as error:
                notes.append(str(error))
        return found, notes

    def _to_disk(self, folder: Path, step: int, mine: Sequence[Snapshot]) -> Path:
        plan = Plan(folder / f"step-{step:08}", self._rank)
        on_first_rank(lambda: make_empty(plan.aside))
        try:
            with ranks_agree():
                try:
                    for each in mine:
                        for path in each.files:
                            shutil.copyfile(path, plan.aside / path.name)
                            _flush(plan.aside / path.name)
                except OSError as error:
                    raise CheckpointError(
                        f"checkpoint {plan.folder} can't be written from memory: "
                        f"{error.strerror or error}; make room, and start the run again"
                    ) from None
            headers = [each for found in gather([each.header for each in mine]) for each in found]
            headers.sort(key=lambda header: header.rank)
            plan.state_tree = headers[0].state_tree
            on_first_rank(lambda: commit(plan, [header.entry for header in headers]))
        finally:
            discard(plan)
        return plan.folder

    def remove(self) -> None:
        """Remove the copies of this run, and of no other, once all ranks are here. A collective."""
        gather(None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _refusal(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint in memory, {self.own_folder}, can't be written: "
            f"{getattr(error, 'strerror', None) or error}; make room there, or name another folder"
        )


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
