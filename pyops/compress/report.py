"""What a run of `pyops compress` found: of the model before the first step and after each, as a
table for a reader and as JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pyops.compress.measuring import Spread
from pyops.train.report.display import describe_bytes

__all__ = ["CompressReport", "StageReport"]

COLUMNS = (
    "",
    "weights",
    "on disk",
    "in memory",
    "loss",
    "accuracy",
    "ms a token",
    "ms a batch",
)


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage: the model as it was written, and read again, after a step."""

    name: str
    """ "before", or the step in a few words."""
    method: str
    """Of the step; "" of the model before."""
    options: Mapping[str, Any]
    """Of the step."""
    num_parameters: int
    """Weights of the whole model, those that are pruned among them."""
    num_pruned: int = 0
    """How many of them are pruned."""
    file_bytes: int
    """Of the files that hold the weights."""
    tensor_bytes: int
    """Of the tensors that a rank has in memory."""
    loss: float
    """Nats per token of the text held out."""
    accuracy: float
    """The part of these tokens that the model finds likeliest."""
    token_ms: Spread | None = None
    """Milliseconds for each token of one row that is continued; None: not timed."""
    batch_ms: Spread | None = None
    """Milliseconds for the forward of a batch, with its loss; None: not timed."""
    seconds: float = 0.0
    """That the step took."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the step had to say."""


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """All stages of a run."""

    folder: str
    """The folder in."""
    output: str
    """The folder out."""
    num_ranks: int
    """That shared the layers."""
    num_threads: int
    """Of each rank."""
    device: str
    """Where the models were."""
    num_tokens: int
    """Held out, that count in losses and accuracies."""
    batch_shape: tuple[int, int]
    """Rows and tokens of the batch whose forward was timed."""
    stages: tuple[StageReport, ...]
    """The model before the first step, and after each."""

    def as_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def rows(self) -> list[list[str]]:
        """The cells of the table, without its head."""
        first = self.stages[0]
        return [
            [
                f"{number} {stage.name}" if number else stage.name,
                f"{stage.num_parameters - stage.num_pruned:,}",
                _beside(stage.file_bytes, first.file_bytes),
                _beside(stage.tensor_bytes, first.tensor_bytes),
                f"{stage.loss:.4f}",
                f"{100 * stage.accuracy:.2f} %",
                _time(stage.token_ms),
                _time(stage.batch_ms),
            ]
            for number, stage in enumerate(self.stages)
        ]

    def table(self, *, width: int = 120) -> str:
        """For a reader: by rich where it is installed.

        Args:
            width: Columns, at most.
        """
        caption = (
            f"{self.num_tokens:,} tokens held out, losses in nats; times on {self.num_ranks} x "
            f"{self.device}, {self.num_threads} threads: median of rounds in turn, and within what "
            f"three fifths of them lay; a batch is {self.batch_shape[0]} x {self.batch_shape[1]} "
            "tokens"
        )
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            return _plain(self.rows(), caption)
        shown = Table(title=f"{self.folder} -> {self.output}", caption=caption)
        for number, name in enumerate(COLUMNS):
            shown.add_column(name, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows():
            shown.add_row(*row)
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(shown)
        return captured.get().rstrip("\n")


def _plain(rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [COLUMNS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*text, caption])


def _beside(value: int, first: int) -> str:
    """A size, and the part of the first one that it is."""
    return f"{describe_bytes(value)} ({value / first:.0%})"


def _time(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"
