"""Distillation: the divergence of two language models' last layers beside what it is made of, and a
student of half of a teacher's layers beside its teacher and beside itself without one.

    divergence   N tokens, width H of both models, V words: 6 N H V + 2 N H V operations, beside
                 linear_cross_entropy and one product more, and beside torch's chain of whole
                 logits: two linears, log_softmax, kl_div
    passages     the BERT of examples/bert_passages.toml, at the sizes of `Sizes`: pretrained once;
                 for each seed a teacher, and two students that begin with every second of its
                 layers and see the same batches equally often: of the labels alone, and of the
                 teacher too
    settings     the same of one seed, scored on passages that nothing learns from and that are not
                 those of the test: what `Sizes` are chosen by; no row is kept

    python -m benchmarks distillation --only passages       goes on where it was stopped
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments import machine, report
from benchmarks.instruments.harness import Case, FailedCases, Row, keep_row, run_cases
from benchmarks.ops.layers.bench_cross_entropy import taken_by
from pyops.config import Config, load_config
from pyops.data.passages import Passages, prepare_passages
from pyops.tensor_parallel import (
    DivergenceConfig,
    LinearLogits,
    linear_cross_entropy,
    linear_kl_divergence,
)
from pyops.train import train
from pyops.train.report.metrics import read_rows
from pyops.train.tasks import passage_tasks

__all__ = [
    "Sizes",
    "cases",
    "passages_row",
    "peak_of",
    "run",
    "scored_on_what_is_left_out",
    "show_settings",
]

TEMPERATURE = 2.0
SHAPE = (2048, 512, 50304)
STUDENTS = {"student alone": {"soft": 0.0, "hard": 1.0}, "student distilled": {}}
AIM = 0.97  # of the teacher's accuracy


# --------------------------------------------------------------------------------------------------
# divergence

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return linear_kl_divergence(
        LinearLogits(hidden, weight),
        LinearLogits(other, head),
        config=DivergenceConfig(temperature=TEMPERATURE),
    )


def parts(hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """A cross entropy in the last layer, and the product that gives the teacher's logits."""
    functional.linear(other, head)
    return linear_cross_entropy(hidden, weight, targets)


def chain(hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    z, y = (functional.linear(*each) / TEMPERATURE for each in ((hidden, weight), (other, head)))
    q, p = functional.log_softmax(z, -1), functional.log_softmax(y, -1)
    return TEMPERATURE**2 * functional.kl_div(q, p, log_target=True, reduction="batchmean")


STEPS: dict[str, Step] = {
    "pyops": ours,
    "linear_cross_entropy and a product": parts,
    "torch": chain,
}


def operands(tokens: int, width: int, words: int) -> list[Tensor]:
    """Hidden states and weight of the student, which want gradients, and the teacher's; targets."""
    hidden, other = torch.randn(tokens, width), torch.randn(tokens, width)
    weight, head = (torch.empty(words, width).normal_(std=0.05) for _ in range(2))
    hidden.requires_grad_()
    weight.requires_grad_()
    return [hidden, weight, other, head, torch.randint(words, (tokens,))]


def take(loss: Step, given: list[Tensor]) -> Tensor:
    """Loss and gradients, fresh."""
    for leaf in given[:2]:
        leaf.grad = None
    value = loss(given[0], given[1], given[2], given[3], given[4])
    value.backward()
    return value.detach()


def check(given: list[Tensor]) -> float:
    """The largest difference of the gradients from torch's, in units of the largest; raises where
    it is too large, or the loss differs."""
    found = []
    for loss in (ours, chain):
        value = take(loss, given)
        found.append((value, [leaf.grad.clone() for leaf in given[:2] if leaf.grad is not None]))
    (a, mine), (b, others) = found
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(mine, others, strict=True)]
    if len(errors) != 2 or max(errors) > 1e-4 or float((a - b).abs()) > 1e-4 * float(b):
        raise AssertionError(f"differs from torch by {errors}, loss {float(a)} and {float(b)}")
    return max(errors)


def peak_of(kind: str, tokens: int, width: int, words: int) -> int:
    """Bytes that one step takes at most beyond what is there before it."""
    take(STEPS[kind], operands(8, 16, 32))  # libraries are loaded, threads started
    return taken_by(partial(take, STEPS[kind], operands(tokens, width, words)), torch.device("cpu"))


