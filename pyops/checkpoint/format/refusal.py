"""What a manifest must say of itself before anything it names is opened: it may have been written
by somebody else.

Names are those of files in the folder, sizes are sizes of tensors that those files hold, every
tensor is used once, and the parts of one cover it once. So nothing outside the folder is read, and
nothing larger than the files is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from pyops.checkpoint.format.manifest import PAIRS, SHARDS, TENSOR, TUPLE, CheckpointError
from pyops.checkpoint.format.shards import check_cover
from pyops.checkpoint.format.tensor_file import DTYPES

__all__ = ["DTYPE_OF", "OWN", "SHARD_FILES", "SHARED", "check_manifest", "own_file"]

SHARED = "shared.safetensors"  # the tensors of rank 0's state
SHARD_FILES, OWN = "shards-", "own-"  # and of each rank's shards, and own state
SUFFIX = ".safetensors"
DTYPE_OF = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
MAX_DEPTH = 200
MAX_DIMS = 64
MAX_NAME = 255  # bytes of a file's name


def own_file(rank: int | str) -> str:
    """The file of a rank's own state."""
    return f"{OWN}{int(rank):05}{SUFFIX}"


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """ValueError saying which entry of a manifest is wrong, without the manifest's name."""
    try:
        _check(manifest)
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:  # none is known
        raise ValueError(
            f"an entry is missing or of the wrong kind ({type(error).__name__}: {error})"
        ) from None


def _shown(value: object) -> str:
    return repr(value)[:80]


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{at} is {_shown(value)}; it must be an object"
            if value is not None
            else f"it has no {at}"
        )
    return value


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{at} is {_shown(value)}; it must be a list")
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{at} is {_shown(value)}; it must be a text")
    return value


def _check(manifest: Mapping[str, Any]) -> None:
    files, tensors, own, tree = (
        _object(manifest.get(key), key) for key in ("files", "tensors", "own", "tree")
    )
    for name, entry in files.items():
        _check_file(name, _object(entry, f"files[{name!r}]"))
    for name, entries in tensors.items():
        if name not in files:
            raise ValueError(f"it lists tensors of {name!r}, which is none of its files")
        _check_tensors(name, entries, files[name]["bytes"])
    if "state" not in tree:
        raise ValueError("its tree has no state")
    used: set[tuple[str, str]] = set()
    for node, at in _nodes(tree["state"], "tree.state"):
        for where in (
            [(SHARED, node[TENSOR])]
            if TENSOR in node
            else _check_parts(_object(node[SHARDS], at), tensors, at)
        ):
            _use(where, tensors, used, at)
    for rank, state in own.items():
        if not (rank.isdecimal() and rank.isascii() and str(int(rank)) == rank):
            raise ValueError(f"own has a state of rank {_shown(rank)}, which is no number")
        for node, at in _nodes(state, f"own.{rank}"):
            if SHARDS in node:
                raise ValueError(f"{at} has shards, which a rank's own state has not")
            _use((own_file(rank), node[TENSOR]), tensors, used, at)


def _check_tensors(name: str, entries: Any, nbytes: int) -> None:
    """The tensors that are listed of a file of so many bytes."""
    held = 0
    for tensor, entry in _object(entries, f"tensors[{name!r}]").items():
        at = f"tensors[{name!r}][{tensor!r}]"
        _object(entry, at)
        held += prod(_shape(entry.get("shape"), at)) * _dtype(entry.get("dtype"), at).itemsize
    if held > nbytes:
        raise ValueError(f"it lists tensors of {held} bytes in {name!r}, which has {nbytes}")


