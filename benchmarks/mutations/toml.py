"""Configurations for `benchmarks.mutations`: `pyops train CONFIG` up to the construction of the
model."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import random
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.mutations.odd_values import ODD, Change, damage, places, set_place
from pyops.cli.commands import main
from pyops.config import Config, ConfigError, load_config
from pyops.config.run_plan import loss_scale_of
from pyops.config.task_config import KINDS
from pyops.models import BERT, GPT, ViT
from pyops.train import run as training

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Toml"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = tuple(field.name for field in fields(Config) if field.name != "name")


def _as_lists(value: Any) -> Any:
    """What a file says of a value, however deep its tuples lie in one another."""
    return [_as_lists(each) for each in value] if isinstance(value, tuple | list) else value


class Reached(Exception):
    """The model could be made."""


class Refused(Exception):
    """The command line printed one line and returned 2."""


def _make(config: Config, **_: Any) -> None:
    """What a run begins with, without its data and without memory."""
    section = KINDS[config.task.kind]
    made: Any = {"model": GPT, "vit": ViT, "bert": BERT}[section]
    made(getattr(config, section), seed=None, device="meta", dtype=torch.float32)
    loss_scale_of(config.precision)
    config.elastic.policy()
    config.optimizer.lr_at(0, num_steps=config.train.num_steps)
    raise Reached


def _text(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return (
            "nan"
            if math.isnan(value)
            else ("inf" if value > 0 else "-inf")
            if math.isinf(value)
            else repr(value)
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_text(v)}" for k, v in value.items()) + "}"
    return (
        "1979-05-27"
        if value is None
        else json.dumps(value)
        if isinstance(value, str)
        else str(value)
    )


def _whole(tree: dict[str, Any]) -> str:
    top = [
        f"{key} = {_text(value)}"
        for key, value in tree.items()
        if not (isinstance(value, dict) and key in ALL)
    ]
    for section in (key for key, value in tree.items() if isinstance(value, dict) and key in ALL):
        top += [
            f"[{section}]",
            *(f"{json.dumps(k)} = {_text(v)}" for k, v in tree[section].items()),
        ]
    return "\n".join(top) + "\n"


def _tables(config: Any) -> dict[str, Any]:
    """A configuration as its file would have it: tuples are lists, options of Python alone are
    left out."""
    tree: dict[str, Any] = {}
    for each in fields(config):
        if each.metadata.get("toml", True):
            value = getattr(config, each.name)
            tree[each.name] = (
                _tables(value) if is_dataclass(value) else json.loads(json.dumps(value))
            )
    return tree


class Toml:
    """The examples, with every section's defaults written out; paths lead nowhere but to the
    folder."""

    refusals = (Refused,)

    def __init__(self, sound: Path) -> None:
        self._trees = {}
        for path in sorted(EXAMPLES.glob("*.toml")):
            tree = _tables(load_config(path))
            tree["task"]["pretrained"] = ""
            self._trees[path.name] = {**tree, "parallel": {**tree["parallel"], "pp": 1}}

    def mutate(self, rng: random.Random, folder: Path) -> Change:
        folder.mkdir(parents=True)
        name = rng.choice(list(self._trees))
        tree = copy.deepcopy(self._trees[name])
        tree["train"]["folder"] = "runs"
        file = folder / "config.toml"
        way = rng.choice(
            ["value"] * 8
            + ["unknown", "twice", "elsewhere", "damage", "folder", "missing", "latin"]
        )
        at = rng.choice([place for place in places(tree) if len(place) <= 2])
        there = tree[at[0]][at[1]] if len(at) == 2 else tree[at[0]]
        alike = [each for each in ODD if type(each) is type(there)]
        value: Any = rng.choice(alike if alike and rng.random() < 0.6 else ODD)
        if at == ("train", "folder") and isinstance(value, str) and "/" in value:
            value = "\u0000"
        change = Change(
            f"{name}: {way} {'.'.join(at)} = {str(value)[:60]}",
            (at[-1], "config.toml", *(["elastic.freeze", "task.kind"] if len(at) == 1 else [])),
            at=(at, value),
        )
        if way == "value":
            set_place(tree, at, value)
        elif way == "unknown":
            set_place(
                tree, (*at[:-1], rng.choice(["x", at[-1] + "s", "", "é", "__class__"])), value
            )
        elif way == "elsewhere":
            tree[rng.choice(ALL)][at[-1]] = value
        file.write_text(_whole(tree))
        if way == "twice":
            file.write_text(
                file.read_text() + "".join(f"{k} = 1\n" for k in list(tree[ALL[-1]])[:1])
            )
        elif way == "damage":
            change = replace(
                damage(rng, folder, ["config.toml"]),
                names=("config.toml", "unknown key", *ALL, "name"),
            )
        elif way in ("folder", "missing"):
            file.unlink()
            if way == "folder":
                file.mkdir()
        elif way == "latin":
            file.write_bytes(file.read_bytes() + b"# \xe9\n")
        return (
            change
            if way in ("value", "damage")
            else Change(change.text, (*change.names, "config.toml", "unknown key"))
        )

    def read(self, folder: Path, change: Change) -> str:
        """The command line; where it is accepted, the value must be what the configuration has."""
        told, here = io.StringIO(), os.getcwd()
        os.chdir(folder)
        try:
            with (
                contextlib.redirect_stderr(told),
                mock.patch.multiple(training, TextTraining=_make, SampleTraining=_make),
            ):
                code = main(["train", "config.toml"])
        except Reached:
            return self._compare(folder, change)
        finally:
            os.chdir(here)
        lines = told.getvalue().strip().splitlines()
        if code != 2 or not lines or not lines[0].startswith("pyops: "):
            return f"it returned {code} and said {told.getvalue()[:200]!r}"
        raise Refused(lines[0])

    def _compare(self, folder: Path, change: Change) -> str:
        try:
            config = load_config(folder / "config.toml")
            tree = tomllib.loads((folder / "config.toml").read_text())
        except (ConfigError, ValueError) as error:
            return f"the command line took what load_config refuses: {error}"
        for at in places(tree):
            if len(at) > 2 or isinstance(tree[at[0]], dict) != (len(at) == 2):
                continue
            wanted = tree[at[0]][at[1]] if len(at) == 2 else tree[at[0]]
            found = (
                getattr(getattr(config, at[0]), at[1]) if len(at) == 2 else getattr(config, at[0])
            )
            if _as_lists(found) != wanted:
                return f"{'.'.join(at)} is {found!r}, the file has {wanted!r}"
        return ""
