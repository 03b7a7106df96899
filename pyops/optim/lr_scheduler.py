"""Learning rates over steps, as torch's LRSchedulers, each a closed form of the step: resuming
needs the step alone.

Warmup, WarmupCosine            OneCycle                        LRRangeTest
      ____                           /\\                                   .
     /    `.                        /  \\                             . '
    /       `-.___                 /    \\__                 . . '
    momentum: as it was            \\____/ beta1, beta2 as it was     loss against lr: `steepest`

`scheduler.step()` after every optimizer step, not after one that was skipped. They set group["lr"]
from the rate each group was built with (OneCycle, LRRangeTest: from their own), also of tensors, in
place.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "Warmup",
    "WarmupCosine",
    "cosine_ratio",
    "steepest",
    "warmup_ratio",
]

KINDS = ("linear", "log")


def warmup_ratio(step: int, *, steps: int, kind: str = "linear") -> float:
    """Of the full rate at step 0, 1, ...: (step + 1) / steps, or log(step + 2) / log(steps + 1); 1
    from step `steps` - 1 on."""
    if step + 1 >= steps:
        return 1.0
    return (step + 1) / steps if kind == "linear" else math.log(step + 2) / math.log(steps + 1)


def cosine_ratio(step: float, *, steps: int, final: float = 0.0) -> float:
    """Half a cosine from 1 at step 0 to `final` at step `steps`, where it stays."""
    progress = min(1.0, step / max(1, steps))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def _require(sound: bool, name: str, value: Any, expected: str) -> None:
    if not sound:
        raise ValueError(f"{name} is {value!r}; it must be {expected}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class _ClosedForm(LRScheduler):
    """`rate(step, base)` says it all; torch's counting of steps and saving, around it."""

    @abstractmethod
    def rate(self, step: int, base: float) -> float:
        """The learning rate of this step of a group that was built with `base`."""

    def get_lr(self) -> list[float | Tensor]:
        """One for each group, of the step that comes next."""
        return [self.rate(self.last_epoch, float(base)) for base in self.base_lrs]

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        return self.get_lr()


class Warmup(_ClosedForm):
    """From near 0 to the group's rate in `steps` steps, then constant.

    Args:
        kind: "linear" or "log" (`warmup_ratio`).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        kind: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        _require(_is_count(steps, 0), "steps", steps, "a whole number, 0 or more")
        _require(kind in KINDS, "kind", kind, "linear or log")
        self.steps, self.kind = steps, kind
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        return base * warmup_ratio(step, steps=self.steps, kind=self.kind)


class WarmupCosine(_ClosedForm):
    """A warm-up, then half a cosine down to `final_ratio` of the group's rate at `total_steps`,
    where it stays.

    Loshchilov and Hutter, SGDR, ICLR 2017, without restarts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        kind: str = "linear",
        final_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _require(_is_count(total_steps, 1), "total_steps", total_steps, "a whole number, 1 or more")
        _require(
            _is_count(warmup_steps, 0), "warmup_steps", warmup_steps, "a whole number, 0 or more"
        )
        _require(kind in KINDS, "kind", kind, "linear or log")
        _require(0 <= final_ratio <= 1, "final_ratio", final_ratio, "between 0 and 1")
        self.total_steps, self.warmup_steps, self.kind, self.final_ratio = (
            total_steps,
            warmup_steps,
            kind,
            final_ratio,
        )
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        if step < self.warmup_steps:
            return base * warmup_ratio(step, steps=self.warmup_steps, kind=self.kind)
        steps = self.total_steps - self.warmup_steps
        return base * cosine_ratio(step - self.warmup_steps, steps=steps, final=self.final_ratio)


