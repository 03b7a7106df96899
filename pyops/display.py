"""What a person sees of a run: one live line on a terminal, plain lines anywhere else, nothing but on rank 0.

small  ━━━╸━━  validation 2.40  step 120/600  loss 2.31  5,210 tokens/s  0.6 GiB  236 kB sent (31x less than fp32)  0:03:12 left
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Display", "describe", "describe_memory"]


def _time(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def describe(row: Mapping[str, Any], *, num_steps: int, seconds_left: float | None) -> str:
    """One line about a step."""
    loss = "not finite" if row.get("loss") is None else f"{row['loss']:.3f}"
    parts = [f"step {row['step'] + 1}/{num_steps}", f"loss {loss}"]
    if "validation_loss" in row:
        parts.append(f"validation {row['validation_loss']:.3f}")
    parts += [f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['memory_gib']:.2f} GiB"]
    if "bytes_sent" in row:
        ratio = f" ({row['compression']:.3g}x less than fp32)" if row.get("compression", 1.0) > 1.05 else ""
        parts.append(f"{_size(row['bytes_sent'])} sent{ratio}")
    if "loss_scale" in row:
        parts.append(f"scale {row['loss_scale']:g}")
    if row.get("skipped"):
        parts.append(f"{row['skipped']} skipped")
    if seconds_left is not None:
        parts.append(f"{_time(seconds_left)} left")
    return "  ".join(parts)


def describe_memory(kept: Mapping[str, int], *, taken: int | None) -> str:
    """One line about the memory of a rank. kept: {what: bytes}; taken: what a step needed besides, None where unknown."""
    parts = [f"{what} {_size(nbytes)}" for what, nbytes in kept.items()]
    parts += [f"activations and buffers {_size(taken)}"] if taken is not None else []
    return f"memory per rank: {', '.join(parts)}"


class Display:
    """Shows rows of metrics as they come. `quiet`: shows nothing, for all ranks but one."""

    def __init__(self, name: str, *, num_steps: int, first_step: int = 0, every: int = 1, quiet: bool = False) -> None:
        self._num_steps, self._first, self._every, self._quiet = num_steps, first_step, every, quiet
        self._started = time.monotonic()
        self._validation = ""
        self._progress: Any = None
        if not quiet and sys.stdout.isatty():
            self._progress, self._task = _make_progress(name, num_steps, first_step)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a step: on a terminal each, else every `every`-th, and those with a validation loss."""
        if self._quiet:
            return
        done = row["step"] + 1 - self._first
        left = (time.monotonic() - self._started) / done * (self._num_steps - row["step"] - 1)
        if self._progress is not None:
            if "validation_loss" in row:
                self._validation = f"validation {row['validation_loss']:.3f}  "
            text = describe({k: v for k, v in row.items() if k != "validation_loss"}, num_steps=self._num_steps,
                            seconds_left=left)  # fmt: skip
            self._progress.update(self._task, completed=row["step"] + 1, text=self._validation + text)
        elif (row["step"] + 1) % self._every == 0 or "validation_loss" in row:
            print(describe(row, num_steps=self._num_steps, seconds_left=left), flush=True)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the live line; what is shown from now on is plain lines."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _make_progress(name: str, num_steps: int, first_step: int) -> tuple[Any, Any]:
    try:
        from rich.progress import BarColumn, Progress, TextColumn
    except ModuleNotFoundError:
        return None, None
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}")
    progress = Progress(*columns, refresh_per_second=4)
    task = progress.add_task(name, total=num_steps, completed=first_step, text="starting")
    progress.start()
    return progress, task
