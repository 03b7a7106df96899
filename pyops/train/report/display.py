"""What a person sees of a run: lines that stay, and below them on a terminal a live one; nothing
but on rank 0.

step 100/600  loss 2.401  validation 2.403  5,210 tokens/s  0.60 GiB  236 kB sent  0:03:38 left
step 120/600  loss 2.314  5,190 tokens/s  0.60 GiB  236 kB sent (31x less than fp32)  0:03:12 left
small ━━━╸━━━━━━ step 121/600  loss 2.309  validation 2.403        0:03:11 left

On a narrow terminal the live line has its bar and the time left, and of the rest what there is room
for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Display", "describe", "describe_bytes", "describe_memory", "describe_transition"]


def _time(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def describe_bytes(nbytes: float) -> str:
    """Three digits and a unit.

    Args:
        nbytes: How many bytes.
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def describe(row: Mapping[str, Any], *, num_steps: int, seconds_left: float | None) -> str:
    """One line about a step: of what the row has."""
    left = [] if seconds_left is None else [f"{_time(seconds_left)} left"]
    return "  ".join([*_parts(row, num_steps), *left])


def _parts(row: Mapping[str, Any], num_steps: int) -> list[str]:
    """What there is to say, the most important first."""
    loss = "not finite" if row.get("loss") is None else f"{row['loss']:.3f}"
    parts = [f"epoch {row['epoch'] + 1}"] if "epoch" in row else []
    parts += [f"step {row['step'] + 1}/{num_steps}", f"loss {loss}"]
    if "accuracy" in row:
        parts.append(f"accuracy {100 * row['accuracy']:.1f} %")
    parts += _validation(row)
    if "frozen" in row:
        parts.append(f"frozen {row['frozen']}")
    if "stages" in row:
        parts.append(_pipelines(row))
    parts += [
        f"{row[key]:,.0f} {unit}/s{_cached(row)}" for key, unit in RATES.items() if key in row
    ]
    if "memory_gib" in row:
        parts.append(f"{row['memory_gib']:.2f} GiB")
    if "bytes_sent" in row:
        ratio = (
            f" ({row['compression']:.3g}x less than fp32)"
            if row.get("compression", 1.0) > 1.05
            else ""
        )
        parts.append(f"{describe_bytes(row['bytes_sent'])} sent{ratio}")
    if "loss_scale" in row:
        parts.append(f"scale {row['loss_scale']:g}")
    if row.get("skipped"):
        parts.append(f"{row['skipped']} skipped")
    return parts


def _fitting(parts: Sequence[str], width: int) -> str:
    """Those parts, in their order, that `width` columns have room for."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        line = longer if len(longer) <= width else line
    return line


RATES = {"tokens_per_s": "tokens", "samples_per_s": "samples"}
VALIDATION = ("validation_loss", "validation_accuracy")


def _validation(row: Mapping[str, Any]) -> list[str]:
    """What was measured on held-out data."""
    parts = [f"validation {row['validation_loss']:.3f}"] if "validation_loss" in row else []
    return parts + (
        [f"validation {100 * row['validation_accuracy']:.1f} %"]
        if "validation_accuracy" in row
        else []
    )


def _pipelines(row: Mapping[str, Any]) -> str:
    """As many as there are, each of so many stages."""
    stages, replicas = row["stages"], row.get("replicas", 1)
    return f"{stages} stage{'s' * (stages != 1)} x {replicas} replica{'s' * (replicas != 1)}"


def _cached(row: Mapping[str, Any]) -> str:
    """How much of what frozen layers say was read."""
    share = float(row.get("cached", 0.0))
    return ", cached" if share >= 1 else f", {100 * share:.0f} % cached" if share > 0 else ""


def describe_transition(
    before: Mapping[str, Any], after: Mapping[str, Any], *, seconds: float, reason: str = ""
) -> str:
    """One line about a change of layout.

    Args:
        before, after: Rows of metrics, or else their "frozen", "stages" and "replicas".
    """
    text = f"frozen {before['frozen']} -> {after['frozen']}, {_pipelines(before)}"
    if _pipelines(after) != _pipelines(before):
        text += f" -> {_pipelines(after)}"
    return f"{text}, in {seconds:.2f} s{f': {reason}' if reason else ''}"


def describe_memory(kept: Mapping[str, int], *, taken: int | None) -> str:
    """One line about the memory of a rank.

    Args:
        kept: {what: bytes}.
        taken: What a step needed besides, None where unknown.
    """
    parts = [f"{what} {describe_bytes(nbytes)}" for what, nbytes in kept.items()]
    parts += [f"activations and buffers {describe_bytes(taken)}"] if taken is not None else []
    return f"memory per rank: {', '.join(parts)}"


WIDE = 100  # columns of a terminal that has room for a longer bar
TIME = len("100:00:00 left")


class Display:
    """Shows rows of metrics as they come. `quiet`: shows nothing, for all ranks but one."""

    def __init__(
        self, name: str, *, num_steps: int, first_step: int = 0, every: int = 1, quiet: bool = False
    ) -> None:
        self.num_steps, self._first, self._every, self._quiet = num_steps, first_step, every, quiet
        self._started = time.monotonic()
        self._held_out: dict[str, Any] = {}
        self._progress: Any = None
        if not quiet and sys.stdout.isatty():
            self._progress, self._task, self._taken = _make_progress(name, num_steps, first_step)

    def step(self, row: Mapping[str, Any]) -> None:
        """A line that stays for every `every`-th step, and for those that measured on held-out
        data; the live line for each."""
        if self._quiet:
            return
        done = row["step"] + 1 - self._first
        left = (time.monotonic() - self._started) / done * (self.num_steps - row["step"] - 1)
        measured = {key: row[key] for key in VALIDATION if key in row}
        if measured or (row["step"] + 1) % self._every == 0:
            self.note(describe(row, num_steps=self.num_steps, seconds_left=left))
        if self._progress is not None:
            self._held_out |= measured
            parts = _parts({**row, **self._held_out}, self.num_steps)
            text = _fitting(parts, self._progress.console.width - self._taken)
            self._progress.update(
                self._task, completed=row["step"] + 1, text=text, left=f"{_time(left)} left"
            )

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the live line; what is shown from now on is plain lines."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _make_progress(name: str, num_steps: int, first_step: int) -> tuple[Any, Any, int]:
    """A live line (None without rich), its task, and the columns of it that are not for text."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ModuleNotFoundError:
        return None, None, 0
    console = Console()
    bar = 20 if console.width >= WIDE else 10
    short = name[: max(0, console.width - bar - TIME - 3)]
    columns = [
        TextColumn(f"{{task.{field}}}", markup=False)
        for field in ("description", "fields[text]", "fields[left]")
    ]
    progress = Progress(
        columns[0], BarColumn(bar_width=bar), *columns[1:], console=console, refresh_per_second=4
    )
    task = progress.add_task(short, total=num_steps, completed=first_step, text="starting", left="")
    progress.start()
    return progress, task, len(short) + bar + TIME + 3  # a space between two columns
