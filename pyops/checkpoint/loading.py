"""Reading a checkpoint, whole or in part: checked first on every rank, then read, so that a damaged
one changes nothing.

manifest -> is it sound?  -> files there, of their sizes? -> blocks of what is wanted -> all ranks
                          agree -> read
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyops.checkpoint.format.lazy_tensor import LazyTensor, Part
from pyops.checkpoint.format.manifest import (
    MANIFEST,
    SHARDS,
    TENSOR,
    CheckpointError,
    read_manifest,
    restore,
)
from pyops.checkpoint.format.refusal import DTYPE_OF, SHARED, check_manifest, own_file
from pyops.checkpoint.format.tensor_file import TensorFile
from pyops.comm.agreement import agree
from pyops.flat import Shard, Shards
from pyops.mesh import check_initialized

__all__ = ["Reader", "load"]


class Reader:
    """A checkpoint folder whose manifest is sound and whose files have their sizes; `state` and
    `own` have `LazyTensor` tensors.

    Raises:
        CheckpointError: Naming the file. Of one process: ranks that read together agree by
            themselves.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        old = folder.with_name(folder.name + ".old")
        if not folder.exists() and old.exists():  # killed between two renames
            folder = old
        self.folder = folder
        self._fix = f"delete {folder} and use an earlier checkpoint"
        self._manifest = read_manifest(folder)
        try:
            check_manifest(self._manifest)
        except ValueError as error:
            raise CheckpointError(f"{folder / MANIFEST} is refused: {error}; {self._fix}") from None
        self._files: dict[str, TensorFile] = {}

    def check_files(self, *, rank: int = 0, size: int = 1) -> None:
        """CheckpointError for a file that is missing or of another size; of every `size`-th file,
        beginning with `rank`."""
        for name in list(self._manifest["files"])[rank::size]:
            path, expected = self.folder / name, self._manifest["files"][name]["bytes"]
            try:
                found = os.stat(path).st_size
            except OSError as error:
                raise self._refusal(path, error) from None
            if found != expected:
                raise CheckpointError(
                    f"{path} has {found} bytes, {expected} by the manifest; {self._fix}"
                )

    def compare(self, *, rank: int = 0, size: int = 1) -> None:
        """Compare this rank's share of every file, 1 / `size` of its bytes, with the checksums.
        CheckpointError."""
        for name, entry in self._manifest["files"].items():
            file, whole = self._open(name), entry["bytes"]
            try:
                file.compare(whole * rank // size, whole * (rank + 1) // size)
            except (OSError, ValueError) as error:
                raise self._refusal(file.path, error) from None

    def state(self) -> Any:
        """The state of all ranks."""
        return restore(
            self._manifest["tree"]["state"],
            lambda node, name: self._stored(node, name, file=SHARED),
        )

    def own(self, rank: int) -> Any:
        """The state of a rank's own, None if there was no such rank."""
        if str(rank) not in self._manifest["own"]:
            return None
        file = own_file(rank)
        return restore(
            self._manifest["own"][str(rank)], lambda node, name: self._stored(node, name, file=file)
        )

    def _stored(self, node: Mapping[str, Any], name: str, *, file: str) -> LazyTensor:
        if TENSOR in node:
            entry = self._manifest["tensors"][file][node[TENSOR]]
            shape, dtype = entry["shape"], entry["dtype"]
            parts = [self._part(file, node[TENSOR], shape, [0] * len(shape))]
        else:
            shape, dtype = node[SHARDS]["shape"], node[SHARDS]["dtype"]
            parts = [
                self._part(p["file"], p["name"], p["shape"], p["offset"])
                for p in node[SHARDS]["parts"]
            ]
        return LazyTensor(
            name,
            shape,
            DTYPE_OF[dtype],
            parts,
            explain=lambda f, error: self._refusal(f.path, error),
        )

    def _part(self, file: str, name: str, shape: list[int], offset: list[int]) -> Part:
        return Part(lambda: self._open(file), name, tuple(shape), tuple(offset))

    def _open(self, name: str) -> TensorFile:
        """The file, once it is known to hold what the manifest lists."""
        if name not in self._files:
            path = self.folder / name
            self._stay_within(path)
            try:
                file = TensorFile(path, self._manifest["files"][name])
            except (OSError, ValueError) as error:
                raise self._refusal(path, error) from None
            found = {
                n: (str(e.dtype).removeprefix("torch."), list(e.shape))
                for n, e in file.entries.items()
            }
            wanted = {
                n: (e["dtype"], e["shape"])
                for n, e in self._manifest["tensors"].get(name, {}).items()
            }
            if found != wanted:
                first = min(
                    n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n)
                )
                raise CheckpointError(
                    f"{path} does not hold the tensors that the manifest lists: "
                    f"{first!r} is {found.get(first, 'not there')}, "
                    f"by {MANIFEST} {wanted.get(first, 'not there')}; {self._fix}"
                )
            self._files[name] = file
        return self._files[name]

    def _stay_within(self, path: Path) -> None:
        if path.is_symlink() and path.resolve().parent != self.folder.resolve():
            raise CheckpointError(
                f"{path} leads out of the folder, to {path.resolve()}; copy that file here"
            )

    def _refusal(self, path: Path, error: Exception) -> CheckpointError:
        if isinstance(error, OSError):
            return CheckpointError(f"{path} can't be read: {error.strerror or error}; {self._fix}")
        return CheckpointError(f"{path} {error}; {self._fix}")


