"""MemoryCheckpoints: every rank's state in its own host memory and in that of a neighbor.

    node A, rank 0   [state of 0] [state of 1]        /dev/shm/pyops-RUN/rank-00000
                          |   ^
                          v   |
    node B, rank 1   [state of 0] [state of 1]        /dev/shm/pyops-RUN/rank-00001

A process that is killed leaves its node's memory as it is; a node that is lost has a neighbor that
keeps its state. After a restart the newest step of which every rank's state is there somewhere is
written to the run's folder as an ordinary checkpoint, from which the run goes on as from any
(Wang et al., Gemini, SOSP 2023; the local checkpoints of Megatron Core).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.snapshot import (
    HEADER,
    Header,
    Snapshot,
    put_in_place,
    snapshot_name,
    write_header,
)
from pyops.checkpoint.writing import Plan, commit, discard, make_empty, prepare, write
from pyops.comm.agreement import agree, gather, naming_lost_ranks, on_first_rank, ranks_agree

__all__ = ["MemoryCheckpoints", "neighbor_distance"]

CHUNK = 32 << 20  # bytes of a message to the neighbor
KEPT = 2  # last steps; a rank that is killed while it writes one has the step before
HEADER_BYTES = 1 << 16  # about what a header takes
FP32_BYTES = 4
Claim = tuple[int, int, int, str, str]  # step, whose state, the rank that sees it, host, folder


def neighbor_distance(hosts: Sequence[str]) -> int:
    """How many ranks farther the neighbor of each rank is: on another host, for as many ranks as it
    can be.

    Args:
        hosts: Name of each rank's host, in rank order.
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
        self._host = socket.gethostname()
        distance = neighbor_distance(gather(self._host))
        self._to = (self._rank + distance) % self._size
        self._from = (self._rank - distance) % self._size

    @property
    def own_folder(self) -> Path:
        """Where this rank keeps its own state and that of the rank whose neighbor it is."""
        return self.folder / _place_of(self._rank)

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
        copies = {self._rank, self._from}
        wanted = KEPT * sum(sizes[rank] for rank in copies)
        error: Exception | None = None
        there, device, held = 0, 0, 0
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            disk = os.statvfs(self._root)
            there, device = disk.f_bavail * disk.f_frsize, os.stat(self._root).st_dev
            held = sum(path.stat().st_size for path in self.own_folder.glob("*/*"))
        except OSError as caught:
            error = self._refusal(caught)
        agree(error)
        place = (self._host, device)
        same = [(w, h) for p, w, h in gather((place, wanted, held)) if p == place]
        wanted, there = sum(w for w, _ in same), there + sum(h for _, h in same)
        if wanted > there:
            error = CheckpointError(
                f"the checkpoints in memory of {len(same)} ranks on {self._host} take {wanted} "
                f"bytes, and {self._root} has {there}: mount more memory there (mount -o "
                "remount,size=...; for a container --shm-size), name another folder, or take none"
            )
        agree(error)

    def save(self, step: int, state: Any, *, own: Any = None) -> None:
        """Write this rank's state to its memory, and send a copy to its neighbor. A collective.

        Args:
            step: Steps that were taken.
            state, own: As `pyops.checkpoint.save` takes them.

        Raises:
            CheckpointError: On all ranks alike, if the memory is full, say. The checkpoint before
                is still whole then.
            TypeError: For a state that a checkpoint can't hold, before anything is written.
        """
        folder = self.own_folder / snapshot_name(step, self._rank)
        plan = prepare(folder, state, own=own, group=None, place=False)
        with ranks_agree():
            try:
                # All ranks have met, so the newest step before is whole on all of them.
                self._remove_older(step)
                make_empty(plan.aside)
                header = Header(self._run, step, self._rank, self._size, write(plan))
                write_header(plan.aside, replace(header, state_tree=plan.state_tree))
                put_in_place(plan.aside, folder)
            except OSError as error:
                raise self._refusal(error) from None
        if self._size > 1:
            self._send_and_keep(folder, step)

    def _remove_older(self, step: int) -> None:
        """Leave the newest step before this one, and nothing that a killed process left."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.own_folder.mkdir(exist_ok=True)
        whole: list[Path] = []
        other: list[Path] = []
        for path in self.own_folder.iterdir():
            try:
                found = Snapshot.read(path, run=self._run, world=self._size)
            except CheckpointError:
                other.append(path)
                continue
            kept = found.header.rank in (self._rank, self._from) and found.header.step < step
            (whole if kept else other).append(path)
        for source in {self._rank, self._from}:
            names = sorted(path for path in whole if path.name.endswith(f".of-{source:05}"))
            other += names[: 1 - KEPT]
        for path in other:
            shutil.rmtree(path, ignore_errors=True)

    def _send_and_keep(self, folder: Path, step: int) -> None:
        """Send this rank's snapshot, and keep that of the rank whose neighbor it is."""
        mine = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir())]
        theirs = gather(mine)[self._from]
        kept = self.own_folder / snapshot_name(step, self._from)
        aside = kept.with_name(kept.name + ".tmp")
        outgoing, incoming = _pieces(mine), _pieces(theirs)
        error: Exception | None = None
        try:
            make_empty(aside)
        except CheckpointError as caught:
            error = caught
        with naming_lost_ranks("handing a checkpoint to the neighbor", group=None):
            for turn in range(max(len(outgoing), len(incoming))):
                works, arrived = [], None
                if turn < len(outgoing):
                    name, start, length = outgoing[turn]
                    try:
                        piece = np.fromfile(folder / name, np.uint8, length, offset=start)
                    except OSError as caught:
                        error = error or self._refusal(caught)
                        piece = np.zeros(length, np.uint8)  # the neighbor waits for so many bytes
                    works.append(dist.isend(torch.from_numpy(piece), self._to))
                if turn < len(incoming):
                    arrived = torch.empty(incoming[turn][2], dtype=torch.uint8, device="cpu")
                    works.append(dist.irecv(arrived, self._from))
                for work in works:
                    if work is not None:
                        work.wait()
                if arrived is None or error is not None:
                    continue  # what follows is received still, so that no rank waits
                try:
                    with open(aside / incoming[turn][0], "ab") as file:
                        file.write(arrived.numpy().data)
                except OSError as caught:
                    error = self._refusal(caught)
        if error is None:
            try:
                put_in_place(aside, kept)
            except OSError as caught:
                error = self._refusal(caught)
        agree(error)

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
        claims: list[Claim] = [
            (each.header.step, each.header.rank, self._rank, self._host, path)
            for path, each in snapshots.items()
        ]
        told = gather((claims, notes))
        claims = [claim for found, _ in told for claim in found]
        said = dict.fromkeys(note for _, found in told for note in found)
        while True:
            chosen = self._newest(claims, newer_than=newer_than)
            if not chosen:
                return None, list(said)
            mine = [snapshots[path] for _, _, rank, _, path in chosen if rank == self._rank]
            refused: list[tuple[str, str, str]] = []
            for each in mine:
                try:
                    each.compare()
                except CheckpointError as error:
                    refused.append((self._host, str(each.folder), str(error)))
            bad = {(host, path): text for found in gather(refused) for host, path, text in found}
            if not bad:
                break
            said.update(dict.fromkeys(bad.values()))
            claims = [claim for claim in claims if (claim[3], claim[4]) not in bad]
        return self._to_disk(folder, chosen[0][0], mine), list(said)

    def _look(self) -> tuple[dict[str, Snapshot], list[str]]:
        """Snapshots that this rank sees in its host's memory, by folder, and what it refuses."""
        found: dict[str, Snapshot] = {}
        notes: list[str] = []
        for path in sorted(self.folder.glob("rank-*/step-*")):
            if path.suffix == ".tmp":
                notes.append(f"the copy {path} is refused: it was not written to its end")
                continue
            try:
                found[str(path)] = Snapshot.read(path, run=self._run, world=self._size)
            except CheckpointError as error:
                notes.append(str(error))
        return found, notes

    def _newest(self, claims: Sequence[Claim], *, newer_than: int) -> list[Claim]:
        """Of each rank's state of the newest step that is whole, who gives it: the same on every
        rank, which all have the same claims."""
        steps = sorted({step for step, *_ in claims if step > newer_than}, reverse=True)
        for step in steps:
            givers: dict[int, Claim] = {}
            for claim in sorted(claims, key=_preference):
                if claim[0] == step:
                    givers.setdefault(claim[1], claim)
            if len(givers) == self._size:
                return [givers[rank] for rank in range(self._size)]
        return []

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

    def _refusal(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint in memory, {self.own_folder}, can't be written: "
            f"{error.strerror or error}; make room there, or name another folder"
        )


def _preference(claim: Claim) -> tuple[bool, bool, int, str]:
    """A rank gives its own state, and its own copy of it, before a neighbor's is asked for."""
    _, source, rank, _, folder = claim
    return Path(folder).parent.name != _place_of(source), rank != source, rank, folder


def _place_of(rank: int) -> str:
    return f"rank-{rank:05}"


def _pieces(files: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Messages of which the files are made: name, first byte, bytes. The header is the last."""
    ordered = sorted(files, key=lambda file: (file[0] == HEADER, file[0]))
    return [
        (name, start, min(CHUNK, size - start))
        for name, size in ordered
        for start in range(0, size, CHUNK)
    ]


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
