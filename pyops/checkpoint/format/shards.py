"""Parts of tensors that the ranks hold, at one path of the state: written by each rank, one whole
tensor when loaded.

file               state
shards-00000       {"step": 7, "errors": {"w": Shard([2, 3], offset (0, 0), tensor [1, 3])}}
shards-00001       {"step": 7, "errors": {"w": Shard([2, 3], offset (1, 0), tensor [1, 3])}}
loaded, anywhere   {"step": 7, "errors": {"w": tensor [2, 3]}}

A shard is a box of its tensor or a range of the flattened one, and a rank may hold several at one
path (`Shards`), say a chunk of each bucket. The ranks compare what they hold before anything is
written: the shards of a path must cover its tensor, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from pyops.checkpoint.format.manifest import CheckpointError, Sharded
from pyops.checkpoint.format.tensor_file import Content
from pyops.flat import Shard, ShardElsewhere, Shards

__all__ = [
    "Card",
    "StatePath",
    "check_cover",
    "describe",
    "find_shards",
    "insert",
    "merge",
    "path_text",
]

Step = tuple[str, Any]  # ("key", of a mapping) or ("item", number in a list or tuple)
StatePath = tuple[Step, ...]
Card = dict[str, Any]  # what the manifest says of one shard, and of the tensor it is a part of


def path_text(path: StatePath) -> str:
    """The path as checkpoints name tensors: errors.worker.w."""
    return ".".join(str(key) for _, key in path)


def find_shards(state: Any, path: StatePath = ()) -> dict[StatePath, tuple[Shard, ...]]:
    """The shards within a nested state that this rank writes, by the path that leads to them; none
    for an empty `Shards`."""
    if isinstance(state, Shard | Shards):
        mine = tuple(
            part for part in ([state] if isinstance(state, Shard) else state) if not part.copy
        )
        return {path: mine} if mine else {}
    steps: list[tuple[Step, Any]] = []
    if isinstance(state, Mapping):
        steps = [(("key", key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        steps = [(("item", i), value) for i, value in enumerate(state)]
    found: dict[StatePath, tuple[Shard, ...]] = {}
    for step, value in steps:
        found |= find_shards(value, (*path, step))
    return found


def describe(
    shards: Mapping[StatePath, Sequence[Shard]], *, file: str
) -> tuple[dict[StatePath, list[Card]], dict[str, Content]]:
    """({path: descriptions}, {name in the file: tensor}) of one rank's shards, which it will write
    to `file`.

    Of several at one path the name says the offset: model.w@128.
    """
    descriptions: dict[StatePath, list[Card]] = {}
    tensors: dict[str, Content] = {}
    for path, parts in shards.items():
        for shard in parts:
            name = path_text(path) or "tensor"
            if len(parts) > 1:
                name += "@" + ",".join(map(str, shard.offset))
            while name in tensors:  # {"a.b": s, "a": {"b": s}}
                name += "'"
            tensors[name] = content = (
                shard.there if isinstance(shard, ShardElsewhere) else shard.tensor
            )
            description = {
                "global_shape": list(shard.global_shape),
                "dtype": str(content.dtype).removeprefix("torch."),
                "file": file,
                "name": name,
                "offset": list(shard.offset),
                "shape": list(content.shape),
            }
            descriptions.setdefault(path, []).append(description)
    return descriptions, tensors


def merge(descriptions: Sequence[Mapping[StatePath, Sequence[Card]]]) -> dict[StatePath, Sharded]:
    """Every path's tensor, made of the shards of all ranks (in rank order).

    Raises:
        CheckpointError: Naming the path, for shards of tensors that differ, that overlap, or that
            leave a gap.
    """
    together: dict[StatePath, list[tuple[int, Card]]] = {}
    for rank, of_rank in enumerate(descriptions):
        for path, several in of_rank.items():
            together.setdefault(path, []).extend((rank, description) for description in several)
    return {path: _whole(path_text(path), members) for path, members in together.items()}


def _whole(name: str, members: list[tuple[int, Card]]) -> Sharded:
    first_rank, first = members[0]
    for rank, description in members[1:]:
        for key in ("global_shape", "dtype"):
            if description[key] != first[key]:
                raise CheckpointError(
                    f"state[{name!r}] is a shard of {key} {first[key]} on rank "
                    f"{first_rank}, of {key} {description[key]} on rank "
                    f"{rank}; the shards of one path must be parts of one tensor"
                )
    shape = first["global_shape"]
    if len({len(description["offset"]) for _, description in members}) > 1:
        raise CheckpointError(
            f"state[{name!r}] is in ranges of the flattened tensor on some ranks, in "
            f"boxes of {len(shape)} dims on others; "
            "use one form for all its shards"
        )
    check_cover(name, shape, [(f"rank {rank}", description) for rank, description in members])
    parts = [
        {key: description[key] for key in ("file", "name", "offset", "shape")}
        for _, description in members
    ]
    return Sharded({"shape": shape, "dtype": first["dtype"], "parts": parts})


def check_cover(name: str, shape: list[int], members: Sequence[tuple[str, Card]]) -> None:
    """CheckpointError unless the parts, each with who has it, cover a tensor of this shape once.

    Boxes that don't meet and have the volume of the whole cover it; so do ranges of the flattened
    tensor.
    """
    boxes = sorted(
        (
            tuple(description["offset"]),
            tuple(o + n for o, n in zip(description["offset"], description["shape"], strict=True)),
            holder,
        )
        for holder, description in members
        if prod(description["shape"])
    )
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...], str]] = []
    for low, high, holder in boxes:
        open_boxes = [
            box for box in open_boxes if not low or box[1][0] > low[0]
        ]  # the others end before this one begins
        for other_low, other_high, other in open_boxes:
            if all(
                a < d and c < b for a, b, c, d in zip(low, high, other_low, other_high, strict=True)
            ):
                raise CheckpointError(
                    f"state[{name!r}]: the shard of {holder} at offset {list(low)} "
                    f"overlaps that of {other} at offset "
                    f"{list(other_low)}; every element must be written by one rank"
                )
        open_boxes.append((low, high, holder))
    covered, whole = sum(prod(description["shape"]) for _, description in members), prod(shape)
    if covered != whole:
        held = ", ".join(
            f"{list(low)} to {list(high)} ({holder})" for low, high, holder in boxes[:4]
        )
        raise CheckpointError(
            f"state[{name!r}] has a gap: its shards hold {covered} of the {whole} "
            f"elements of shape {shape}: {held or 'none'}"
            f"{', ...' if len(boxes) > 4 else ''}; every rank must save its part"
        )


def insert(state: Any, wholes: Mapping[StatePath, Sharded]) -> Any:
    """`state` with each path's whole in place of a shard, or added where this rank had none.

    Raises:
        CheckpointError: Naming the path, where this rank holds something else there, or no dict
            that the path could be added to.
    """
    return _insert(state, dict(wholes), ())


def _insert(value: Any, wholes: dict[StatePath, Sharded], at: StatePath) -> Any:
    if not wholes:
        return value
    if () in wholes:
        if value is not None and not isinstance(value, Shard | Shards):
            raise CheckpointError(
                f"state[{path_text(at)!r}] is a shard on another rank, on rank 0 a "
                f"{type(value).__name__}; "
                "put shards there on every rank, or nothing"
            )
        return wholes[()]
    below: dict[Step, dict[StatePath, Sharded]] = {}
    for path, whole in wholes.items():
        below.setdefault(path[0], {})[path[1:]] = whole
    if value is None and all(kind == "key" for kind, _ in below):
        value = {}
    if isinstance(value, Mapping) and all(kind == "key" for kind, _ in below):
        keys = [*value, *(key for _, key in below if key not in value)]
        return {
            key: _insert(value.get(key), below.get(("key", key), {}), (*at, ("key", key)))
            for key in keys
        }
    items = {i for kind, i in below if kind == "item"}
    if isinstance(value, list | tuple) and len(items) == len(below) and max(items) < len(value):
        again = [
            _insert(v, below.get(("item", i), {}), (*at, ("item", i))) for i, v in enumerate(value)
        ]
        return tuple(again) if isinstance(value, tuple) else again
    missing = path_text((*at, next(iter(below))))
    raise CheckpointError(
        f"state[{missing!r}] leads to shards of other ranks, but on rank 0 "
        f"state[{path_text(at)!r}] is a "
        f"{type(value).__name__} without it; nest shards in dicts, or in lists that are "
        "equally long on every rank"
    )