def load(
    folder: Path | str,
    *,
    into: Any = None,
    lazy: bool = False,
    compare: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, Any]:
    """(state, own) as given to `save`. own: of the same rank; None if that rank did not exist then.

    Without more, tensors are whole, in new CPU memory, on any number of ranks.

    Args:
        into: Nested as `state`, and may be a part of it: its tensors, `pyops.flat.Shard`s and
            `Shards` are filled, on whatever device, from the bytes they need and no others;
            floating dtypes are converted. It may differ from rank to rank, and how the tensors were
            cut when they were saved does not matter. In the returned state they stand in their
            places; every other tensor is a `LazyTensor`.
        lazy: Every tensor is one: `.shape`, `.dtype`, `.read()`, `.read_into(shard)`.
        compare: With either, compare all files with their checksums first, each rank a share of
            them, so that no damage is met later.

    Raises:
        CheckpointError: On all ranks alike, before anything is filled, naming the file that is
            missing or damaged, a manifest that can't be true, or the tensor of `into` that the
            checkpoint has not, or in another shape. What a LazyTensor reads is compared with its
            checksum when it is read. A collective.
    """
    check_initialized("checkpoint.load", group)
    rank, size = (
        (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    )
    error: Exception | None = None
    state = own = None
    wanted: list[tuple[LazyTensor, Any]] = []
    try:
        reader = Reader(folder)
        reader.check_files(rank=rank, size=size)
        if compare:
            reader.compare(rank=rank, size=size)
        own = _read_all(reader.own(rank))
        state = reader.state()
        if into is not None:
            state = _place(state, into, wanted, path="")
        elif not lazy:
            state = _read_all(state)
        for stored, target in wanted:
            stored.compare(target)
    except Exception as caught:  # whatever it is, ranks raise it together
        error = caught
    agree(error, group=group)
    try:
        for stored, target in wanted:
            stored.read_into(target)
    except Exception as caught:  # it changed since it was compared, or the device is full
        error = caught
    agree(error, group=group)
    return state, own


def _read_all(state: Any) -> Any:
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, dict):
        return {key: _read_all(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_read_all(value) for value in state)
    return state


def _place(state: Any, into: Any, wanted: list[tuple[LazyTensor, Any]], *, path: str) -> Any:
    """`state` with the targets of `into` where they belong; each pair is noted in `wanted`."""
    if isinstance(into, Tensor | Shard | Shards):
        if not isinstance(state, LazyTensor):
            what = "no such entry" if state is None else f"a {type(state).__name__} there"
            raise CheckpointError(
                f"into[{path!r}] is a tensor, and the checkpoint has {what}; it is of "
                "another model or optimizer"
            )
        state.check(into)
        wanted.append((state, into))
        return into
    prefix = f"{path}." if path else ""
    if isinstance(into, Mapping):
        there = state if isinstance(state, Mapping) else {}
        placed = {
            key: _place(there.get(key), value, wanted, path=f"{prefix}{key}")
            for key, value in into.items()
        }
        return (
            {**there, **{k: v for k, v in placed.items() if k in there}}
            if isinstance(state, Mapping)
            else state
        )
    if isinstance(into, list | tuple):
        there_too = list(state) if isinstance(state, list | tuple) else []
        there_too += [None] * (len(into) - len(there_too))
        items = [
            _place(s, i, wanted, path=f"{prefix}{n}")
            for n, (s, i) in enumerate(zip(there_too, into, strict=False))
        ]
        return (
            type(state)([*items, *there_too[len(into) :]])
            if isinstance(state, list | tuple)
            else state
        )
    return state
