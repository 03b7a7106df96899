"""Coordinator: L-BFGS over vectors that it never sees.

    an iteration    add_pair        -> 6 m inner products, in one exchange
                    turn            <- 2 m + 1 coefficients: the direction, on every shard
                    evaluation      <- a step length; workers compute the portions of the batch
                    evaluation ...     until the strong Wolfe conditions hold
                    accept          <- the step length that was chosen

All messages are a few hundred bytes, whatever the model (Dean et al. 2012, section 4.2; the two
loops of L-BFGS on inner products: Chen, Wang, Zhou, NIPS 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pyops.optim.lbfgs.history import PairTable
from pyops.optim.lbfgs.line_search import strong_wolfe
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.shard import Measures, VectorShard

__all__ = ["Coordinator", "LocalShards", "SandblasterReport", "Shards"]

SAME_POINT = 1e-4  # relative: by which two evaluations at one point may differ


class Shards(Protocol):
    """All shards, wherever they are."""

    def call(self, operation: str, *arguments: Any) -> list[Any]:
        """Order an operation of `VectorShard` on every shard; what each answers.

        Args:
            operation: The name of the method.
            arguments: Small ones.
        """
        ...


class LocalShards:
    """Shards of this process.

    Args:
        shards: In the order of their parts.
    """

    def __init__(self, shards: Sequence[VectorShard]) -> None:
        self.shards = list(shards)

    def call(self, operation: str, *arguments: Any) -> list[Any]:
        """See `Shards.call`."""
        return [getattr(shard, operation)(*arguments) for shard in self.shards]


@dataclass(frozen=True)
class SandblasterReport:
    """How far a coordinator has come.

    Attributes:
        loss: At the point that was reached.
        iterations: That were taken.
        evaluations: Passes over the batch.
        products: Inner products that were exchanged.
        ended: Why no further iteration follows; "" where one may.
    """

    loss: float
    iterations: int
    evaluations: int
    products: int
    ended: str


class Coordinator:
    """Takes the iterations of L-BFGS, with a strong Wolfe line search.

    Args:
        shards: Which hold the vectors.
        evaluate: Computes all portions at the shards' trial point, adds their gradients there, and
            returns the sum of their losses.
        config: How iterations are taken.
    """

    def __init__(
        self, shards: Shards, evaluate: Callable[[], float], config: SandblasterConfig
    ) -> None:
        self.shards, self.config = shards, config
        self._portions = evaluate
        self._table = PairTable(config.history_size)
        self._at: Measures | None = None  # of the gradient at the point
        self._loss = math.nan
        self._step: float | None = None  # the last one that was accepted
        self.iterations = self.evaluations = 0
        self._ended = ""

    def run(self, iterations: int) -> SandblasterReport:
        """Take iterations, until one of the tolerances is met.

        Args:
            iterations: How many at most.

        Raises:
            ValueError: For a loss that is not finite at the first point, or differs between two
                evaluations there.
        """
        if self._at is None:
            self._at = self._begin()
        for _ in range(iterations):
            if self._ended:
                break
            self._iterate()
        return SandblasterReport(
            self._loss, self.iterations, self.evaluations, self._table.counted, self._ended
        )

    def finish(self) -> None:
        """Let the shards answer with the parameters of the point that was reached, where they have
        answered with those of the last trial."""
        self.shards.call("begin_evaluation", 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Scalars and inner products between two iterations, of numbers and lists alone. The
        vectors that belong to them are the shards' (`VectorShard.state_dict`)."""
        table = self._table
        return {
            "at": None if self._at is None else list(self._at),
            "loss": self._loss,
            "step": self._step,
            "ended": self._ended,
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "products": table.products.tolist(),
            "pairs": list(table.pairs),
            "counted": table.counted,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from where `state_dict` was taken; None: from the first parameters."""
        self._table = PairTable(self.config.history_size)
        if state is None:
            self._at, self._loss, self._step, self._ended = None, math.nan, None, ""
            self.iterations = self.evaluations = 0
            return
        self._at = None if state["at"] is None else Measures(*state["at"])
        self._loss, self._step, self._ended = state["loss"], state["step"], state["ended"]
        self.iterations, self.evaluations = state["iterations"], state["evaluations"]
        self._table.products.copy_(torch.tensor(state["products"], dtype=torch.float64))
        self._table.pairs, self._table.counted = list(state["pairs"]), state["counted"]

    def _begin(self) -> Measures:
        self._loss, at = self._evaluate(0.0)
        if not (math.isfinite(self._loss) and math.isfinite(at.largest)):
            raise ValueError(
                f"the loss is {self._loss} and the largest component of its gradient {at.largest} "
                "at the first point; begin with other parameters, or look for the portion that "
                "is not finite"
            )
        again, at = self._evaluate(0.0)
        if not abs(again - self._loss) <= SAME_POINT * abs(self._loss):
            raise ValueError(
                f"the portions gave a loss of {self._loss} and then of {again} at the same "
                "parameters; it must be a function of them alone: call model.eval() or set dropout "
                "to 0, and give a portion the same samples each time"
            )
        if at.largest <= self.config.tolerance_grad:
            self._ended = f"no component of the gradient is above {self.config.tolerance_grad:g}"
        return at

    def _evaluate(self, step: float, held: Sequence[float] = ()) -> tuple[float, Measures]:
        """The loss at a step length, and what is measured of its gradient."""
        self.shards.call("begin_evaluation", step)
        loss = self._portions()
        parts = self.shards.call("end_evaluation", step, tuple(held))
        self.evaluations += 1
        slopes, largest, totals = zip(*parts, strict=True)
        return loss, Measures(sum(slopes), max(largest), sum(totals))

    def _take_products(self, new: Sequence[int], operation: str, *arguments: Any) -> None:
        """Bring the inner products of new vectors up to date, in one exchange."""
        wanted = self._table.wanted(new)
        parts = self.shards.call(operation, *arguments, wanted)
        self._table.put(wanted, [sum(each) for each in zip(*parts, strict=True)])

    def _turn(self) -> tuple[float, float, float]:
        """Let the shards have the next direction: (its largest component, the slope of the loss
        along it, the first step length)."""
        table, lr = self._table, self.config.lr
        assert self._at is not None
        if self._step is None:
            self._take_products([table.last], "begin_history")
            first = min(1.0, 1.0 / self._at.total) * lr
        else:
            pair = table.spare()
            s, y, _ = table.places(pair)
            self._take_products(table.places(pair), "add_pair", s, y, self._step)
            table.keep(pair)
            first = lr
        largest, slopes = zip(*self.shards.call("turn", table.coefficients().tolist()), strict=True)
        return max(largest), sum(slopes), first

    def _iterate(self) -> None:
        config = self.config
        largest, slope, first = self._turn()
        self.iterations += 1
        if slope > -config.tolerance_change:
            self._ended = (
                f"the loss falls by no more than {config.tolerance_change:g} along the way"
            )
            return
        loss, at, step = self._searched(slope, first, largest)
        self.shards.call("accept", step)
        before, self._loss, self._at, self._step = self._loss, loss, at, step
        if at.largest <= config.tolerance_grad:
            self._ended = f"no component of the gradient is above {config.tolerance_grad:g}"
        elif step * largest <= config.tolerance_change:
            self._ended = f"no parameter moves by more than {config.tolerance_change:g}"
        elif abs(loss - before) < config.tolerance_change:
            self._ended = f"the loss changes by less than {config.tolerance_change:g}"

    def _searched(
        self, slope: float, first: float, largest: float
    ) -> tuple[float, Measures, float]:
        """(loss, measures of the gradient, step length) of a line search."""
        assert self._at is not None
        search = strong_wolfe(
            self._loss,
            slope,
            first=first,
            largest=largest,
            trials=self.config.max_eval,
            tolerance_change=self.config.tolerance_change,
        )
        known = {0.0: (self._loss, self._at)}
        trial = next(search)
        while True:
            found = self._evaluate(trial.step, trial.held)
            known = {t: at for t, at in known.items() if t in trial.held or t == 0.0}
            known[trial.step] = found
            try:
                trial = search.send((found[0], found[1].slope))
            except StopIteration as end:
                step = float(end.value)
                return *known[step], step
