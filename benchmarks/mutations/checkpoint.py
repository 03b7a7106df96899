"""Checkpoints for `benchmarks.mutations`: files damaged, and manifests changed and sealed again."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.mutations.odd_values import ODD, Change, damage, places, set_place
from pyops.checkpoint import CheckpointError, load, save
from pyops.checkpoint.format.manifest import seal
from pyops.flat import Shard, Shards

__all__ = ["Checkpoint"]


def _tensors(part: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(part, Tensor):
        return {name: part}
    items = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list | tuple)
        else ()
    )
    return {n: t for key, value in items for n, t in _tensors(value, f"{name}.{key}").items()}


class Checkpoint:
    """A checkpoint with whole tensors, boxes, ranges and a rank's own state."""

    refusals = (CheckpointError,)

    def __init__(self, sound: Path) -> None:
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        cut = drawn(4, 6)
        boxes = Shards((Shard((4, 6), (0, 0), cut[:2]), Shard((4, 6), (2, 0), cut[2:])))
        flat = drawn(10)
        ranges = Shards((Shard((2, 5), (0,), flat[:3]), Shard((2, 5), (3,), flat[3:])))
        moments = {0: {"step": torch.tensor(7.0), "exp_avg": boxes}, 1: {"exp_avg": ranges}}
        state = {
            "model": {
                "w": drawn(5, 3),
                "b": drawn(3).bfloat16(),
                "empty": drawn(0, 4),
                "mask": torch.ones(3) > 0,
            },
            "optimizer": {"state": moments, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
            "list": [1, [2, drawn(2)]],
            "step": 7,
            "loss": 1.5,
            "name": "run",
            "done": False,
            "nothing": None,
        }
        save(sound, state, own={"rng": torch.arange(9), "count": 3})
        self._sound = sound
        self._files = sorted(path.name for path in sound.iterdir())
        self._manifest = json.loads((sound / "manifest.json").read_text())
        self._places = places(self._manifest)
        whole, own = load(sound)
        self._tensors = _tensors([whole, own])

    def mutate(self, rng: random.Random, folder: Path) -> Change:
        shutil.copytree(self._sound, folder)
        if rng.random() < 0.45:
            return damage(rng, folder, self._files)
        manifest = copy.deepcopy(self._manifest)
        at = rng.choice(self._places)
        way = rng.choice(["value", "value", "value", "remove", "rename", "another's"])
        holder = manifest
        for key in at[:-1]:
            holder = holder[key]
        value: Any = rng.choice(ODD)
        if way == "value":
            set_place(manifest, at, value)
        elif way == "another's":
            value = copy.deepcopy(self._at(rng.choice(self._places)))
            set_place(manifest, at, value)
        elif way == "rename" and isinstance(holder, dict):
            value = rng.choice([each for each in ODD if isinstance(each, str)])
            holder[value] = holder.pop(at[-1])
        else:
            del holder[at[-1]]
        manifest.pop("crc32", None)
        (folder / "manifest.json").write_text(json.dumps(seal(manifest)))
        text = f"{way} of manifest {'.'.join(map(str, at))}: {str(value)[:60]}"
        keys = () if way == "another's" else (*map(str, at), *([value] if way == "rename" else ()))
        return Change(text, ("manifest.json",), keys, (at, value))

    def _at(self, at: tuple[Any, ...]) -> Any:
        found: Any = self._manifest
        for key in at:
            found = found[key]
        return found

    def read(self, folder: Path, change: Change) -> str:
        """What is wrong with what was read; "": nothing."""
        state, own = load(folder)
        load(folder, lazy=True, compare=True)
        for name, tensor in _tensors([state, own]).items():
            candidates = (
                [self._tensors[name]] if name in self._tensors else list(self._tensors.values())
            )
            if (
                change.at is not None
            ):  # a name in the tree may lead to another tensor, which is then what it says
                candidates = list(self._tensors.values())
            if not any(
                tensor.dtype == c.dtype and tensor.shape == c.shape and torch.equal(tensor, c)
                for c in candidates
            ):
                return f"{name} is none of the tensors that were saved"
        return ""
