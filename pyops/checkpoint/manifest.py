"""A nested state as named tensors and a JSON tree, and back; and what a checkpoint's manifest says.

    {"model": {"w": <tensor>}, "step": 7}   <->   {"model": {"w": {"$tensor": "model.w"}}, "step": 7}
                                                  {"model.w": <tensor>}

manifest.json:

    format, version                               this is a checkpoint of pyops, laid out in this way
    tree: {"state": ...}                          the state, with names in place of tensors
    own: {rank: ...}                              each rank's own state, likewise
    files: {file: {bytes, crc32}}                 every file of the checkpoint except the manifest
    tensors: {file: {name: {dtype, shape}}}       what each holds
    crc32                                         of all the above
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["FORMAT", "MANIFEST", "VERSION", "CheckpointError", "read_manifest", "restore", "seal", "take_apart"]

FORMAT, VERSION, MANIFEST = "pyops.checkpoint", 1, "manifest.json"
TENSOR, PAIRS, TUPLE = "$tensor", "$pairs", "$tuple"


class CheckpointError(ValueError):
    """A checkpoint can't be written or read; the message names the file and the fix."""


def take_apart(value: Any, tensors: dict[str, Tensor], *, name: str = "") -> Any:
    """The JSON tree of `value`; its tensors are added to `tensors` under the path that leads to them.

    Raises TypeError, naming the path, for anything else than dicts with string or integer keys, lists, tuples, tensors,
    numbers, strings, booleans and None.
    """
    if isinstance(value, Tensor):
        unique = name or "tensor"
        while unique in tensors:  # {"a.b": t, "a": {"b": t}}
            unique += "'"
        tensors[unique] = value
        return {TENSOR: unique}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: take_apart(v, tensors, name=prefix + k) for k, v in value.items()}
        if all(isinstance(k, str | int) and not isinstance(k, bool) for k in value):
            return {PAIRS: [[k, take_apart(v, tensors, name=f"{prefix}{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [take_apart(v, tensors, name=f"{prefix}{i}") for i, v in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    raise TypeError(
        f"state[{name!r}] is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, booleans, None, "
        "and dicts (keyed by strings or integers), lists and tuples of them: convert it"
    )


def restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `take_apart` took apart."""
    if isinstance(tree, list):
        return [restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    if TUPLE in tree:
        return tuple(restore(item, tensors) for item in tree[TUPLE])
    if PAIRS in tree:
        return {key: restore(item, tensors) for key, item in tree[PAIRS]}
    return {key: restore(item, tensors) for key, item in tree.items()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises CheckpointError when there is none, or one of something else."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        what = "has no manifest.json: it is no checkpoint of pyops" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {folder} {what}; name a folder that pyops.checkpoint.save wrote") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete {folder} and use an earlier checkpoint") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of pyops; name a folder that pyops.checkpoint.save wrote")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')}, this pyops reads version {VERSION}; read it with the "
            "pyops that wrote it"
        )
    if seal({key: value for key, value in manifest.items() if key != "crc32"}) != manifest:
        raise CheckpointError(f"{path} is damaged (its checksum differs); delete {folder} and use an earlier checkpoint")
    return manifest


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its checksum."""
    return {**manifest, "crc32": zlib.crc32(json.dumps(manifest).encode())}
