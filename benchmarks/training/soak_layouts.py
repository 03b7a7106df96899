"""The layouts of the soak, and the folder in which ranks of one of them train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.soak_processes import Forked
from benchmarks.training.soak_rank import begin
from pyops.train.report.metrics import read_rows

__all__ = ["LAYOUTS", "Place"]

ROOT = Path(__file__).resolve().parents[2]
Sections = dict[str, dict[str, Any]]
GPT: Sections = {
    "model": {"sequence_length": 16, "num_layers": 3, "num_heads": 2, "dim": 16, "dropout": 0.1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 3},
    "train": {
        "num_steps": 24,
        "batch": 12,
        "num_validation_sequences": 6,
        "validate_every": 0,
        "num_sample_tokens": 0,
    },
}
VIT: Sections = {
    "task": {"kind": "digits", "num_epochs": 4},
    "vit": {"image_size": 8, "num_channels": 1, "patch_size": 4, "num_labels": 10,
            "num_layers": 4, "num_heads": 2,
            "dim": 16, "dropout": 0.1},
    "elastic": {"freeze": "bound", "alpha": 0.4, "cache": "off"},
    "optimizer": {"lr": 1e-2, "warmup_steps": 3, "eps": 1e-3},
    "train": {"batch": 420, "seed": 1},
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, Sections]] = {  # ranks, and what differs from GPT or VIT
    "alone": (1, {}),
    "dp 2": (2, {}),
    "dp 3": (3, {}),
    "zero 1, 2 ranks": (2, {"zero": {"stage": 1}}),
    "zero 1, 3 ranks": (3, {"zero": {"stage": 1}}),
    "zero 2, 2 ranks": (2, {"zero": {"stage": 2}}),
    "zero 2, 3 ranks": (3, {"zero": {"stage": 2}}),
    "zero 3, 2 ranks": (2, {"zero": {"stage": 3}}),
    "zero 3, 3 ranks": (3, {"zero": {"stage": 3}}),
    "tp 2": (2, {"parallel": {"tp": 2}}),
    "pp 2": (2, {"parallel": {"pp": 2, "num_microbatches": 2}}),
    "pp 3": (3, {"parallel": {"pp": 3, "num_microbatches": 3}}),
    "elastic 2": (2, {"parallel": {"pp": 2}, "elastic": {}}),
    "elastic 3": (3, {"parallel": {"pp": 3}, "elastic": {}}),
}


def _toml(sections: Sections, name: str) -> str:
    lines = [f'name = "{name}"']
    for section, options in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Place:
    """A layout's configuration in a folder of its own."""

    folder: Path
    layout: str
    timeout: float

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "soak"

    def write(self, text: Path) -> None:
        self.folder.mkdir(parents=True)
        changes = LAYOUTS[self.layout][1]
        sections = {
            name: dict(options) for name, options in (VIT if "elastic" in changes else GPT).items()
        }
        for name, options in changes.items():
            sections[name] = {**sections.get(name, {}), **options}
        sections["train"] |= {
            "folder": str(self.folder / "runs"),
            "device": "cpu",
            "checkpoint_every": 4,
            "num_checkpoints": 3,
        }
        if "elastic" not in changes:
            sections["data"] = {"path": str(text), "cache": str(text.parent / "cache")}
        (self.folder / "run.toml").write_text(_toml(sections, "soak"))

    def losses(self) -> list[float]:
        path = self.run / "metrics.jsonl"
        return [row["loss"] for row in read_rows(path) if "loss" in row] if path.exists() else []

    def rows(self) -> int:
        """How many lines of metrics there are, a half-written one apart."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def half_saved(self) -> list[Path]:
        return list((self.run / "checkpoints").glob("*.tmp"))

    def command(self) -> list[str]:
        return [
            str(ROOT / "benchmarks" / "training" / "soak_rank.py"),
            str(self.folder / "run.toml"),
            str(self.timeout),
        ]

    def fork(self, name: str, **variables: str) -> Forked:
        log, config = self.folder / f"said-{name}.txt", self.folder / "run.toml"
        return Forked(
            begin, ({"OMP_NUM_THREADS": "1", **variables}, str(log), str(config), self.timeout)
        )

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(self.folder / f"said-{name}.txt", "w") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                env=given,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self, name: str) -> str:
        return (self.folder / f"said-{name}.txt").read_text()
