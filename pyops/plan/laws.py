"""Laws of scaling, as functions.

amdahl(64, parallel=0.99)       39x: the same batch on 64 ranks
gustafson(64, parallel=0.99)    63x: 64 times the batch
synchronous SGD                 R replicas pay while T_sync < (R - 1) T_comp
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyops.plan.shapes import PlanError

__all__ = ["SyncSGD", "amdahl", "compute_optimal", "gustafson", "training_days"]

SECONDS_OF_A_DAY = 86400.0
TOKENS_PER_PARAMETER = 20.0


def _positive(name: str, value: float, *, zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise PlanError(
            f"{name} is {value!r}; give a number, {'0 or' if zero else 'above 0,'} more"
        )


def _check(ranks: int, parallel: float) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise PlanError(f"ranks is {ranks!r}; give a whole number, 1 or more")
    if not 0 <= parallel <= 1:
        raise PlanError(f"parallel is {parallel!r}; give the part of the time, from 0 to 1")


def amdahl(ranks: int, *, parallel: float) -> float:
    """How many times faster `ranks` ranks do the same work (Amdahl, 1967).

    Args:
        ranks: How many.
        parallel: The part of one rank's time that they share.

    Raises:
        PlanError: For a value that makes no sense.
    """
    _check(ranks, parallel)
    return 1.0 / ((1.0 - parallel) + parallel / ranks)


def gustafson(ranks: int, *, parallel: float) -> float:
    """How much more work `ranks` ranks do in the same time (Gustafson, 1988).

    Args:
        ranks: How many.
        parallel: The part of the time that grows with the work.

    Raises:
        PlanError: For a value that makes no sense.
    """
    _check(ranks, parallel)
    return (1.0 - parallel) + parallel * ranks


@dataclass(frozen=True)
class SyncSGD:
    """Replicas that wait for each other once a step.

    An epoch of N samples in batches of b takes (N / b) T_comp alone, and (N / (R b)) (T_comp +
    T_sync) on R replicas.
    """

    compute: float
    """T_comp: seconds of a batch on one replica."""
    sync: float
    """T_sync: seconds of a step that the replicas exchange gradients and nothing hides."""
    replicas: int
    """R."""

    def __post_init__(self) -> None:
        _positive("compute", self.compute)
        _positive("sync", self.sync, zero=True)
        _check(self.replicas, 1.0)

    @property
    def limit(self) -> float:
        """(R - 1) T_comp, below which T_sync must be."""
        return (self.replicas - 1) * self.compute

    @property
    def pays(self) -> bool:
        """Whether the replicas are faster than one."""
        return self.sync < self.limit

    @property
    def efficiency(self) -> float:
        """1 / (1 + T_sync / T_comp): which part of R times the speed there is."""
        return self.compute / (self.compute + self.sync)

    @property
    def speedup(self) -> float:
        """How many times faster than one replica."""
        return self.replicas * self.efficiency


def training_days(
    num_parameters: float,
    tokens: float,
    *,
    devices: int,
    operations: float,
    recompute: bool = False,
) -> float:
    """Days that a training takes: 6 N T / (n X), or 8 N T / (n X) where blocks are computed again
    (Narayanan et al., SC 2021, equation 4).

    Args:
        num_parameters: N.
        tokens: T.
        devices: n.
        operations: X: operations a second that a device does.
        recompute: Whether what is computed again counts among X.

    Raises:
        PlanError: For a value that makes no sense.
    """
    for name, value in (
        ("num_parameters", num_parameters),
        ("tokens", tokens),
        ("devices", devices),
        ("operations", operations),
    ):
        _positive(name, value)
    each = 8.0 if recompute else 6.0
    return each * num_parameters * tokens / (devices * operations) / SECONDS_OF_A_DAY


def compute_optimal(
    operations: float, *, tokens_per_parameter: float = TOKENS_PER_PARAMETER
) -> tuple[float, float]:
    """(parameters, tokens) of the model that makes most of so many operations: 6 N T of them, at
    about 20 tokens a parameter (Hoffmann et al., arXiv:2203.15556).

    Args:
        operations: Of the whole training.
        tokens_per_parameter: 20 is the paper's; models that are used a lot are trained longer.

    Raises:
        PlanError: For a value that makes no sense.
    """
    _positive("operations", operations)
    _positive("tokens_per_parameter", tokens_per_parameter)
    parameters = math.sqrt(operations / (6.0 * tokens_per_parameter))
    return parameters, tokens_per_parameter * parameters
