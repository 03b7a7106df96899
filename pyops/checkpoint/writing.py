"""Saving in three parts: agree on what will be written, write one's own files, make of all ranks'
files a checkpoint.

    prepare   all ranks: what do you hold? -> rank 0: mkdir step-7.tmp       a mistake raises here
    write     rank 0: shared.safetensors
              rank r: own-r.safetensors, shards-r.safetensors                no communication
    commit    rank 0: manifest.json, fsync, rename step-7.tmp -> step-7      killed before: the old
                                                                             checkpoint is whole

All three on the thread that calls `save`, or the last two in the background (`background.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyops.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    CheckpointError,
    seal,
    take_apart,
)
from pyops.checkpoint.format.refusal import SHARD_FILES, SHARED, own_file
from pyops.checkpoint.format.shards import (
    Card,
    StatePath,
    describe,
    find_shards,
    insert,
    merge,
    path_text,
)
from pyops.checkpoint.format.tensor_file import Content, check_dtypes, write_tensors
from pyops.comm.agreement import agree, gather
from pyops.mesh import check_initialized

__all__ = [
    "Plan",
    "commit",
    "discard",
    "make_empty",
    "prepare",
    "refusal",
    "replace_folder",
    "write",
    "write_folder",
]


@dataclass
class Plan:
    """What one rank will write.

    Attributes:
        files: {file: {name: tensor}}, by reference or elsewhere. trees: JSON; state's: rank 0.
    """

    folder: Path
    rank: int
    files: dict[str, dict[str, Content]] = field(default_factory=dict)
    own_tree: Any = None
    state_tree: Any = None

    @property
    def aside(self) -> Path:
        """Where the checkpoint is written before it is whole."""
        return self.folder.with_name(self.folder.name + ".tmp")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this rank will write."""
        return sum(
            prod(tensor.shape) * tensor.dtype.itemsize
            for tensors in self.files.values()
            for tensor in tensors.values()
        )

    @property
    def numel(self) -> int:
        """Numbers of the state that this rank will write, without what is its own alone."""
        own = own_file(self.rank)
        return sum(
            prod(tensor.shape)
            for name, tensors in self.files.items()
            if name != own
            for tensor in tensors.values()
        )


def prepare(
    folder: Path | str,
    state: Any,
    *,
    own: Any,
    group: dist.ProcessGroup | None,
    place: bool = True,
) -> Plan:
    """This rank's plan, and the empty folder aside. A collective; CheckpointError or TypeError on
    all ranks alike.

    Args:
        place: Whether rank 0 makes the folder; otherwise each rank makes one of its own.
    """
    check_initialized("checkpoint.save", group)
    plan = Plan(Path(folder), dist.get_rank(group) if dist.is_initialized() else 0)
    shard_file = f"{SHARD_FILES}{plan.rank:05}.safetensors"
    cards: dict[StatePath, list[Card]] = {}
    error: Exception | None = None
    try:
        for path in find_shards(own):
            raise TypeError(
                f"own[{path_text(path)!r}] is a Shard; shards belong in state, where the "
                "ranks' parts become a whole"
            )
        plan.own_tree = take_apart(own, plan.files.setdefault(own_file(plan.rank), {}), what="own")
        check_dtypes(plan.files[own_file(plan.rank)], what="own")
        cards, shards = describe(find_shards(state), file=shard_file)
        check_dtypes(shards)
        if shards:
            plan.files[shard_file] = shards
    except Exception as caught:  # whatever it is: the other ranks wait to be told
        error = caught
    told = gather((error and (type(error), str(error)), cards), group=group)
    if any(failure for failure, _ in told):
        agree(error, group=group)
    wholes = merge([each for _, each in told])
    if plan.rank == 0:
        try:
            plan.state_tree = take_apart(insert(state, wholes), plan.files.setdefault(SHARED, {}))
            check_dtypes(plan.files[SHARED])
            if place:
                _check_place(plan.folder)
                make_empty(plan.aside)
        except Exception as caught:
            error = caught
    agree(error, group=group)
    return plan


def write(plan: Plan) -> dict[str, Any]:
    """Write the plan's files; what the manifest says of them.

    Raises:
        CheckpointError: For a full disk, say.
    """
    entry: dict[str, Any] = {"rank": plan.rank, "tree": plan.own_tree, "files": {}, "tensors": {}}
    try:
        for name, tensors in plan.files.items():
            entry["files"][name] = write_tensors(plan.aside / name, tensors)
            entry["tensors"][name] = {
                n: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
                for n, t in tensors.items()
            }
    except OSError as error:
        raise refusal(plan.folder, error) from error
    return entry


def commit(plan: Plan, entries: Sequence[dict[str, Any]]) -> None:
    """Rank 0: write the manifest of what all ranks have written, and put the checkpoint in its
    place. CheckpointError."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tree": {"state": plan.state_tree},
        "own": {str(entry["rank"]): entry["tree"] for entry in entries},
        "tensors": {
            file: names for entry in entries for file, names in entry["tensors"].items() if names
        },
        "files": {file: told for entry in entries for file, told in entry["files"].items()},
    }
    try:
        with open(plan.aside / MANIFEST, "w") as file:
            json.dump(seal(manifest), file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(plan.aside)
        replace_folder(plan.folder, plan.aside)
    except OSError as error:
        raise refusal(plan.folder, error) from error


def discard(plan: Plan) -> None:
    """Rank 0: remove what was written aside."""
    if plan.rank == 0:
        shutil.rmtree(plan.aside, ignore_errors=True)


def refusal(folder: Path, error: OSError) -> CheckpointError:
    """What a save that can't be written raises."""
    return CheckpointError(
        f"checkpoint {folder} can't be written: {error.strerror or error}; make room or "
        "choose another folder. "
        "Checkpoints from before are untouched"
    )


def _check_place(folder: Path) -> None:
    """CheckpointError unless there is nothing, an empty folder, or a checkpoint and nothing else,
    which is then replaced."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is there already and is no folder; remove it, or name another place"
        )
    there = sorted(os.listdir(folder))
    foreign = [
        name
        for name in there
        if name != MANIFEST and not re.fullmatch(r"(shared|(own|shards)-\d+)\.safetensors", name)
    ]
    if there and (foreign or MANIFEST not in there):
        what = (
            f"holds {', '.join(foreign[:3])}, which no checkpoint has"
            if foreign
            else f"has no {MANIFEST}"
        )
        raise CheckpointError(
            f"{folder} is there already and {what}; a save replaces checkpoints and "
            "nothing else: remove it, or name another "
            "place"
        )


def replace_folder(folder: Path, aside: Path) -> None:
    """Put `aside` in the place of `folder`. Killed in between, the old one is whole under the name
    .old."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(aside, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_folder(folder: Path, fill: Callable[[Path], None], *, who: str) -> None:
    """Write a folder beside its place and rename it: whatever fails, what was there stays, and
    nothing is left beside it.

    Args:
        folder: Its place; what an earlier call wrote there is replaced.
        fill: Called with the empty folder aside; writes its files.
        who: The caller, for the message.

    Raises:
        CheckpointError: Nothing can be written there.
    """
    aside = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        fill(aside)
        replace_folder(folder, aside)
    except OSError as error:
        raise CheckpointError(
            f"{who}: {folder} can't be written: {error.strerror or error}; make room, or name a "
            "place where this process may write"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_empty(aside: Path) -> None:
    """The folder to write in; what a killed save left there goes."""
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise refusal(aside, error) from error
