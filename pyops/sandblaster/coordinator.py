"""Coordinator: L-BFGS over vectors that it never sees.

    evaluate        workers compute the portions' gradients at the shards' point
    take            [6 m] inner products come back, the one exchange of them in an iteration
    direct          2 m + 1 coefficients go out, the slope comes back
    trial, finish   a step length goes out, the loss's slope comes back: strong Wolfe

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.2; the two loops on
coefficients and the line search are those of `pyops.optim.LBFGS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pyops.optim.lbfgs.history import History
from pyops.optim.lbfgs.line_search import strong_wolfe
from pyops.sandblaster.config import SandblasterConfig

__all__ = ["Cluster", "Coordinator", "Iteration"]

EVALUATIONS = 1 << 20  # of a coordinator, so that no two share a number
NOTHING = torch.zeros(0, dtype=torch.float64, device="cpu")


class Cluster(Protocol):
    """The shards and workers of a run, whatever carries commands to them."""

    @property
    def term(self) -> int:
        """The coordinator's number: 1, 2, ..."""
        ...

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """The replies of all shards to a command, in order."""
        ...

    def evaluate(self, evaluation: int) -> float:
        """Have all portions computed at the shards' point; the loss, summed along their tree."""
        ...


@dataclass(frozen=True)
class Iteration:
    """What an iteration did.

    Attributes:
        number: 1, 2, ...
        loss: At its end.
        step: The step length.
        evaluations: Passes over the batch so far, in the whole run.
        done: Why the run is over, "" while it is not.
    """

    number: int
    loss: float
    step: float
    evaluations: int
    done: str = ""


class _Products(History):
    """The inner products of vectors that lie on shards."""

    def __init__(self, coordinator: Coordinator, size: int) -> None:
        super().__init__(0, size=size, dtype=torch.float64, device="cpu")
        self._coordinator = coordinator

    def products_of(self, new: list[int], used: list[int]) -> Tensor:
        """Sums of the shards' parts."""
        return self._coordinator.take(new, used)


class Coordinator:
    """Leads a run.

    Args:
        cluster: The shards and workers.
        config: How the loss is minimized.

    Attributes:
        evaluations: Passes over the batch.
        exchanges: Commands that every shard answered, by kind.
        loss: At the end of the last iteration; nan before the first evaluation.
    """

    def __init__(self, cluster: Cluster, config: SandblasterConfig | None = None) -> None:
        self.cluster, self.config = cluster, config or SandblasterConfig()
        self.history = _Products(self, self.config.history_size)
        self.evaluations = self._iterations = 0
        self.exchanges: dict[str, int] = {}
        self.loss, self._largest, self._length = math.nan, math.inf, math.inf
        self._at, self._step = 0, 0.0
        self._ask("begin", history_size=self.config.history_size)

    def iterate(self) -> Iteration:
        """Take one iteration: a direction, and a step along it.

        Returns:
            What it did; with `done`, the loss can't be made smaller, or is not finite.

        Raises:
            CommunicationError: Shards or workers are lost, or another coordinator leads the run.
            ValueError: A worker's loss is no function of the parameters alone.
        """
        config = self.config
        if not self.evaluations:
            self.loss, _ = self._evaluate(0.0, [])
            first = min(1.0, 1.0 / self._length) * config.lr if self._length > 0 else config.lr
        else:
            first = config.lr
        if not (math.isfinite(self.loss) and math.isfinite(self._largest)):
            return self._ended("the loss or its gradient is not finite")
        if self._largest <= config.tolerance_grad:
            return self._ended("the gradient is within tolerance_grad")
        slope, largest = self._directed()
        if slope > -config.tolerance_change:
            return self._ended("the slope is within tolerance_change")
        before = self.loss
        self._searched(slope, first=first, largest=largest)
        self._iterations += 1
        done = ""
        if self._largest <= config.tolerance_grad:
            done = "the gradient is within tolerance_grad"
        elif self._step * largest <= config.tolerance_change:
            done = "the step is within tolerance_change"
        elif abs(self.loss - before) < config.tolerance_change:
            done = "the loss changed by less than tolerance_change"
        return Iteration(self._iterations, self.loss, self._step, self.evaluations, done)

    def minimize(self, iterations: int) -> Iteration:
        """Take iterations until one is the last, or so many are done; the last one."""
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"iterations is {iterations!r}; give a whole number, 1 or more")
        for _ in range(iterations):
            last = self.iterate()
            if last.done:
                break
        return last

    def settle(self) -> None:
        """Have the shards go to where the last iteration ended, as workers then fetch it."""
        self._begin_trial(self._step)

    def take(self, new: list[int], used: list[int]) -> Tensor:
        """Have the shards take the last iteration's step and gradient into their histories; the
        inner products of new rows with those in use, float64 [len(new), len(used)]."""
        replies = self._ask("take", evaluation=self._at, step=self._step, new=new, used=used)
        self._step = 0.0  # the shards are there
        parts = [torch.tensor(reply["products"], dtype=torch.float64) for reply in replies]
        return torch.stack(parts).sum(0)

    # --- parts

    def _ask(self, kind: str, **numbers: Any) -> list[dict[str, Any]]:
        self.exchanges[kind] = self.exchanges.get(kind, 0) + 1
        return self.cluster.ask({"kind": kind, "term": self.cluster.term, "numbers": numbers})

    def _ended(self, why: str) -> Iteration:
        return Iteration(self._iterations, self.loss, 0.0, self.evaluations, why)

    def _directed(self) -> tuple[float, float]:
        """(the slope along the next direction, its largest component)."""
        if self._iterations:
            self.history.add(NOTHING, NOTHING)
        else:
            self.history.begin(NOTHING)
        replies = self._ask("direct", delta=self.history.coefficients().tolist())
        return sum(r["slope"] for r in replies), max(r["largest"] for r in replies)

    def _begin_trial(self, step: float) -> int:
        number = self.cluster.term * EVALUATIONS + self.evaluations + 1
        self._ask("trial", evaluation=number, step=step, portions=self.config.portions)
        return number

    def _evaluate(self, step: float, held: list[int]) -> tuple[float, float]:
        """(the loss, its slope along the direction) at a step length."""
        self._at = self._begin_trial(step)
        self.evaluations += 1
        loss = self.cluster.evaluate(self._at)
        replies = self._ask("finish", held=held)
        self._largest = _largest([reply["largest"] for reply in replies])
        self._length = sum(reply["length"] for reply in replies)
        return loss, sum(reply["slope"] for reply in replies)

    def _searched(self, slope: float, *, first: float, largest: float) -> None:
        """Find a step length; the loss and the evaluation there are taken up."""
        search = strong_wolfe(
            self.loss,
            slope,
            first=first,
            largest=largest,
            trials=self.config.trials,
            tolerance_change=self.config.tolerance_change,
        )
        known = {0.0: (self.loss, self._at, self._largest)}
        trial = next(search)
        while True:
            known = {t: at for t, at in known.items() if t in trial.held or t == 0.0}
            loss, there = self._evaluate(trial.step, [at for _, at, _ in known.values()])
            known[trial.step] = (loss, self._at, self._largest)
            try:
                trial = search.send((loss, there))
            except StopIteration as end:
                self._step = float(end.value)
                break
        self.loss, self._at, self._largest = known[self._step]


def _largest(values: list[float]) -> float:
    """The largest value; nan where there is one."""
    return math.nan if any(map(math.isnan, values)) else max(values)