class OneCycle(_ClosedForm):
    """Up from `min_lr` to `max_lr` in `first` steps, down again in `second` (None: as many),
    momentum the other way.

    Smith, A disciplined approach to neural network hyper-parameters, arXiv:1803.09820, section 4.

    Args:
        momentum: (least, most) of beta1 for optimizers with betas, of momentum for others; most
            where the rate is least, and after the cycle. beta2 stays as it is. None: leave momentum
            alone.
        decay_rate: After the cycle the rate is min_lr / (1 + decay_rate * d), d steps later.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        min_lr: float,
        max_lr: float,
        first: int,
        second: int | None = None,
        momentum: tuple[float, float] | None = (0.85, 0.95),
        decay_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _require(
            0 <= min_lr <= max_lr and math.isfinite(max_lr),
            "(min_lr, max_lr)",
            (min_lr, max_lr),
            "rising, from 0 on",
        )
        _require(_is_count(first, 1), "first", first, "a whole number, 1 or more")
        _require(
            second is None or _is_count(second, 1),
            "second",
            second,
            "a whole number, 1 or more, or None",
        )
        _require(decay_rate >= 0, "decay_rate", decay_rate, "0 or more")
        if momentum is not None:
            _require(
                0 <= momentum[0] <= momentum[1] < 1,
                "momentum",
                momentum,
                "(least, most), both within [0, 1)",
            )
            for number, group in enumerate(optimizer.param_groups):
                if "betas" not in group and "momentum" not in group:
                    who = f"param group {number} of {type(optimizer).__name__}"
                    raise ValueError(f"{who} has neither betas nor momentum; pass momentum=None")
        self.min_lr, self.max_lr, self.decay_rate = float(min_lr), float(max_lr), float(decay_rate)
        self.first, self.second = first, first if second is None else second
        self.momentum = momentum
        super().__init__(optimizer, last_epoch)

    def height(self, step: int) -> float:
        """How far up the cycle: 0 at step 0, 1 at `first`, 0 from `first` + `second` on."""
        if step <= self.first:
            return step / self.first
        return max(0.0, 1 - (step - self.first) / self.second)

    def rate(self, step: int, base: float) -> float:
        beyond = step - self.first - self.second
        if beyond > 0:
            return self.min_lr / (1 + self.decay_rate * beyond)
        return self.min_lr + (self.max_lr - self.min_lr) * self.height(step)

    def momentum_at(self, step: int) -> float | None:
        """beta1, or momentum, of this step."""
        if self.momentum is None:
            return None
        least, most = self.momentum
        return most - (most - least) * self.height(step)

    def get_lr(self) -> list[float | Tensor]:
        if (momentum := self.momentum_at(self.last_epoch)) is not None:
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return super().get_lr()


class LRRangeTest(_ClosedForm):
    """From `min_lr` to `max_lr` in `steps` steps, evenly in the rate's logarithm ("log") or in the
    rate ("linear").

    Smith, Cyclical learning rates for training neural networks, WACV 2017, section 3.3.

    Args:
        stairs: In that many equal steps up; 0: at every step. Draw the loss against the rate;
            `steepest` says where it falls fastest.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        min_lr: float,
        max_lr: float,
        steps: int,
        kind: str = "log",
        stairs: int = 0,
        last_epoch: int = -1,
    ) -> None:
        _require(
            0 < min_lr < max_lr and math.isfinite(max_lr),
            "(min_lr, max_lr)",
            (min_lr, max_lr),
            "rising, above 0",
        )
        _require(_is_count(steps, 2), "steps", steps, "a whole number, 2 or more")
        _require(kind in KINDS, "kind", kind, "linear or log")
        _require(
            _is_count(stairs, 0) and stairs != 1, "stairs", stairs, "0, or a whole number from 2 on"
        )
        self.min_lr, self.max_lr, self.steps, self.kind, self.stairs = (
            float(min_lr),
            float(max_lr),
            steps,
            kind,
            stairs,
        )
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        way = min(step, self.steps - 1) / (self.steps - 1)
        if self.stairs:
            way = min(
                int(min(step, self.steps - 1) * self.stairs / self.steps), self.stairs - 1
            ) / (self.stairs - 1)
        if self.kind == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * way
        result: float = self.min_lr * (self.max_lr / self.min_lr) ** way
        return result


def steepest(rates: Sequence[float], losses: Sequence[float]) -> int | None:
    """Where the loss falls fastest with the logarithm of the rate, of the points of a range test;
    None if it never falls.

    Losses are averaged over a twentieth of the points to each side. What comes after the least of
    these averages does not count, nor does what comes after a loss that is not finite.

    Raises:
        ValueError: for lists that are not equally long.
    """
    if len(rates) != len(losses):
        raise ValueError(
            f"there are {len(rates)} rates and {len(losses)} losses; pass one loss for each rate"
        )
    end = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if end < 3:
        return None
    reach = max(1, end // 20)
    y = np.asarray(losses[:end], dtype=np.float64)
    smooth = np.asarray([y[max(0, i - reach) : i + reach + 1].mean() for i in range(end)])
    last = int(smooth.argmin())
    if last == 0:
        return None
    slope = np.gradient(smooth, np.log(np.asarray(rates[:end], dtype=np.float64)))
    found = int(slope[: last + 1].argmin())
    return found if slope[found] < 0 else None