def _check_file(name: str, entry: Mapping[str, Any]) -> None:
    plain = (
        name.endswith(SUFFIX)
        and name.isprintable()
        and not any(c in name for c in "/\\")
        and not name.startswith(".")
    )
    if not plain or len(name.encode()) > MAX_NAME:
        raise ValueError(f"files names {_shown(name)}, which is no {SUFFIX} file within the folder")
    size: Any = entry.get("bytes")
    crcs, block = (entry.get(key) for key in ("crc32", "block"))
    if not (_whole(size) and size >= 8):
        raise ValueError(f"it says that {name!r} has bytes = {_shown(size)}")
    if isinstance(crcs, list) and (
        block is None or not (_whole(block) and block > 0 and len(crcs) == -(-size // block))
    ):
        raise ValueError(
            f"it has a crc32 of {len(crcs)} checksums, of block = {_shown(block)} bytes, "
            f"for the {size} bytes of {name!r}"
        )
    if not all(_whole(crc) for crc in (crcs if isinstance(crcs, list) else [crcs])):
        raise ValueError(f"it has a crc32 of {name!r} that is no number, or no list of these")


def _whole(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def _shape(shape: Any, name: str) -> list[int]:
    sound = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_whole(n) for n in shape)
    if not sound or prod(n or 1 for n in shape) >= 1 << 62:
        raise ValueError(f"it gives {name} the shape {_shown(shape)}, which no tensor has")
    return list(shape)


def _dtype(name: Any, of: str) -> torch.dtype:
    if not (isinstance(name, str) and name in DTYPE_OF):
        raise ValueError(f"it gives {of} the dtype {_shown(name)}; there are {', '.join(DTYPE_OF)}")
    return DTYPE_OF[name]


def _use(
    where: tuple[str, str], tensors: Mapping[str, Any], used: set[tuple[str, str]], at: str
) -> None:
    file, name = where
    if not isinstance(name, str) or name not in tensors.get(file, {}):
        raise ValueError(f"{at} names the tensor {_shown(name)}, which {file} does not hold")
    if where in used:
        raise ValueError(f"{at} names the tensor {name!r} of {file} twice")
    used.add(where)


def _check_parts(
    node: Mapping[str, Any], tensors: Mapping[str, Any], at: str
) -> list[tuple[str, str]]:
    """The stored tensors that a tensor in parts is made of."""
    shape, dtype = _shape(node.get("shape"), at), node.get("dtype")
    _dtype(dtype, at)
    parts = [
        _object(part, f"a part of {at}") for part in _list(node.get("parts"), f"parts of {at}")
    ]
    for part in parts:
        file, name = (
            _text(part.get("file"), f"the file of a part of {at}"),
            _text(part.get("name"), f"the name of a part of {at}"),
        )
        if not file.startswith(SHARD_FILES) or name not in tensors.get(file, {}):
            raise ValueError(
                f"{at} takes the part {_shown(name)} from {_shown(file)}, which is no "
                "file of shards that has it"
            )
        entry, of, offset = (
            tensors[file][name],
            part.get("shape"),
            _list(part.get("offset"), f"the offset of a part of {at}"),
        )
        if (
            entry["dtype"] != dtype
            or entry["shape"] != of
            or not all(_whole(n) for n in _list(of, f"the shape of a part of {at}"))
        ):
            raise ValueError(
                f"{at} is {dtype}, of a part of shape {_shown(of)}, which in {file} has "
                f"shape {entry['shape']} and dtype "
                f"{entry['dtype']}"
            )
        whole = [prod(shape)] if len(offset) == 1 == len(of) else shape
        inside = len(offset) == len(of) == len(whole) and all(_whole(o) for o in offset)
        if not inside or any(o + n > m for o, n, m in zip(offset, of, whole, strict=True)):
            raise ValueError(
                f"{at} has a part of {of} at {_shown(offset)}, which is not within {shape}"
            )
    try:
        check_cover(at, shape, [(part["file"], part) for part in parts])
    except CheckpointError as error:
        raise ValueError(f"the parts of {at} make no tensor: {error}") from None
    return [(part["file"], part["name"]) for part in parts]


def _nodes(tree: Any, at: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every node of a tree that names tensors, with its place; ValueError for what is no tree of a
    state."""
    waiting = [(tree, at, 0)]
    while waiting:
        part, at, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"its tree is more than {MAX_DEPTH} levels deep")
        items: list[tuple[Any, Any]] = []
        if isinstance(part, list):
            items = list(enumerate(part))
        elif isinstance(part, dict):
            marks = [key for key in part if key.startswith("$")]
            if marks and (len(part) > 1 or marks[0] not in (TENSOR, SHARDS, PAIRS, TUPLE)):
                raise ValueError(
                    f"{at} has the keys {_shown(list(part))}, which no state is written as"
                )
            if TENSOR in part or SHARDS in part:
                yield part, at
                continue
            items = _pairs(part, at) if PAIRS in part else list(part.items())
            if TUPLE in part:
                items = list(enumerate(_list(part[TUPLE], f"{at}.{TUPLE}")))
        waiting += [(value, f"{at}.{key}", depth + 1) for key, value in items]


def _pairs(part: Mapping[str, Any], at: str) -> list[tuple[Any, Any]]:
    """The keys and values of a dict that is written as a list of pairs, each key once."""
    found = []
    for pair in _list(part[PAIRS], f"{at}.{PAIRS}"):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise ValueError(
                f"{at}.{PAIRS} has {_shown(pair)}, which is no pair of a key and a value"
            )
        found.append((pair[0], pair[1]))
    if len({key for key, _ in found}) != len(found):
        raise ValueError(f"{at}.{PAIRS} has a key twice")
    return found
