"""A nested state as named tensors and a JSON tree, and back; and what a checkpoint's manifest says.

    {"model": {"w": <tensor>}, "step": 7}   <->   {"model": {"w": {"$tensor": "model.w"}}, "step": 7}
                                                  {"model.w": <tensor>}

manifest.json:

    format, version                               this is a checkpoint of pyops, laid out in this way: 2 when it has shards,
                                                  3 when there are ranges of flattened tensors among them
    tree: {"state": ...}                          the state, with names in place of tensors; of a tensor made of shards,
                                                  {"$shards": {shape, dtype, parts: [{file, name, offset, shape}]}};
                                                  a part with one offset is a range of the flattened tensor
    own: {rank: ...}                              each rank's own state, likewise
    files: {file: {bytes, crc32}}                 every file of the checkpoint except the manifest
    tensors: {file: {name: {dtype, shape}}}       what each holds
    crc32                                         of all the above
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "WITH_RANGES",
    "WITH_SHARDS",
    "CheckpointError",
    "Sharded",
    "read_manifest",
    "restore",
    "seal",
    "take_apart",
]

FORMAT, VERSION, MANIFEST = "pyops.checkpoint", 1, "manifest.json"
WITH_SHARDS = 2  # the version of a checkpoint that has shards; one without is as readers of version 1 expect it
WITH_RANGES = 3  # of one with ranges of flattened tensors of several dims
TENSOR, PAIRS, TUPLE, SHARDS = "$tensor", "$pairs", "$tuple", "$shards"


class CheckpointError(ValueError):
    """A checkpoint can't be written or read; the message names the file and the fix."""


@dataclass(frozen=True)
class Sharded:
    """In a state: a tensor whose parts lie in the files of several ranks; `node` is what the manifest says of it."""

    node: dict[str, Any]


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
    if isinstance(value, Sharded):
        return {SHARDS: value.node}
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


def restore(
    tree: Any, tensors: Mapping[str, Tensor], *, assemble: Callable[[Mapping[str, Any]], Tensor] | None = None
) -> Any:  # fmt: skip
    """The value that `take_apart` took apart. assemble: makes the tensor of a `Sharded`'s node."""

    def again(part: Any) -> Any:
        return restore(part, tensors, assemble=assemble)

    if isinstance(tree, list):
        return [again(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    if SHARDS in tree and assemble is not None:
        return assemble(tree[SHARDS])
    if TUPLE in tree:
        return tuple(again(item) for item in tree[TUPLE])
    if PAIRS in tree:
        return {key: again(item) for key, item in tree[PAIRS]}
    return {key: again(item) for key, item in tree.items()}


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
    if manifest.get("version") not in (VERSION, WITH_SHARDS, WITH_RANGES):
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')}, this pyops reads versions {VERSION} to {WITH_RANGES}; read it "
            "with the pyops that wrote it"
        )
    if seal({key: value for key, value in manifest.items() if key != "crc32"}) != manifest:
        raise CheckpointError(f"{path} is damaged (its checksum differs); delete {folder} and use an earlier checkpoint")
    return manifest


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its checksum."""
    return {**manifest, "crc32": zlib.crc32(json.dumps(manifest).encode())}
