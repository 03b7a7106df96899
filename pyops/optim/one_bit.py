"""The local part of 1-bit Adam: when its warm-up ends, and what happens to the states then.

    |v|_1        .-----.
               .'       '-.___
             .'               '----------------    "auto": the sum of the bias-corrected second
    step  ---+------+-----------+------|           moment differs by less than 4 % from what it
                                                   was 1 / (1 - beta2) steps ago

Tang et al., 1-bit Adam, arXiv:2102.02888. Nothing here communicates: OneBitAdam, whose states are
flat and whole, and ZeroOptimizer, whose ranks keep shards of them, call it with their own states.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers.grad_norm import CLIP_EPSILON

__all__ = [
    "COMPRESSED",
    "WARMUP",
    "KeptVariance",
    "Warmup",
    "gradient_factor",
    "inverse_root",
    "logger",
    "mean_weight",
    "variance_sum",
]

logger = logging.getLogger("pyops")

ParamGroup = dict[str, Any]
State = dict[str, Any]

WARMUP, COMPRESSED = "warmup", "compressed"  # the two phases
SLOW = "exp_avg_sq_slow"
THRESHOLD = 0.96
SAMPLES = 100  # of the second moment, over 1 / (1 - beta2) steps


def mean_weight(beta: float, step: int | float) -> float:
    """The weight of gradient number `step` in the bias-corrected mean of all gradients so far.

    m^_t = m_t / (1 - beta^t) gives m^_t = (1 - w) m^_(t-1) + w g with w = (1 - beta) /
    (1 - beta^t).
    """
    return (1.0 - beta) / (1.0 - beta**step)


def inverse_root(variance: Tensor, eps: float) -> Tensor:
    """1 / (sqrt(v) + eps) where v is not 0, else 0."""
    return variance.sqrt().add_(eps).reciprocal_().masked_fill_(variance == 0, 0.0)


def gradient_factor(
    norm: float, *, max_grad_norm: float | None, grad_scale: float | Tensor | None, summed: int
) -> float:
    """The factor by which a rank multiplies its gradient before the ranks average.

    Args:
        norm: of the unscaled gradient of all ranks together.
        max_grad_norm: the norm to which gradients are clipped; None: they are not.
        grad_scale: the loss scale, by which the gradient is divided; None: 1.
        summed: the number of ranks where gradients are to be summed, 1 where they are averaged.
    """
    clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + CLIP_EPSILON))
    return clip * (1.0 if grad_scale is None else 1.0 / float(grad_scale)) * summed


class KeptVariance:
    """The second moment that is kept when the warm-up ends.

    Adam's own is a mean over 1 / (1 - beta2) steps, which is few for a variance that never changes
    again. During the warm-up a slower mean runs beside it, in state["exp_avg_sq_slow"], and takes
    its place at the switch.

    Args:
        beta: decay of the slower mean; it runs only where this is more than beta2.
        is_corrected: whether moments are divided by 1 - beta^t at the switch (DeepSpeed does not).
    """

    def __init__(self, beta: float, *, is_corrected: bool = True) -> None:
        self.beta, self._is_corrected = beta, is_corrected

    def is_tracked(self, group: ParamGroup) -> bool:
        """Whether the slower mean runs for the parameters of this group."""
        return self.beta > float(group["betas"][1])

    def track(self, group: ParamGroup, state: State, square: Tensor, *, scale: float = 1.0) -> None:
        """Take a squared gradient, times `scale`, into the slower mean.

        Call it after the exact step with that gradient. Where Adam began without the slower mean,
        that begins from Adam's own.
        """
        if SLOW not in state:
            step = float(state["step"])
            state[SLOW] = state["exp_avg_sq"] * (
                (1 - self.beta ** (step - 1)) / (1 - float(group["betas"][1]) ** step)
            )
        state[SLOW].mul_(self.beta).add_(square, alpha=(1 - self.beta) * scale)

    def freeze(self, states: Iterable[tuple[ParamGroup, State]]) -> None:
        """Make the moments those of the compressed phase: the slower mean, bias-corrected."""
        for group, state in states:
            beta1, beta2 = map(float, group["betas"])
            step, slow = float(state["step"]), state.pop(SLOW, None)
            if slow is not None:
                state["exp_avg_sq"].copy_(slow)
            if self._is_corrected and step:
                state["exp_avg"].div_(1 - beta1**step)
                state["exp_avg_sq"].div_(1 - (beta2 if slow is None else self.beta) ** step)


def variance_sum(states: Iterable[tuple[ParamGroup, State]]) -> float:
    """The sum of all elements of the bias-corrected second moment."""
    total = 0.0
    for group, state in states:
        if step := float(state["step"]):
            beta2 = float(group["betas"][1])
            total += float(state["exp_avg_sq"].sum(dtype=torch.float64)) / (1 - beta2**step)
    return total


class Warmup:
    """Decides after each step of the warm-up whether it was the last.

    Args:
        steps: how many there are, at least 1, or "auto": the rule of 1-bit Adam, section 7.1 of
            arXiv:2102.02888, with the ratio of the smaller to the larger sum.
        beta2: gives "auto" its distance in steps.
        total_steps: of the run, at least 1, or None.
        who: the optimizer, for messages.

    Raises:
        ValueError: for anything else.
    """

    def __init__(
        self, steps: int | str, *, beta2: float, total_steps: int | None, who: str
    ) -> None:
        if isinstance(steps, bool) or not (
            steps == "auto" or (isinstance(steps, int) and steps >= 1)
        ):
            raise ValueError(
                f"{who}: warmup_steps={steps!r} must be a number of steps, at least 1 "
                "(without any there is no variance to "
                'keep), or "auto"; 15 to 25 % of the run is a good choice'
            )
        if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
            raise ValueError(
                f"{who}: total_steps={total_steps!r} must be the run's number of steps, "
                "at least 1, or None"
            )
        if isinstance(steps, int) and total_steps is not None and steps >= total_steps:
            logger.warning(
                "%s: warmup_steps=%d is not less than total_steps=%d: every step is "
                "exact and nothing will be compressed; "
                "15 to 25 %% of the run is a good choice",
                who,
                steps,
                total_steps,
            )
        self.steps = steps
        distance = max(1, round(1 / (1 - beta2)))
        self.every = max(1, distance // SAMPLES)
        self._sums: deque[float] = deque(maxlen=distance // self.every + 1)

    def needs_sum(self, step: int) -> bool:
        """Whether `is_last` of this step needs the sum of the second moment."""
        return self.steps == "auto" and step % self.every == 0

    def is_last(self, step: int, variance_sum: float | None) -> bool:
        """Whether the step of this number, counted from 1, was the last of the warm-up.

        Args:
            variance_sum: what `variance_sum` gave in this step, on all ranks together.
        """
        if isinstance(self.steps, int):
            return step >= self.steps
        if variance_sum is None:
            return False
        self._sums.append(variance_sum)
        if len(self._sums) < (self._sums.maxlen or 0):
            return False
        low, high = sorted((self._sums[0], self._sums[-1]))
        return high > 0 and low / high >= THRESHOLD

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, on which "auto" goes on after a restart."""
        return {"variance_sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._sums = deque(state["variance_sums"], maxlen=self._sums.maxlen)
