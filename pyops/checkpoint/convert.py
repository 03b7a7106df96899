"""Weights between checkpoints and single safetensors files, as Hugging Face's tools read and write
them.

export_weights   a checkpoint's folder  ->  model.safetensors {"blocks.0.attn.weight": ...}, a
                 tensor at a time
import_weights   model.safetensors, or a folder with model.safetensors[.index.json]  ->  a
                 checkpoint {"model": {...}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pyops.checkpoint.folder import save
from pyops.checkpoint.format.lazy_tensor import LazyTensor
from pyops.checkpoint.format.manifest import MANIFEST, CheckpointError
from pyops.checkpoint.format.repository import how_to_fetch
from pyops.checkpoint.format.tensor_file import write_tensors
from pyops.checkpoint.loading import Reader

__all__ = ["export_weights", "import_weights", "is_checkpoint", "weight_files"]

SUFFIX = ".safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_checkpoint(path: Path | str) -> bool:
    """Whether this is a checkpoint's folder."""
    return (Path(path) / MANIFEST).exists()


@dataclass(frozen=True)
class _Cast:
    """A stored tensor that is read as another floating dtype."""

    stored: LazyTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self) -> Tensor:
        return self.stored.read().to(self.dtype)


def export_weights(
    folder: Path | str, file: Path | str, *, key: str = "model", dtype: torch.dtype | None = None
) -> dict[str, tuple[int, ...]]:
    """Write the tensors below state[key] to one safetensors file; {name: shape} of them.

    Holds one tensor at a time, whatever the number of ranks that saved. The file is written beside
    its place and renamed.

    Args:
        key: "model", or a path such as "a.b". Names are the paths below it: those of
            model.state_dict().
        dtype: Floating tensors become this; None: as they are.

    Raises:
        CheckpointError: For a damaged checkpoint, an unknown key, a file that is there already.
    """
    file = Path(file)
    if file.suffix != SUFFIX:
        raise CheckpointError(f"{file} is no name of a safetensors file; end it with {SUFFIX}")
    _must_be_new(file)
    reader = Reader(folder)
    reader.check_files()
    found: dict[str, LazyTensor] = {}
    _collect(_below(reader.state(), key, folder), found, "")
    if not found:
        raise CheckpointError(
            f"state[{key!r}] of {folder} holds no tensors; name a part that does with key"
        )
    tensors = {
        n: _Cast(t, dtype) if dtype is not None and t.dtype.is_floating_point else t
        for n, t in found.items()
    }
    aside = file.with_name(file.name + ".tmp")
    try:
        write_tensors(aside, tensors)
        os.rename(aside, file)
    except OSError as error:
        raise CheckpointError(
            f"{file} can't be written: {error.strerror or error}; make room or choose another place"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return {name: tensor.shape for name, tensor in found.items()}


def import_weights(
    source: Path | str, folder: Path | str, *, key: str = "model"
) -> dict[str, tuple[int, ...]]:
    """Make a checkpoint {key: {name: tensor}} of a safetensors file, or of a folder with one or
    with several and their index.

    The tensors are mapped, not read as a whole. {name: shape}.

    Raises:
        CheckpointError: For files that are missing or damaged, for an index that leads out of the
            folder, and for a checkpoint that is there already.
    """
    folder = Path(folder)
    _must_be_new(folder)
    tensors: dict[str, Tensor] = {}
    for path, names in weight_files(Path(source)).items():
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can't be read: {error}; fetch it again") from None
        lacking = sorted(set(names or found) - set(found))
        if lacking:
            raise CheckpointError(
                f"{path} lacks {lacking[:3]}, which its index says it has; fetch it again"
            )
        tensors |= {name: found[name] for name in (names or found)}
    save(folder, {key: tensors})
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _must_be_new(path: Path) -> None:
    if path.exists():
        raise CheckpointError(f"{path} is there already; remove it, or name another place")


def _below(state: Any, key: str, folder: Path | str) -> Any:
    part = state
    for step in key.split("."):
        if not isinstance(part, Mapping) or step not in part:
            there = list(part) if isinstance(part, Mapping) else "no dict"
            raise CheckpointError(
                f"{folder} has no state[{key!r}]: at {step!r} there is {there}; name one of these"
            )
        part = part[step]
    return part


def _collect(part: Any, found: dict[str, LazyTensor], name: str) -> None:
    if isinstance(part, LazyTensor):
        found[name or "tensor"] = part
    elif isinstance(part, Mapping | list | tuple):
        items = part.items() if isinstance(part, Mapping) else enumerate(part)
        for key, value in items:
            _collect(value, found, f"{name}.{key}" if name else str(key))


def weight_files(source: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, by its index where there is one, each with the names
    wanted of it; None: all.

    Args:
        source: May be a file itself.

    Raises:
        CheckpointError: For none, and for an index that is damaged or leads out of the folder.
    """
    if source.is_file():
        return {source: None}
    if (source / WEIGHTS).is_file():
        return {source / WEIGHTS: None}
    index = source / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"{source} is no safetensors file, and no folder with {WEIGHTS} or {INDEX}; "
            "name one of these"
            f"{how_to_fetch(source, bare=True)}"
        )
    found: dict[Path, list[str] | None] = {}
    try:
        weights = json.loads(index.read_text())["weight_map"]
        for name, file in weights.items():
            if Path(file).name != file or not file.endswith(SUFFIX):
                raise CheckpointError(
                    f"{index} names the file {file!r}, which is no {SUFFIX} file beside "
                    "it; don't trust it"
                )
            names = found.setdefault(source / file, [])
            assert names is not None
            names.append(name)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged ({error}); fetch it again") from None
    return found
