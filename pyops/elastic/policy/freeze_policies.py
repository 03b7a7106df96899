"""Freeze policies: how many of a model's layers, from the bottom, have converged and need no more
gradients.

    gradient norms   0.1  0.3  0.2 | 0.7  0.9  0.8   frozen: 0, then 3; always a prefix, never fewer
                                                     than before
    layer             0    1    2     3    4    5

A policy is given numbers, neither model nor trainer, and answers with a number, when asked: once an
epoch, or every so many steps. Layers are those that may be frozen, the blocks of a
transformer; what stands before them (the embedding) is frozen with the first of them, what stands
behind (the head) never. `frozen` counts layers: with 3, layers 0, 1 and 2 are frozen, and 3 is the
first that is not. Meter measures the norms, agree_on makes sure that all ranks decided alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from pyops.comm.agreement import agree, gather

__all__ = ["Bound", "Callback", "GradientNorm", "PercentileOfChange", "Policy", "agree_on"]


class Policy(ABC):
    """What all policies have in common: checks, and a state of a few numbers that JSON can hold."""

    def decide(self, norms: Sequence[float], frozen: int) -> int:
        """How many layers to freeze from now on: frozen ... len(norms).

        Args:
            norms: The gradient norm of each layer since the last decision; those of frozen layers
                are not looked at.
            frozen: How many are frozen now. Called once for each decision: policies count.
                ValueError, and no change, for a number of frozen layers that there can't be, or a
                norm of an active layer that is no number, 0 or more.
        """
        norms = tuple(float(norm) for norm in norms)
        if isinstance(frozen, bool) or not isinstance(frozen, int) or not 0 <= frozen <= len(norms):
            raise ValueError(
                f"frozen is {frozen!r}; it must be a whole number from 0 to "
                f"{len(norms)}, the number of layers"
            )
        for i, norm in enumerate(norms[frozen:], start=frozen):
            if not (math.isfinite(norm) and norm >= 0):
                raise ValueError(
                    f"the gradient norm of layer {i} is {norm}; it must be a number, 0 "
                    "or more: leave out steps that overflowed"
                )
        if frozen == len(norms):
            return frozen
        return self._decide(norms, frozen)

    @abstractmethod
    def _decide(self, norms: tuple[float, ...], frozen: int) -> int:
        """The decision, with at least one layer active."""

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: Mapping[str, Any]) -> None:  # noqa: B027  nothing to load is not abstract
        pass

    def state_dict(self) -> dict[str, Any]:
        """{"policy": its class' name, and what it counts}; options are not part of it."""
        return {"policy": type(self).__name__, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another stood.

        Raises:
            ValueError: For the state of another class of policies.
        """
        if state.get("policy") != type(self).__name__:
            raise ValueError(
                f"the state is of the policy {state.get('policy')!r}, but this is a "
                f"{type(self).__name__}; go on with the "
                "policy that was saved, or begin without its state"
            )
        self._load(state)


class Bound(Policy):
    """Freeze the fraction alpha of what is still active, each time: ceil(L (1 - (1 - alpha)^T)) of
    L layers at decision T.

    The first term of PipeTransformer's rule alone (He et al., 2021), which needs no gradients. The
    value is carried on unrounded and rounded up when it is told, so that the closed form holds;
    where it is less than 1 below L, all are frozen. alpha is taken as the nearest fraction with a
    denominator up to 10^6 and reckoned with exactly: 1 / 3 of 12 layers are 4, not 5. If the
    caller's `frozen` is not what the bound was, the rule goes on from there.

    Args:
        alpha: More than 0, less than 1; ValueError otherwise.
    """

    def __init__(self, alpha: float) -> None:
        if isinstance(alpha, bool) or not 0 < alpha < 1:
            raise ValueError(
                f"alpha is {alpha!r}; it is the part of the active layers to freeze: "
                "more than 0, less than 1"
            )
        self.alpha = Fraction(alpha).limit_denominator(10**6)
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {alpha!r}; take a fraction with a denominator up to 10^6")
        # The unrounded value is L - (L - base) (1 - alpha)^count.
        self._base, self._count = 0, 0

    def _remaining(self, layers: int) -> Fraction:
        """Unrounded, how many layers stay active."""
        if (layers - self._base) * float(1 - self.alpha) ** self._count < 0.5:
            return Fraction(0)  # surely below 1, and large powers of fractions are not cheap
        return (layers - self._base) * (1 - self.alpha) ** self._count

    def _go_on(self, layers: int, frozen: int) -> Fraction:
        """One decision further; the bound, unrounded."""
        if layers - math.floor(self._remaining(layers)) != frozen:
            self._base, self._count = frozen, 0
        self._count += 1
        return layers - self._remaining(layers)

    def _decide(self, norms: tuple[float, ...], frozen: int) -> int:
        return math.ceil(self._go_on(len(norms), frozen))

    def _state(self) -> dict[str, Any]:
        return {"base": self._base, "count": self._count}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._base, self._count = int(state["base"]), int(state["count"])


class GradientNorm(Bound):
    """PipeTransformer's rule: min(f + alpha (L - f), the layer with the least gradient norm), f of
    L layers being frozen.

    (He et al., 2021.) The second term is how many layers there are up to the active layer with the
    least norm, that one included: it is taken to have converged, with all below it; of equal norms,
    the lowest layer counts. The first term is Bound's, rounded as there, so that a decision may
    freeze no more than are frozen already.
    """

    def _decide(self, norms: tuple[float, ...], frozen: int) -> int:
        bound = self._go_on(len(norms), frozen)
        converged = 1 + min(range(frozen, len(norms)), key=lambda layer: norms[layer])
        return min(math.ceil(bound), converged)


class PercentileOfChange(Policy):
    """Freeze the lowest active layers whose gradient norm changed by less than that percentile of
    all active layers' changes.

    The change is |norm - norm before| / norm before, between two decisions, as in AutoFreeze (Liu
    et al., 2021); percentiles are interpolated linearly. A layer is frozen only if all below it
    are: nothing happens where the lowest active layer is among those that change most. The first
    decision has nothing to compare with and freezes none; the largest change is never less than a
    percentile, so the last active layer stays active.

    Args:
        percent: 0 (freezes nothing) to 100; ValueError otherwise, and when the number of layers
            changes.
    """

    def __init__(self, percent: float = 50.0) -> None:
        if isinstance(percent, bool) or not 0 <= percent <= 100:
            raise ValueError(f"percent is {percent!r}; expected a number from 0 to 100")
        self.percent = float(percent)
        self._before: tuple[float, ...] | None = None

    def _decide(self, norms: tuple[float, ...], frozen: int) -> int:
        before = self._before
        if before is not None and len(before) != len(norms):
            raise ValueError(
                f"there are {len(norms)} norms, but {len(before)} at the last decision; "
                "give those of all layers"
            )
        self._before = norms
        if before is None:
            return frozen
        changes = [
            _change(old, new) for old, new in zip(before[frozen:], norms[frozen:], strict=True)
        ]
        limit = _percentile(changes, self.percent)
        return frozen + next(
            (i for i, change in enumerate(changes) if not change < limit), len(changes)
        )

    def _state(self) -> dict[str, Any]:
        return {"before": None if self._before is None else list(self._before)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._before = None if state["before"] is None else tuple(map(float, state["before"]))


def _change(old: float, new: float) -> float:
    return abs(new - old) / old if old else math.inf if new else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (place - math.floor(place)) * (high - low)


class Callback(Policy):
    """function(norms, frozen) -> the number of frozen layers. Its state is the function's, if it
    has state_dict and load_state_dict.

    Raises:
        ValueError: For an answer that is no whole number from `frozen` to the number of layers.
    """

    def __init__(self, function: Callable[[tuple[float, ...], int], int]) -> None:
        if not callable(function):
            raise TypeError(
                f"function is {function!r}; give one of (norms, frozen) that returns the "
                "number of frozen layers"
            )
        self.function = function

    def _decide(self, norms: tuple[float, ...], frozen: int) -> int:
        found = self.function(norms, frozen)
        if (
            isinstance(found, bool)
            or not isinstance(found, int)
            or not frozen <= found <= len(norms)
        ):
            raise ValueError(
                f"the callback would freeze {found!r} layers; it must return a whole "
                f"number from {frozen}, which are frozen "
                f"already, to {len(norms)}, which there are"
            )
        return found

    def _state(self) -> dict[str, Any]:
        return (
            {"function": self.function.state_dict()} if hasattr(self.function, "state_dict") else {}
        )

    def _load(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.function, "load_state_dict") and "function" in state:
            self.function.load_state_dict(state["function"])


def agree_on(decision: int, group: dist.ProcessGroup | None = None) -> int:
    """The decision, if all ranks of the group made the same; else ValueError on every rank alike,
    with two of them by name.

    Every rank of the group must call it.
    """
    decisions = gather(decision, group=group)
    if (
        other := next((rank for rank, each in enumerate(decisions) if each != decisions[0]), None)
    ) is not None:
        raise ValueError(
            f"rank 0 would freeze {decisions[0]} layers, but rank {other} "
            f"{decisions[other]}; policies must be given the same "
            "norms and have the same state on all ranks: sum the Meter over the group, "
            "and make callbacks depend on norms alone"
        )
    return decision


def decide_together(
    policy: Policy, norms: Sequence[float], frozen: int, *, group: dist.ProcessGroup | None = None
) -> int:
    """policy.decide(norms, frozen) and `agree_on`: what goes wrong on one rank, in a callback say,
    is raised on all."""
    error: Exception | None = None
    decision = frozen
    try:
        decision = policy.decide(norms, frozen)
    except Exception as caught:
        error = caught
    agree(error, group=group)
    return agree_on(decision, group)
