"""CompressConfig: what `pyops compress` reads.

[model]            # CompressModel: folder in, folder out
[data]             # CompressData: text to learn from, and text that is held out
[measure]          # MeasureConfig: what is measured before and after each step
[[step]]           # one or more; method = "distill", DistillStep; ...
method = "distill"
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyops.compress.steps import PruneStep, Step, check_order, step_kinds
from pyops.config.config_error import ConfigError, require
from pyops.config.reading import build_section, read_tables

__all__ = [
    "CompressConfig",
    "CompressData",
    "CompressModel",
    "MeasureConfig",
    "compress_config_of",
    "load_compress_config",
]

PRUNED = ("dense", "packed", "2:4")
DTYPES = ("", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CompressModel:
    """Which model becomes smaller, and where it is written.

    Attributes:
        folder: Folder in: of a causal language model, as save_pretrained of transformers or
            pyops.hub.save wrote it, with its tokenizer.json.
        output: Folder out, which must not be there.
        dtype: Of the numbers that are written: "float32", "bfloat16" or "float16"; "": as in the
            folder. Steps compute in float32.
        form: Of a pruned model's weights: "dense", with their zeros, for whoever reads plain
            weights; "packed", a bit for each weight and the values that are alive; or "2:4".
            Quantized models have a form of their own.
    """

    folder: str = ""
    output: str = ""
    dtype: str = ""
    form: str = "dense"

    def __post_init__(self) -> None:
        for name in ("folder", "output"):
            if not getattr(self, name):
                raise ValueError(f'{name} is ""; name the folder {NAMES[name]}')
        require(self, f"one of {', '.join(DTYPES[1:])}", ("dtype",), lambda v: v in DTYPES)
        require(self, f"one of {', '.join(PRUNED)}", ("form",), lambda v: v in PRUNED)
        if Path(self.folder).absolute() == Path(self.output).absolute():
            raise ValueError(f"output is {self.output!r}, the folder in; name another folder")


NAMES = {"folder": "that is read", "output": "that is written"}


@dataclass(frozen=True)
class CompressData:
    """The text.

    Attributes:
        train: A file or a folder of text, or .jsonl of instructions, that steps learn from and
            layers are calibrated on; "": none, for runs without such steps.
        held_out: The same, that models are scored on; "": the end of `train`.
        validation_fraction: Without `held_out`, the part of `train` that is held out.
        sequence_length: The tokens of a row, at most.
        long_rows: Of instructions with more: "refuse" or "truncate".
        num_held_out_rows: Rows that models are scored on, at most.
        num_calibration_rows: Rows that layers are calibrated on, at most.
        cache: The folder for tokens.
    """

    train: str = ""
    held_out: str = ""
    validation_fraction: float = 0.1
    sequence_length: int = 128
    long_rows: str = "refuse"
    num_held_out_rows: int = 128
    num_calibration_rows: int = 32
    cache: str = "runs/data"

    def __post_init__(self) -> None:
        if not self.train and not self.held_out:
            raise ValueError(
                'train is "" and held_out is ""; models are scored on text: name a file of text '
                "as held_out, and one to learn from as train"
            )
        require(self, "more than 0, less than 1", ("validation_fraction",), lambda v: 0.0 < v < 1.0)
        require(self, "2 or more", ("sequence_length",), lambda v: v >= 2)
        require(self, "1 or more", ("num_held_out_rows", "num_calibration_rows"), lambda v: v >= 1)
        require(self, "refuse or truncate", ("long_rows",), lambda v: v in ("refuse", "truncate"))


@dataclass(frozen=True)
class MeasureConfig:
    """What is measured of the model of every stage.

    Attributes:
        rounds: How often each stage's model is timed, in turn with the others, for which the models
            of all stages are in memory together; 0: never.
        batch: Rows of a forward that is timed.
        prompt_tokens: Tokens that are continued.
        new_tokens: Tokens that follow them, one row, one after the other.
        picture: Whether a picture is drawn, compression.svg, beside compression.json.
    """

    rounds: int = 9
    batch: int = 8
    prompt_tokens: int = 8
    new_tokens: int = 16
    picture: bool = True

    def __post_init__(self) -> None:
        require(self, "0 or more", ("rounds",), lambda v: v >= 0)
        require(self, "1 or more", ("batch", "prompt_tokens", "new_tokens"), lambda v: v >= 1)


@dataclass(frozen=True)
class CompressConfig:
    """All of a run of `pyops compress`.

    Attributes:
        model: [model].
        data: [data].
        measure: [measure].
        steps: [[step]], in order.
    """

    model: CompressModel
    data: CompressData
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    steps: tuple[Step, ...] = field(default=(), metadata={"toml": False})

    def __post_init__(self) -> None:
        check_order(self.steps)
        self._check_form()
        needy = [i for i, step in enumerate(self.steps) if step.learns or step.calibrates]
        if needy and not self.data.train:
            step = self.steps[needy[0]]
            raise ConfigError(
                f'data.train is "", but step {needy[0] + 1} ({step.method}) needs text to '
                f"{'learn from' if step.learns else 'calibrate on'}: name a file or a folder"
            )

    def _check_form(self) -> None:
        form = self.model.form
        pruning = [step for step in self.steps if isinstance(step, PruneStep)]
        if form == "dense":
            return
        if not pruning:
            raise ConfigError(
                f'model.form is "{form}", which is of pruned models, but no step prunes; leave it '
                "out"
            )
        if form == "2:4" and any(step.pattern != "2:4" for step in pruning):
            raise ConfigError(
                'model.form is "2:4", but a step prunes in another way; give each pattern = "2:4", '
                'or set form to "packed"'
            )
        if self.model.dtype not in ("", "float32"):
            raise ConfigError(
                f'model.form is "{form}", whose files have the numbers that steps compute with, '
                f'float32, but model.dtype is "{self.model.dtype}"; leave one of them out'
            )


def load_compress_config(path: Path | str, *, overrides: Sequence[str] = ()) -> CompressConfig:
    """Read a TOML file.

    Args:
        path: The file.
        overrides: Each "section.key=value", the value as in TOML (quotes may be left out).

    Raises:
        ConfigError: For what is wrong, by the name of the key, with the fix.
    """
    tree = read_tables(path, overrides=overrides, example="examples/compress/compress.toml")
    return compress_config_of(tree)


def compress_config_of(tables: Mapping[str, Any]) -> CompressConfig:
    """The configuration that tables describe, as a TOML file holds them.

    Args:
        tables: {section: {key: value}}, and "step": a list of tables.

    Raises:
        ConfigError: As of `load_compress_config`.
    """
    if not isinstance(tables, Mapping):
        raise ConfigError(f"the tables are a {type(tables).__name__}; give {{section: table}}")
    tree = dict(tables)
    given = tree.pop("step", [])
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ConfigError(f"step is {given!r}; it is a list of tables: write [[step]] before each")
    steps = tuple(_step(number, table) for number, table in enumerate(given, start=1))
    for name in ("model", "data"):
        tree.setdefault(name, {})
    config: CompressConfig = build_section(CompressConfig, tree, prefix="", given={"steps": steps})
    return config


def _step(number: int, table: Mapping[str, Any]) -> Step:
    kinds, options = step_kinds(), dict(table)
    method = options.pop("method", None)
    if not isinstance(method, str) or method not in kinds:
        near = difflib.get_close_matches(str(method), kinds, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(kinds)}"
        said = f"has no method; {fix}" if method is None else f"has method {method!r}; {fix}"
        raise ConfigError(f"step {number} {said}")
    try:
        step: Step = build_section(kinds[method], options, prefix=f"step {number} ({method}).")
    except TypeError as error:
        raise ConfigError(f"step {number} ({method}): {error}") from None
    return step
