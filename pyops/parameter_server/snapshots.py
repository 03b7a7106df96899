"""Snapshots of a shard: written beside the last one and renamed, so that one is always whole.

folder/shard-0.pt        parameters, optimizer, version, and which pushes of whom are in them
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_snapshot", "save_snapshot"]

MARKS = ("pyops parameter server", 1)


def _place(folder: Path | str, shard: int) -> Path:
    return Path(folder) / f"shard-{shard}.pt"


def save_snapshot(folder: Path | str, shard: int, state: dict[str, Any]) -> None:
    """Replace the shard's snapshot."""
    place = _place(folder, shard)
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            torch.save({"format": MARKS, "shard": shard, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)


def load_snapshot(folder: Path | str, shard: int) -> dict[str, Any] | None:
    """The shard's snapshot; None where there is none.

    Raises:
        ValueError: For a damaged file, or one of something else; the error names it.
    """
    place = _place(folder, shard)
    if not place.exists():
        return None
    try:
        found = torch.load(place, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{place} can't be read ({reason}); remove it to begin with the replicas' parameters"
        ) from error
    if not isinstance(found, dict) or tuple(found.get("format", ())) != MARKS:
        raise ValueError(f"{place} is no snapshot of a shard; give another folder")
    if found["shard"] != shard:
        raise ValueError(f"{place} is of shard {found['shard']}; give each shard its own file")
    state: dict[str, Any] = found["state"]
    return state
