"""What a run measured: a JSON line per step, TensorBoard, the loss curve as a picture, and the
memory in use.

    {"step": 120, "loss": 2.31, "lr": 0.001, "grad_norm": 0.7, "tokens_per_s": 5200.0, "memory_gib":
    0.6, ...}

Losses are in nats per byte. `validation_loss` is there in the steps in which it was measured.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["MetricsLog", "StepMemory", "peak_memory_gib", "plot_losses", "read_rows"]


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held so far: on the GPU, or resident in main memory; in
    GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class StepMemory:
    """The most memory that a piece of work took beyond what was held when it began, in bytes:
    `taken`, None where that can't be told. On the GPU of tensors; else of the process, by Linux'
    high-water mark."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.taken: int | None = None

    def __enter__(self) -> StepMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before: int | None = torch.cuda.memory_allocated(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is held now
            self._before = _of_status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            after: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            after = _of_status("VmHWM")
        if self._before is not None and after is not None:
            self.taken = max(0, after - self._before)


def _of_status(key: str) -> int | None:
    """Bytes, as /proc/self/status says."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a killed run left half-written is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class MetricsLog:
    """Appends rows to `folder`/metrics.jsonl and to TensorBoard's files in `folder`/tensorboard.

    Args:
        first_step: Rows of this step and later, from a run that got further than its checkpoint,
            are dropped. A row that can't be written, for a full disk, is left out of the file with
            one word in `problems`; the training goes on.
    """

    def __init__(self, folder: Path, *, first_step: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows = [row for row in read_rows(self.path) if row["step"] < first_step]
        self.problems: list[str] = []
        self._failing = False
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._writer: Any = None
        if not tensorboard:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        except ModuleNotFoundError:
            self.problems.append("no TensorBoard files: the package tensorboard is not installed")

    def write(self, row: Mapping[str, Any], *, tensorboard: bool = True) -> None:
        """Append one row; `tensorboard`: its numbers also there."""
        self.rows.append(dict(row))
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
            if self._writer is not None and tensorboard:
                for key, value in row.items():
                    if key != "step" and isinstance(value, int | float):
                        self._writer.add_scalar(key, value, row["step"])
            self._failing = False
        except OSError as error:
            if not self._failing:  # said once, not at every step
                self.problems.append(f"{self.path} can't be written: {error.strerror or error}")
            self._failing = True

    def take_problems(self) -> list[str]:
        """What went wrong since the last call."""
        found, self.problems = self.problems, []
        return found

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def plot_losses(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    bigram_loss: float | None,
    title: str,
    unit: str = "nats per byte",
) -> bool:
    """Draw train and validation loss over steps, and the bigram model's, if any, as a line; False
    without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(rows)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if train:
        axes.plot(*zip(*train, strict=True), color="0.7", linewidth=0.8, label="train, each step")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color="C0", marker="o", markersize=3, label="validation"
        )
    if bigram_loss is not None:
        label = f"byte bigrams: {bigram_loss:.2f}"
        axes.axhline(bigram_loss, color="C3", linestyle="--", label=label)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
