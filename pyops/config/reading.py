"""load_config: a TOML file and its overrides -> Config, or the key that is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyops.config.config_error import ConfigError
from pyops.config.folder_config import ModelFolder
from pyops.config.run_config import Config
from pyops.models import GPTConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["build_section", "config_of", "load_config", "read_tables"]

# Keys of earlier versions, and what they are now.
RENAMED = {
    "parallel.memory_gib": "parallel.memory_bytes, in bytes: 1073741824 for each GiB",
    "parallel.micro_batches": "parallel.num_microbatches",
    "task.copies": "task.num_copies",
    "task.epochs": "task.num_epochs",
    "task.passages": "task.num_passages",
    "train.bucket_mib": "train.bucket_bytes, in bytes: 1048576 for each MiB",
    "train.keep": "train.num_checkpoints",
    "train.sample_tokens": "train.num_sample_tokens",
    "train.steps": "train.num_steps",
    "train.validation_sequences": "train.num_validation_sequences",
    "zero.overlap": "zero.overlap_grad_reduce",
    "zero.tile_mib": "zero.tile_bytes, in bytes: 1048576 for each MiB",
}


def load_config(path: Path | str, *, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file; each override is "section.key=value", the value as in TOML (quotes may be
    left out)."""
    return config_of(read_tables(path, overrides=overrides, example="examples/gpt_small.toml"))


def read_tables(path: Path | str, *, overrides: Sequence[str], example: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        path: The file.
        overrides: As of `load_config`.
        example: A file that a message names.

    Raises:
        ConfigError: It can't be read, or an override is none.
    """
    path = Path(path)
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"config {path} can't be read: {error.strerror}; name a TOML file, such as {example}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is no TOML: {error}; correct it there") from None
    for override in overrides:
        _override(tree, override)
    return tree


def config_of(tables: Mapping[str, Any]) -> Config:
    """The configuration that tables describe, as a TOML file holds them.

    Args:
        tables: {section: {key: value}}.
    """
    tree = dict(tables)
    given = _take_model_folder(tree)
    config: Config = build_section(Config, tree, prefix="", given=given)
    return config


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError(
            f"--set {override} is no assignment; write --set section.key=value, such as "
            "--set train.num_steps=10"
        )
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"--set {override}: {section} is a value, not a section; write --set "
                f"{section}=value"
            )
    try:
        tree[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[last] = text


def _take_model_folder(tree: dict[str, Any]) -> dict[str, Any]:
    """[model] that names a folder is the section of a `ModelFolder`, and taken out; that of a GPT
    stays."""
    model = tree.get("model")
    if not isinstance(model, dict) or "folder" not in model:
        return {}
    del tree["model"]
    own = {f.name for f in dataclasses.fields(ModelFolder)}
    for field in dataclasses.fields(GPTConfig):
        if field.name in model and field.name not in own:
            raise ConfigError(
                f"model.{field.name} is {model[field.name]!r}, but model.folder is "
                f"{model['folder']!r}, whose config.json says what the model is; leave one of them "
                "out"
            )
    found: ModelFolder = build_section(ModelFolder, model, prefix="model.")
    if not found.given:
        raise ConfigError(
            'model.folder is ""; name a Hugging Face folder, or leave the key out for a GPT'
        )
    return {"model_folder": found}


def build_section(
    kind: type, tree: Mapping[str, Any], *, prefix: str, given: Mapping[str, Any] | None = None
) -> Any:
    """The dataclass `kind` from a TOML table.

    Args:
        kind: Of the section.
        tree: The table.
        prefix: Leads the names of its keys in messages.
        given: Fields that are made already.

    Raises:
        ConfigError: By the name of the key that is wrong.
    """
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind) if f.metadata.get("toml", True)]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if prefix + key in RENAMED:
            raise ConfigError(f"{prefix}{key} = {value!r} has a new name: {RENAMED[prefix + key]}")
        if key not in names:
            # A key that is nearly an old one means the new one.
            meant = {old.removeprefix(prefix): new for old, new in RENAMED.items()}
            meant |= {name: prefix + name for name in names}
            near = difflib.get_close_matches(key, meant, n=1)
            fix = (
                f"did you mean {meant[near[0]].partition(',')[0]}?"
                if near
                else f"there are {', '.join(prefix + n for n in names)}"
            )
            raise ConfigError(f"unknown key {prefix}{key} = {value!r}; {fix}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{prefix}{key} is {value!r}; it is a section: write [{prefix}{key}] "
                    "and its keys below"
                )
            values[key] = build_section(
                typing.cast(type, hints[key]), value, prefix=f"{prefix}{key}."
            )
        else:
            values[key] = _convert(value, hints[key], key=prefix + key)
    try:
        return kind(**values, **(given or {}))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None


EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
}

LISTS = {
    str: 'texts, such as [".py", ".md"]',
    int: "whole numbers, such as [2, 3]",
    float: "numbers, such as [0.7, 0.3]",
}


def _pairs(value: Any, key: str) -> tuple[tuple[int, int], ...]:
    lists = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if not lists or any([type(x) for x in each] != [int, int] for each in value):
        raise ConfigError(
            f"{key} is {value!r}; it must be a list of pairs of whole numbers, such as "
            "[[0, 1], [-1, -1]]"
        )
    return tuple((a, b) for a, b in value)


def _convert(value: Any, hint: Any, *, key: str) -> Any:
    """`value` as the field's type; an int will do for a float, nothing else is converted."""
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        if typing.get_origin(of) is tuple:
            return _pairs(value, key)
        taken = (int, float) if of is float else (of,)
        if not isinstance(value, list) or not all(type(item) in taken for item in value):
            raise ConfigError(f"{key} is {value!r}; it must be a list of {LISTS[of]}")
        return tuple(map(of, value))
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(
            f"{key} is {str(value)[:40]}; TOML has whole numbers of 64 bits, up to {2**63 - 1}"
        )
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(
            f"{key} is {value[:40]!r}; a text with a null byte names nothing: leave it out"
        )
    kinds = typing.get_args(hint) or (hint,)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if float(value) != value:
            raise ConfigError(
                f"{key} is {value}, which a number of 64 bits rounds to "
                f"{float(value):.17g}; write that instead"
            )
        value = float(value)
    if type(value) not in kinds or (hint is float and not math.isfinite(value)):
        raise ConfigError(
            f"{key} is {value!r}; it must be {' or '.join(EXPECTED[kind] for kind in kinds)}"
        )
    return value
