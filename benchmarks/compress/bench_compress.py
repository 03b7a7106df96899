"""What each way to make a model smaller costs and saves, side by side: `pyops compress` of one GPT
over the sources of the Python standard library, which the example makes.

Each case begins with the same model; what it becomes is written, read again, scored on text that
was held out, and timed beside the model before.
"""

from __future__ import annotations

import math
import runpy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.compress import CompressReport, StageReport, compress, compress_config_of
from pyops.compress.folders import load_model
from pyops.data.folder_text import FolderTokenizer
from pyops.mesh import ALONE
from pyops.models import GPTConfig, generate
from pyops.tensor_parallel import Ranks

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[2]
MODEL = GPTConfig(
    vocab_size=257, sequence_length=128, num_layers=4, num_heads=4, dim=256, activation="gelu_tanh"
)
TRAINED, TAUGHT = 300, 100  # steps of the model before, and of a method
TEXT, HELD_OUT = 1_500_000, 60_000  # bytes
NEW = 32  # tokens that follow a prompt
LEARN = {"num_steps": TAUGHT, "batch": 8}
KEEP = {"keep": [0, 3], "lr": 1e-3, **LEARN}
PRUNE = {"method": "prune", "lr": 1e-3, **LEARN}
AT_ONCE = {"how": "once", "num_steps": 0}
QUANTIZE = {"method": "quantize"}
METHODS: dict[str, list[dict[str, Any]]] = {
    "2 of 4 layers, distilled": [{"method": "distill", "hidden": 1.0, **KEEP}],
    "2 of 4 layers, from the text alone": [{"method": "finetune", **KEEP}],
    "pruned 0.8, at once": [{**PRUNE, "sparsity": 0.8, **AT_ONCE}],
    "pruned 0.8, gradually": [{**PRUNE, "sparsity": 0.8}],
    "2:4, permuted, pruned once, trained again": [
        {**PRUNE, "pattern": "2:4", "permute": True, "how": "once"}
    ],
    "int8 weights": [QUANTIZE],
    "int8 weights and inputs": [{**QUANTIZE, "activations": "token"}],
    "int4 weights, to nearest": [{**QUANTIZE, "weights": "int4", "group": 64}],
    "int4 weights, GPTQ": [{**QUANTIZE, "weights": "int4", "group": 64, "algorithm": "gptq"}],
    "2 of 4 layers, pruned 0.5, int8": [
        {"method": "distill", "hidden": 1.0, **KEEP},
        {**PRUNE, "sparsity": 0.5},
        {**QUANTIZE, "activations": "token"},
    ],
}


def made(place: Path) -> Path:
    """The folder in."""
    example = runpy.run_path(str(ROOT / "examples" / "compress" / "make_folder.py"))
    text = example["sources"](TEXT)
    example["make_folder"](
        place / "gpt", text[:-HELD_OUT], text[-HELD_OUT:], MODEL, num_steps=TRAINED, batch=8
    )
    return place / "gpt"


def form_of_files(steps: list[dict[str, Any]]) -> str:
    """Which form shows what pruning saves on disk."""
    patterns = {step.get("pattern", "") for step in steps if step["method"] == "prune"}
    return "dense" if not patterns else "2:4" if patterns == {"2:4"} else "packed"


def compressed(folder: Path, number: int, steps: list[dict[str, Any]]) -> CompressReport:
    """What a method makes of the folder."""
    place = folder.parent
    return compress(
        compress_config_of(
            {
                "model": {
                    "folder": str(folder),
                    "output": str(place / f"out{number}"),
                    "form": form_of_files(steps),
                },
                "data": {
                    "train": str(place / "train.txt"),
                    "held_out": str(place / "held_out.txt"),
                    "sequence_length": MODEL.sequence_length,
                    "cache": str(place / "cache"),
                },
                "measure": {"rounds": 0, "picture": False},
                "step": steps,
            }
        ),
        device="cpu",
    )


def forward(model: Any, tokens: Tensor) -> float:
    """The loss of a batch."""
    with torch.no_grad():
        return float(model.loss(tokens[:, :-1], tokens[:, 1:]))


def decoding(model: Any, prompt: list[int]) -> list[int]:
    """What follows a prompt, one row."""
    (row,) = generate(model, [prompt], max_new=NEW, temperature=0, rows=1)
    return row.tokens


def facts(stage: StageReport, before: StageReport) -> dict[str, Any]:
    """Of a row."""
    return {
        "accuracy": [100 * stage.accuracy],
        "validation_loss": stage.loss,
        "disk_bytes": stage.file_bytes,
        "of_disk_bytes": stage.file_bytes / before.file_bytes,
        "parameters": stage.num_parameters,
        "seconds": stage.seconds,
    }


def cases_of(
    folder: Path, name: str, number: int, steps: list[dict[str, Any]]
) -> Iterator[Callable[[], Case]]:
    """Two cases: one row, and a batch."""
    reports: list[CompressReport] = []

    def case(kind: str) -> Case:
        if not reports:
            reports.append(compressed(folder, number, steps))
        (report,) = reports
        ranks = Ranks.of(ALONE)
        models = [load_model(place, ranks=ranks) for place in (report.output, folder)]
        text = (folder.parent / "held_out.txt").read_text()[: 16 * MODEL.sequence_length]
        tokens = torch.from_numpy(FolderTokenizer(folder).encode(text)).long()
        rows = tokens[: 8 * 129].view(8, 129)
        calls: list[Callable[[], object]] = (
            [partial(decoding, model, rows[0, :8].tolist()) for model in models]
            if kind == "one row"
            else [partial(forward, model, rows) for model in models]
        )

        def check() -> float:
            worse = report.stages[-1].loss - report.stages[0].loss
            if not math.isfinite(worse):
                raise AssertionError(f"the loss is {report.stages[-1].loss}")
            return worse

        return Case(
            "compress",
            f"{kind}, {name}",
            {"compressed": calls[0], "the model before": calls[1]},
            check=check,
            facts=facts(report.stages[-1], report.stages[0]),
        )

    yield partial(case, "one row")
    yield partial(case, "8 x 128 tokens")


def run(options: Options) -> list[Row]:
    """All methods whose name contains `options.only`."""
    with tempfile.TemporaryDirectory() as name:
        folder = made(Path(name))
        chosen = [
            make
            for number, (what, steps) in enumerate(METHODS.items())
            if (options.only or "") in what
            for make in cases_of(folder, what, number, steps)
        ]
        return run_cases(chosen, rounds=min(options.rounds, 9))
