"""A nested state as named tensors and a JSON tree, and back; and what a checkpoint's manifest says.

    {"model": {"w": <tensor>}, "step": 7}  <->  {"model": {"w": {"$tensor": "model.w"}}, "step": 7}
                                                {"model.w": <tensor>}

manifest.json:

    format, version                               this is a checkpoint of pyops, laid out in this
                                                  way
    tree: {"state": ...}                          the state, with names in place of tensors; of a
                                                  tensor made of shards, {"$shards": {shape, dtype,
                                                  parts: [{file, name, offset, shape}]}}; a part
                                                  with one offset is a range of the flattened tensor
    own: {rank: ...}                              each rank's own state, likewise
    files: {file: {bytes, block, crc32: [...]}}   every file of the checkpoint except the manifest,
                                                  a checksum per block
    tensors: {file: {name: {dtype, shape}}}       what each holds
    crc32                                         of all the above

Version 1 had no shards, 2 no ranges, and both one checksum for a file: they are read, and no longer
written.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pyops.checkpoint.format.repository import how_to_fetch
from pyops.checkpoint.format.tensor_file import Content

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PAIRS",
    "SHARDS",
    "TENSOR",
    "TUPLE",
    "VERSION",
    "CheckpointError",
    "Sharded",
    "read_manifest",
    "restore",
    "seal",
    "take_apart",
]

FORMAT, MANIFEST = "pyops.checkpoint", "manifest.json"
VERSION, VERSIONS = 3, (1, 2, 3)  # that is written, and those that are read
TENSOR, PAIRS, TUPLE, SHARDS = "$tensor", "$pairs", "$tuple", "$shards"
MAX_MANIFEST = 256 << 20  # bytes; of a checkpoint of a thousand ranks it has some 50 MB
MAX_NESTING = 64

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint can't be written or read; the message names the file and the fix."""


@dataclass(frozen=True)
class Sharded:
    """In a state: a tensor whose parts lie in the files of several ranks; `node` is what the
    manifest says of it."""

    node: dict[str, Any]


def take_apart(
    value: Any, tensors: dict[str, Content], *, name: str = "", what: str = "state", depth: int = 0
) -> Any:
    """The JSON tree of `value`; its tensors are added to `tensors` under the path that leads to
    them.

    Raises:
        TypeError: Naming the path in `what`, for anything else than dicts with string or integer
            keys, lists, tuples, tensors, numbers, strings, booleans and None, and for a state that
            is nested too deep.
    """
    if isinstance(value, Tensor):
        unique = name or "tensor"
        while unique in tensors:  # {"a.b": t, "a": {"b": t}}
            unique += "'"
        tensors[unique] = value
        return {TENSOR: unique}
    if isinstance(value, Sharded):
        return {SHARDS: value.node}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > MAX_NESTING:
        raise TypeError(
            f"{what}[{name!r}] is nested more than {MAX_NESTING} levels deep; a "
            "checkpoint holds flatter states"
        )
    prefix = f"{name}." if name else ""

    def part(key: object, value: Any) -> Any:
        return take_apart(value, tensors, name=f"{prefix}{key}", what=what, depth=depth + 1)

    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: part(k, v) for k, v in value.items()}
        if all(isinstance(k, str | int) and not isinstance(k, bool) for k in value):
            return {PAIRS: [[k, part(k, v)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [part(i, v) for i, v in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    raise TypeError(
        f"{what}[{name!r}] is a {type(value).__name__}; a checkpoint holds tensors, "
        "numbers, strings, booleans, None, "
        "and dicts (keyed by strings or integers), lists and tuples of them: convert it"
    )


def restore(tree: Any, find: Callable[[Mapping[str, Any], str], T], *, name: str = "") -> Any:
    """The value that `take_apart` took apart.

    Args:
        find: What to put where tensors were: (node that names a tensor, its path).
    """
    prefix = f"{name}." if name else ""
    if isinstance(tree, list):
        return [restore(item, find, name=f"{prefix}{i}") for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree or SHARDS in tree:
        return find(tree, name)
    if TUPLE in tree:
        return tuple(restore(item, find, name=f"{prefix}{i}") for i, item in enumerate(tree[TUPLE]))
    pairs = tree[PAIRS] if PAIRS in tree else tree.items()
    return {key: restore(item, find, name=f"{prefix}{key}") for key, item in pairs}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: When there is none, or one of something else.
    """
    path, fix = folder / MANIFEST, f"delete {folder} and use an earlier checkpoint"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_MANIFEST:
            raise CheckpointError(
                f"{path} has {found.st_size} bytes, a manifest at most {MAX_MANIFEST}; {fix}"
            )
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        what = (
            "has no manifest.json: it is no checkpoint of pyops"
            if folder.is_dir()
            else "does not exist"
        )
        raise CheckpointError(
            f"checkpoint {folder} {what}; name a folder that pyops.checkpoint.save "
            f"wrote{how_to_fetch(folder)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({error}); {fix}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        which = (
            f": its format is {manifest.get('format')!r:.80}" if isinstance(manifest, dict) else ""
        )
        raise CheckpointError(
            f"{path} is no manifest of pyops{which}; name a folder that pyops.checkpoint.save wrote"
        )
    if type(manifest.get("version")) is not int or manifest["version"] not in VERSIONS:
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')!r}, this pyops reads "
            f"versions {VERSIONS[0]} to {VERSIONS[-1]}; "
            "read it with the pyops that wrote it"
        )
    if seal({key: value for key, value in manifest.items() if key != "crc32"}) != manifest:
        raise CheckpointError(f"{path} is damaged (its checksum differs); {fix}")
    return manifest


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its checksum."""
    return {**manifest, "crc32": zlib.crc32(json.dumps(manifest).encode())}
