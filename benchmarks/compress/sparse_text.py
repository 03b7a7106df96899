"""A small GPT that learns the standard library's sources byte by byte with 2:4 weights, beside the
same with dense ones: what `python -m benchmarks nm --only text` trains.

    dense                   the reference
    straight-through        m w forward, the derivative of w, nothing else
    SR-STE, in the gradient     the pull of what is not alive goes through AdamW
    SR-STE, decoupled           it is taken off the weights before each step
    pruned once, retrained  dense, then 2:4 and the same schedule again
    permuted, ...           the same, with channels permuted before

Losses are of held-out text after the last step, of the pruned weights.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.instruments import harness, machine
from pyops.data import Batches, Corpus, DataConfig, prepare, validation_rows
from pyops.distill import Distillation, DistillationConfig, freeze
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.optim.lr_scheduler import WarmupCosine
from pyops.pruning import NM, Masks, nm_masks, permute, sparse_training

__all__ = ["METHODS", "TextTask", "rows"]

Row = dict[str, Any]


class TextTask:
    """Text, a model's shape and a schedule.

    Args:
        steps: Of a training.
        seed: Of model and batches.
    """

    def __init__(self, steps: int = 400, seed: int = 0) -> None:
        self.steps, self.seed = steps, seed
        self.corpus: Corpus = prepare(DataConfig(path="stdlib"), vocab_size=256, group=None)
        self.config = GPTConfig(
            vocab_size=256,
            sequence_length=64,
            num_layers=2,
            num_heads=4,
            dim=128,
            norm="rmsnorm",
            activation="swiglu",
            positions="rotary",
            bias=False,
        )

    def model(self) -> GPT:
        """Untrained."""
        return GPT(self.config, seed=self.seed)

    def train(
        self,
        model: GPT,
        before: Callable[[Any], Any] | None = None,
        masks: Masks | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        """All steps of the schedule.

        Args:
            model: Trained in place.
            before: Given the optimizer, before the first step.
            masks: Of weights that stay 0.
            teacher: Of whose words the model learns, too.
        """
        optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        taught = Distillation(DistillationConfig(soft=0.5, hard=0.5, temperature=1.0))
        schedule = WarmupCosine(optimizer, warmup_steps=self.steps // 10, total_steps=self.steps)
        if before is not None:
            before(optimizer)
        batches = Batches(
            self.corpus,
            sequence_length=64,
            global_batch=16,
            seed=self.seed,
            rank=0,
            num_ranks=1,
        )
        for _ in range(self.steps):
            text = batches.next()
            tokens, targets = text[:, :-1], text[:, 1:]
            if teacher is None:
                model.loss(tokens, targets).backward()
            else:
                taught(model, teacher, tokens, targets).loss.backward()
            if masks is not None:
                for name in masks:
                    grad = masks.parameter(name).grad
                    assert grad is not None
                    masks[name].apply_(grad)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Of held-out text, nats per byte."""
        text: Tensor = validation_rows(self.corpus, sequence_length=64, num_sequences=256)
        return float(model.loss(text[:, :-1], text[:, 1:]))  # type: ignore[operator]


def dense(task: TextTask) -> float:
    """Without pruning."""
    model = task.model()
    task.train(model)
    return task.loss(model)


def sparse(task: TextTask, *, decay: float, decoupled: bool = False) -> float:
    """2:4 from the start."""
    model = task.model()
    found: list[Any] = []

    def begin(optimizer: Any) -> None:
        options = {"optimizer": optimizer} if decoupled else {}
        found.append(sparse_training(model, decay=decay, **options))

    task.train(model, begin)
    found[0].finish()
    return task.loss(model)


def retrained(task: TextTask, *, permuted: bool = False, taught: bool = False) -> float:
    """Dense, pruned once, and the same schedule again, perhaps with the dense model as teacher."""
    model = task.model()
    task.train(model)
    teacher = freeze(copy.deepcopy(model)) if taught else None
    if permuted:
        permute(model)
    task.train(model, masks=nm_masks(model, NM(2, 4)), teacher=teacher)
    return task.loss(model)


METHODS: dict[str, Callable[[TextTask], float]] = {
    "dense": dense,
    "straight-through": lambda task: sparse(task, decay=0.0),
    "SR-STE, in the gradient, 2e-4": lambda task: sparse(task, decay=2e-4),
    "SR-STE, decoupled, 0.1": lambda task: sparse(task, decay=0.1, decoupled=True),
    "SR-STE, decoupled, 1": lambda task: sparse(task, decay=1.0, decoupled=True),
    "SR-STE, decoupled, 10": lambda task: sparse(task, decay=10.0, decoupled=True),
    "pruned once, retrained": retrained,
    "permuted, pruned once, retrained": lambda task: retrained(task, permuted=True),
    "pruned once, retrained with the dense teacher": lambda task: retrained(task, taught=True),
}


def rows(only: str, *, seeds: int = 2, steps: int = 400) -> list[Row]:
    """A row for each method whose name contains `only`, behind "text, ".

    Args:
        only: As of the command line.
        seeds: Of model and batches.
        steps: Of a training.
    """
    wanted = [name for name in METHODS if only in f"text, {name}"]
    if not wanted:
        return []
    losses: dict[str, list[float]] = {}
    found = []
    for name in dict.fromkeys(["dense", *wanted]):
        losses[name] = [METHODS[name](TextTask(steps, seed)) for seed in range(seeds)]
        above = [
            100.0 * (own / full - 1.0)
            for own, full in zip(losses[name], losses["dense"], strict=True)
        ]
        row: Row = {
            "bench": "nm",
            "case": f"text, {name}, {steps} steps, {seeds} seeds",
            "device": "cpu",
            "us": {},
            "speedup": {},
            "rounds": seeds,
            "validation_loss": statistics.mean(losses[name]),
            "validation_losses": losses[name],
            "percent_above_dense": statistics.mean(above),
            "percent_by_seed": {str(seed): round(value, 3) for seed, value in enumerate(above)},
            "machine": machine.describe(torch.device("cpu")),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        if name in wanted:
            harness.keep_row(row)
            found.append(row)
            print(
                f"{row['case']}: loss {row['validation_loss']:.4f}, "
                f"{row['percent_above_dense']:+.2f} % above dense",
                flush=True,
            )
    return found
