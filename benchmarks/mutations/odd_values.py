"""Odd values in place of sound ones, and damage to files, for `benchmarks.mutations`."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ODD", "Change", "damage", "places", "set_place"]

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, -7, 4096, 2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63,
    -(2**63), 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "0", "1", "x", "none", "é", "日本", "\ud800", "\u0000",
    "../x", "a" * 5000, [], [1], [[]], ["x", 2], {}, {"x": 1}, {"$tensor": "x"}, {"$shards": {}},
    {"$tuple": 3}, {"$pairs": [1]},
)  # fmt: skip


WAYS = (
    "bit", "bits", "head", "cut", "grow", "empty", "noise", "zeros", "gone", "folder", "swap",
    "link", "broken link",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What was changed. names: of files or keys, one of which a refusal must say, and one of
    `keys`, where there are any. at: (place in a tree, value), if it is one."""

    text: str
    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    at: tuple[tuple[Any, ...], Any] | None = None


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value of a tree of dicts and lists."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    found = [at] if at else []
    for key, value in items:
        found += places(value, (*at, key))
    return found


def set_place(tree: Any, at: tuple[Any, ...], value: Any) -> None:
    for key in at[:-1]:
        tree = tree[key]
    tree[at[-1]] = value


def damage(  # noqa: C901, PLR0912 (a branch for each kind of damage)
    rng: random.Random, folder: Path, files: list[str]
) -> Change:
    """Damage a file of the folder: bits, length, or what it is."""
    name = rng.choice(files)
    path = folder / name
    content = bytearray(path.read_bytes())
    way = rng.choice(WAYS)
    start = rng.randrange(len(content))
    if way in ("bit", "bits", "head"):
        for _ in range(1 if way == "bit" else 5):
            at = (
                rng.randrange(min(len(content), 400))
                if way == "head"
                else rng.randrange(len(content))
            )
            content[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del content[start:]
    elif way == "grow":
        content += rng.randbytes(rng.choice([1, 8, 1000]))
    elif way == "empty":
        content.clear()
    elif way == "noise":
        content[start : start + 40] = rng.randbytes(len(content[start : start + 40]))
    elif way == "zeros":
        content[start : start + 40] = bytes(len(content[start : start + 40]))
    if way in ("gone", "folder", "swap", "link", "broken link"):
        other = folder / rng.choice(files)
        if way == "swap" and other != path:
            path.write_bytes(other.read_bytes())
        elif way != "swap":
            path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "link":
            aside = folder.with_name(folder.name + "-aside")
            aside.write_bytes(content)
            os.symlink(aside, path)
        elif way == "broken link":
            os.symlink("nowhere", path)
    else:
        path.write_bytes(content)
    return Change(f"{way} of {name} at {start}", (name,))
