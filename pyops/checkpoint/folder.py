"""A checkpoint is a folder that is whole or not there: written beside its place by all ranks, renamed by the first.

rank 0: mkdir step-7.tmp   shared.safetensors    manifest.json, fsync, rename step-7.tmp -> step-7
rank r:                    own-r.safetensors
                           shards-r.safetensors
                         ^                     ^                                                  ^
                         `---- all agree ------'------- all agree: did any rank fail? ------------'
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyops.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    WITH_RANGES,
    WITH_SHARDS,
    CheckpointError,
    read_manifest,
    restore,
    seal,
    take_apart,
)
from pyops.checkpoint.shards import assemble, describe, find_shards, insert, merge, path_text
from pyops.checkpoint.tensor_file import checksum, read_tensors, write_tensors
from pyops.comm.agreement import agree, gather, on_first_rank

__all__ = ["Checkpoints", "load", "save"]

SHARED = "shared.safetensors"
SHARDS = "shards-"


def save(folder: Path | str, state: Any, *, own: Any = None, group: dist.ProcessGroup | None = None) -> None:
    """Write `state` (rank 0's, and every rank's shards) and each rank's `own` to `folder`, replacing what is there when all is
    on the disk.

    state, own: nested dicts, lists and tuples of tensors, numbers, strings, booleans and None. Anywhere in `state`, ranks may
    hold a `pyops.flat.Shard` or `Shards` of one tensor at one path, also where rank 0 has none: together they must cover the
    tensor, once, or CheckpointError names the path before anything is written.

    Raises CheckpointError on all ranks alike when it can't be written, a full disk for one; what was in `folder` before is
    still whole then. Raises TypeError for a state that a checkpoint can't hold.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".tmp")
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    cards, shards = describe(find_shards(state), file=f"{SHARDS}{rank:05}.safetensors")
    wholes = merge(gather(cards, group=group))
    on_first_rank(lambda: _make_empty(aside), group=group)
    error: Exception | None = None
    written: dict[str, Any] = {}
    try:
        for path in find_shards(own):
            raise TypeError(
                f"own[{path_text(path)!r}] is a Shard; shards belong in state, where the ranks' parts become a whole"
            )
        own_tree = _write(aside / f"own-{rank:05}.safetensors", own, written)
        if shards:
            _write_file(aside / f"{SHARDS}{rank:05}.safetensors", shards, written)
        tree = _write(aside / SHARED, insert(state, wholes), written) if rank == 0 else None
    except OSError as caught:
        error = _refusal(folder, caught)
    except (TypeError, CheckpointError) as caught:
        error = caught
    parts = gather(None if error else {"rank": rank, "tree": own_tree, **written}, group=group)

    def finish() -> None:
        ranges = any(len(part["offset"]) != len(w.node["shape"]) for w in wholes.values() for part in w.node["parts"])
        version = WITH_RANGES if ranges else WITH_SHARDS if wholes else VERSION
        _write_manifest(folder, aside, tree, parts, version=version)

    try:
        agree(error, group=group)
        on_first_rank(finish, group=group)
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _write(path: Path, state: Any, written: dict[str, Any]) -> Any:
    """Write the tensors of `state`; note the file and its tensors in `written`; the JSON tree of `state`."""
    tensors: dict[str, Tensor] = {}
    tree = take_apart(state, tensors)
    _write_file(path, tensors, written)
    return tree


def _write_file(path: Path, tensors: dict[str, Tensor], written: dict[str, Any]) -> None:
    """Write the tensors; note the file and its tensors in `written`."""
    written.setdefault("files", {})[path.name] = write_tensors(path, tensors)
    for name, tensor in tensors.items():
        entry = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        written.setdefault("tensors", {}).setdefault(path.name, {})[name] = entry


def _write_manifest(folder: Path, aside: Path, tree: Any, parts: list[Any], *, version: int) -> None:
    manifest = {
        "format": FORMAT, "version": version, "tree": {"state": tree},
        "own": {str(part["rank"]): part["tree"] for part in parts},
        "tensors": {file: entries for part in parts for file, entries in part.get("tensors", {}).items()},
        "files": {file: entry for part in parts for file, entry in part["files"].items()},
    }  # fmt: skip
    try:
        with open(aside / MANIFEST, "w") as file:
            json.dump(seal(manifest), file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        _replace(folder, aside)
    except OSError as error:
        raise _refusal(folder, error) from error


def _replace(folder: Path, aside: Path) -> None:
    """Put `aside` in the place of `folder`. Killed in between, the old one is whole under the name .old."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(aside, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_empty(aside: Path) -> None:
    """The folder to write in; what a killed save left there goes."""
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise _refusal(aside, error) from error


def _refusal(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} can't be written: {error.strerror or error}; make room or choose another folder. "
        "Checkpoints from before are untouched"
    )


def load(folder: Path | str, *, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """(state, own) as given to `save`, tensors on the CPU. own: of the same rank; None if that rank did not exist then.
    Where ranks had shards, `state` has the whole tensor, on every rank and on any number of ranks.

    Every file is compared with the manifest's size and checksum before anything is returned. Raises CheckpointError,
    on all ranks alike, naming the file that is missing, damaged, or no checkpoint's.
    """
    folder = Path(folder)
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # killed between two renames
        folder = old
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    error: Exception | None = None
    state = own = None
    try:
        manifest = read_manifest(folder)
        files = {name: _read(folder, name, manifest) for name in manifest["files"] if name.startswith(SHARDS)}
        state = restore(manifest["tree"]["state"], _read(folder, SHARED, manifest), assemble=lambda node: assemble(node, files))
        if str(rank) in manifest["own"]:
            own = restore(manifest["own"][str(rank)], _read(folder, f"own-{rank:05}.safetensors", manifest))
    except CheckpointError as caught:
        error = caught
    agree(error, group=group)
    return state, own


def _read(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Tensor]:
    path, expected = folder / name, manifest["files"].get(name)
    fix = f"delete {folder} and use an earlier checkpoint"
    try:
        found = checksum(path)
        if expected is None or found["bytes"] != expected["bytes"]:
            whole = "no manifest entry" if expected is None else f"{expected['bytes']} by the manifest"
            raise CheckpointError(f"{path} has {found['bytes']} bytes, {whole}; {fix}")
        if found["crc32"] != expected["crc32"]:
            raise CheckpointError(f"{path} is damaged: its checksum is not the manifest's; {fix}")
        tensors = read_tensors(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}; {fix}") from None
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({error}); {fix}") from None
    entries = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()}
    wanted = {n: (e["dtype"], e["shape"]) for n, e in manifest["tensors"].get(name, {}).items()}
    if entries != wanted:
        raise CheckpointError(f"{path} does not hold the tensors that the manifest lists; {fix}")
    return tensors


class Checkpoints:
    """The checkpoints of one run, `folder`/step-00000100 and so on; only the newest `keep` stay."""

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay: give 1 or more")
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, oldest first."""
        found = (
            p.name.removeprefix("step-").removesuffix(".old") for p in self.folder.glob("step-*") if (p / MANIFEST).exists()
        )
        return sorted({int(name) for name in found if name.isdigit()})

    def save(self, step: int, state: Any, *, own: Any = None, group: dist.ProcessGroup | None = None) -> Path:
        """`pyops.checkpoint.save`, then remove the oldest beyond `keep`; the path of the new one."""
        save(self.path(step), state, own=own, group=group)
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        return self.path(step)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None