def _peak(kind: str) -> int:
    """`peak_of`, in a process of its own."""
    code = (
        "from benchmarks.compress.bench_distillation import peak_of; "
        f"print(peak_of(*{json.dumps((kind, *SHAPE))}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=report.ROOT,
        env={**os.environ, "PYTHONPATH": str(report.ROOT)},
    )
    if done.returncode:
        raise AssertionError(f"measuring memory ended with\n{done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def divergence_case(name: str) -> Case:
    """The speed and memory of one step."""
    tokens, width, words = SHAPE
    given = operands(*SHAPE)
    peaks = {kind: _peak(kind) for kind in ("pyops", "torch")}
    gradients = 4 * (tokens + words) * width
    beside = {kind: max(1, peak - gradients) for kind, peak in peaks.items()}
    return Case(
        "distillation",
        name,
        {kind: partial(take, loss, given) for kind, loss in STEPS.items()},
        check=partial(check, given),
        flops=8 * tokens * width * words,
        targets={"linear_cross_entropy and a product": round(1 / 1.5, 3), "torch": 1.3},
        least={"memory_ratio_beside_gradients": 10.0},
        most={"mib_beside_gradients": 64.0},
        facts={
            "peak_bytes": peaks,
            "gradient_bytes": gradients,
            "mib_beside_gradients": round(beside["pyops"] / 2**20, 1),
            "memory_ratio_beside_gradients": round(beside["torch"] / beside["pyops"], 2),
        },
    )


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the timed cases and how to make each."""
    name = f"divergence float32, {' x '.join(map(str, SHAPE))}, forward + backward"
    yield name, partial(divergence_case, name)


# --------------------------------------------------------------------------------------------------
# passages


@dataclass(frozen=True)
class Sizes:
    """How large the runs of `passages_row` are."""

    layers: int = 4
    """Of the teacher; the students have half of them."""
    dim: int = 64
    pretraining_steps: int = 1500
    batch: int = 32
    passages: int = 400
    """Of each of the eight families."""
    teacher_epochs: int = 12
    """Until its accuracy on passages that are left out rises no more."""
    student_epochs: int = 8
    """Of each of the two, with and without the teacher."""
    layer_decay: float = 0.9
    """What the learning rate of a layer is of that of the layer above it."""
    seeds: int = 3
    words: int = 1024
    max_bytes: int = 0
    """Of text; 0: all."""
    folder: str = str(report.ROOT / "runs" / "distillation")


def _config(name: str, example: str, sizes: Sizes, **settings: Any) -> Config:
    """An example of this repository at other sizes, in this process alone."""
    given = {
        "name": name,
        "bert.num_layers": sizes.layers,
        "bert.dim": sizes.dim,
        "bert.vocab_size": sizes.words,
        "data.max_bytes": sizes.max_bytes,
        "train.folder": sizes.folder,
        "train.batch": sizes.batch,
        "train.plot": False,
        "train.tensorboard": False,
        "task.num_copies": 1,
        **settings,
    }
    return load_config(
        report.ROOT / "examples" / example,
        overrides=[f"{key}={json.dumps(value)}" for key, value in given.items()],
    )


def _trained(config: Config) -> float:
    """Train what is left of a run: its last score."""
    train(config, resume=True)
    last = read_rows(config.folder / "metrics.jsonl")[-1]
    return next(value for name, value in last.items() if name.startswith("validation_"))


def pretrained(sizes: Sizes) -> Config:
    """The run that all teachers begin with."""
    config = _config(
        "pretrained",
        "bert_passages_pretrain.toml",
        sizes,
        **{
            "task.num_epochs": 0,
            "train.num_steps": sizes.pretraining_steps,
            "train.checkpoint_every": 200,
        },
    )
    _trained(config)
    return config


def runs_of(seed: int, sizes: Sizes, begin: Config) -> Iterator[tuple[str, Config]]:
    """The teacher of a seed, and the students that learn from it."""
    shared: dict[str, Any] = {
        "train.seed": seed,
        "task.num_passages": sizes.passages,
        "optimizer.layer_decay": sizes.layer_decay,
        "parallel.pp": 1,
        "elastic.freeze": "none",
    }
    teacher = _config(
        f"teacher-{seed}",
        "bert_passages.toml",
        sizes,
        **{
            **shared,
            "task.pretrained": str(begin.folder),
            "task.num_epochs": sizes.teacher_epochs,
        },
    )
    yield "teacher", teacher
    half = {
        **shared,
        "task.num_epochs": sizes.student_epochs,
        "bert.num_layers": sizes.layers // 2,
        "distill.teacher": str(teacher.folder),
        "distill.keep": list(range(0, sizes.layers, 2)),
    }
    for name, options in STUDENTS.items():
        given = half | {f"distill.{key}": value for key, value in options.items()}
        yield name, _config(f"{name.replace(' ', '-')}-{seed}", "distill.toml", sizes, **given)


@contextmanager
def scored_on_what_is_left_out(sizes: Sizes, each: int = 200) -> Iterator[None]:
    """Runs within are scored on passages of the training part that no run of these sizes learns
    from, and never on the test split: this is where `Sizes` are from.

    Args:
        sizes: Whose passages learn.
        each: So many of each family at most are scored.

    Raises:
        ValueError: Where nothing is left out.
    """

    def prepare(*args: Any, **kwargs: Any) -> Passages:
        found = prepare_passages(*args, **kwargs)
        learnt = {tuple(place) for place in found.train.fewer(sizes.passages).places.tolist()}
        left = [p for p in found.train.places.tolist() if tuple(p) not in learnt]
        if not left:
            raise ValueError(
                f"passages is {sizes.passages}, all that there are, or more; give fewer"
            )
        rest = replace(found.train, places=torch.tensor(left, device="cpu")).fewer(each)
        return replace(found, held_out=rest)

    with mock.patch.object(passage_tasks, "prepare_passages", prepare):
        yield


def show_settings(sizes: Sizes) -> None:
    """Print the accuracy of a teacher and its students on passages that are left out.

    Args:
        sizes: Of the runs.
    """
    begin, aside = pretrained(sizes), replace(sizes, folder=f"{sizes.folder}/settings")
    with scored_on_what_is_left_out(aside):
        for name, config in runs_of(0, aside, begin):
            print(f"{name}: {100 * _trained(config):.2f} % of what is left out", flush=True)


def passages_row(sizes: Sizes) -> Row:
    """Accuracy in percent of each seed."""
    begin = pretrained(sizes)
    found: dict[str, list[float]] = {}
    for seed in range(sizes.seeds):
        for name, config in runs_of(seed, sizes, begin):
            accuracy = _trained(config)
            found.setdefault(name, []).append(round(100 * accuracy, 2))
            print(f"seed {seed}, {name}: {100 * accuracy:.2f} %", flush=True)
    teacher, alone, distilled = (found[name] for name in ("teacher", *STUDENTS))
    of_teacher = [s / t for s, t in zip(distilled, teacher, strict=True)]
    return {
        "bench": "distillation",
        "case": f"passages, BERT of {sizes.layers} layers and of {sizes.layers // 2}, "
        f"{sizes.seeds} seeds",
        "device": "cpu",
        "us": {},
        "speedup": {},
        "unit": "%",
        "by_method": {name: round(statistics.mean(each), 2) for name, each in found.items()},
        "accuracy_by_method": found,
        "of_teacher": round(min(of_teacher), 4),
        "points_above_alone": round(min(s - a for s, a in zip(distilled, alone, strict=True)), 2),
        "least": {"of_teacher": AIM, "points_above_alone": 0.01},
        "sizes": {k: v for k, v in vars(sizes).items() if k != "folder"},
        "machine": machine.describe(torch.device("cpu")),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: Options) -> list[Row]:
    """All rows, or those whose name contains `options.only`."""
    only, rows, failed = options.only or "", [], []
    try:
        rows = run_cases([make for name, make in cases() if only in name], rounds=options.rounds)
    except FailedCases as error:
        rows, failed = error.rows, error.failed
    if only == "settings":
        show_settings(Sizes())
    if only in "passages":
        row = passages_row(Sizes())
        keep_row(row)
        rows.append(row)
    if failed:
        raise FailedCases(rows, failed)
    return rows
