"""What a manifest must say of itself before anything it names is opened: it may have been written by somebody else.

Names are those of files in the folder, sizes are sizes of tensors that those files hold, every tensor is used once, and the
parts of one cover it once. So nothing outside the folder is read, and nothing larger than the files is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from pyops.checkpoint.manifest import PAIRS, SHARDS, TENSOR, TUPLE, CheckpointError
from pyops.checkpoint.shards import check_cover
from pyops.checkpoint.tensor_file import DTYPES

__all__ = ["DTYPE_OF", "OWN", "SHARD_FILES", "SHARED", "check_manifest", "own_file"]

SHARED = "shared.safetensors"  # the tensors of rank 0's state
SHARD_FILES, OWN = "shards-", "own-"  # and of each rank's shards, and own state
SUFFIX = ".safetensors"
DTYPE_OF = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
MAX_DEPTH = 200
MAX_DIMS = 64


def own_file(rank: int | str) -> str:
    """The file of a rank's own state."""
    return f"{OWN}{int(rank):05}{SUFFIX}"


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """ValueError saying what is wrong with a manifest, without its name."""
    try:
        _check(manifest)
    except (AttributeError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"an entry is missing or of the wrong kind ({type(error).__name__}: {error})") from None


def _check(manifest: Mapping[str, Any]) -> None:
    files, tensors = manifest["files"], manifest["tensors"]
    for name, entry in files.items():
        _check_file(name, entry)
    for name, entries in tensors.items():
        if name not in files:
            raise ValueError(f"it lists tensors of {name!r}, which is none of its files")
        held = sum(prod(_shape(e["shape"], n)) * _dtype(e["dtype"], n).itemsize for n, e in entries.items())
        if held > files[name]["bytes"]:
            raise ValueError(f"it lists tensors of {held} bytes in {name!r}, which has {files[name]['bytes']}")
    used: set[tuple[str, str]] = set()
    for node in _nodes(manifest["tree"]["state"]):
        for where in [(SHARED, node[TENSOR])] if TENSOR in node else _check_parts(node[SHARDS], tensors):
            _use(where, tensors, used)
    for rank, tree in manifest["own"].items():
        if not (rank.isdecimal() and rank.isascii()):
            raise ValueError(f"it has a state of rank {rank!r}, which is no number")
        for node in _nodes(tree):
            if SHARDS in node:
                raise ValueError(f"the own state of rank {rank} has shards")
            _use((own_file(rank), node[TENSOR]), tensors, used)


def _check_file(name: str, entry: Mapping[str, Any]) -> None:
    plain = name.endswith(SUFFIX) and not any(c in name for c in "/\\\0") and not name.startswith(".")
    if not plain:
        raise ValueError(f"it names the file {name!r}, which is no {SUFFIX} file within the folder")
    size, crcs = entry["bytes"], entry["crc32"]
    if not (_whole(size) and size >= 8):
        raise ValueError(f"it says that {name!r} has {size!r} bytes")
    if isinstance(crcs, list):
        block = entry["block"]
        if not (_whole(block) and block > 0 and len(crcs) == -(-size // block)):
            raise ValueError(f"it has {len(crcs)} checksums of blocks of {block!r} bytes for the {size} bytes of {name!r}")
    if not all(_whole(crc) for crc in (crcs if isinstance(crcs, list) else [crcs])):
        raise ValueError(f"it has a checksum of {name!r} that is no number")


def _whole(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def _shape(shape: Any, name: str) -> list[int]:
    sound = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_whole(n) for n in shape)
    if not sound or prod(n or 1 for n in shape) >= 1 << 62:
        raise ValueError(f"it gives {name!r} the shape {str(shape)[:100]}, which no tensor has")
    return shape


def _dtype(name: Any, of: str) -> torch.dtype:
    if not (isinstance(name, str) and name in DTYPE_OF):
        raise ValueError(f"it gives {of!r} the dtype {str(name)[:100]!r}; there are {', '.join(DTYPE_OF)}")
    return DTYPE_OF[name]


def _use(where: tuple[str, str], tensors: Mapping[str, Any], used: set[tuple[str, str]]) -> None:
    file, name = where
    if not isinstance(name, str) or name not in tensors.get(file, {}):
        raise ValueError(f"its tree names the tensor {name!r}, which {file} does not hold")
    if where in used:
        raise ValueError(f"its tree names the tensor {name!r} of {file} twice")
    used.add(where)


def _check_parts(node: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The stored tensors that a tensor in parts is made of."""
    parts = node["parts"]
    name = str(parts[0]["name"]) if parts else "?"
    shape, dtype = _shape(node["shape"], name), node["dtype"]
    _dtype(dtype, name)
    for part in parts:
        entry, offset = tensors[part["file"]][part["name"]], part["offset"]
        if not part["file"].startswith(SHARD_FILES):
            raise ValueError(f"it takes a part of {name!r} from {part['file']!r}, which is no file of shards")
        if entry["dtype"] != dtype or entry["shape"] != part["shape"]:
            raise ValueError(
                f"it makes {name!r}, {dtype}, of a part of {part['shape']}, which in {part['file']} is {entry['shape']} of "
                f"{entry['dtype']}"
            )
        whole = [prod(shape)] if len(offset) == 1 == len(part["shape"]) else shape
        inside = len(offset) == len(part["shape"]) == len(whole) and all(_whole(o) for o in offset)
        if not inside or any(o + n > m for o, n, m in zip(offset, part["shape"], whole, strict=True)):
            raise ValueError(f"it puts a part of {part['shape']} of {name!r} at {offset}, which is not within {shape}")
    try:
        check_cover(name, shape, [(part["file"], part) for part in parts])
    except CheckpointError as error:
        raise ValueError(f"its parts make no tensor: {error}") from None
    return [(part["file"], part["name"]) for part in parts]


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Every node of a tree that names tensors; ValueError for a tree that is too deep to be a state."""
    waiting = [(tree, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"its tree is more than {MAX_DEPTH} levels deep")
        if isinstance(part, dict):
            if TENSOR in part or SHARDS in part:
                yield part
                continue
            if PAIRS in part:
                for key, _ in part[PAIRS]:
                    if not isinstance(key, str | int):
                        raise ValueError(f"its tree has the key {str(key)[:100]}")
            if TUPLE in part and not isinstance(part[TUPLE], list):
                raise ValueError("its tree has a tuple that is no list")
            waiting += [(p, depth + 1) for p in part.values()]
        elif isinstance(part, list):
            waiting += [(p, depth + 1) for p in part]
