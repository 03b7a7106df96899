"""Steps with and without a profile, in turns, and what the profile says.

warm-up | plain, in parts, plain, in parts ... | counted | traced
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pyops.observe.profile.operations import CountedOperations
from pyops.observe.profile.parts import Part, Parts
from pyops.observe.profile.trace import peak_of, trace_step

__all__ = ["StepProfile", "profile_steps"]


@dataclass(frozen=True)
class StepProfile:
    """What one rank did in a step."""

    seconds: float
    """Of a step without a profile: the median."""
    profiled_seconds: float
    """Of a step in parts: the median."""
    totals: Mapping[Part, float]
    """Seconds of each part: those of the step in parts that took `profiled_seconds`."""
    operations: Mapping[Part, int]
    """By formula, of each part."""
    again: int
    """Of them, those of activations that were computed again."""
    parameters: Mapping[str, int]
    """Of each module itself, without those within it."""
    peak_bytes: int
    """Allocated beyond what was there when the step began."""
    peak_part: str
    """In which part that was."""
    trace: dict[str, Any] = field(repr=False, default_factory=dict)
    """As `pyops.observe.profile.trace.trace_step` gives it."""

    @property
    def total_operations(self) -> int:
        """Of the step, without those of activations that were computed again."""
        return sum(self.operations.values()) - self.again


def profile_steps(
    step: Callable[[], object],
    model: nn.Module,
    *,
    device: torch.device,
    steps: int = 3,
    warmup: int = 2,
) -> StepProfile:
    """Profile steps of training. All ranks call it alike; it takes 2 * steps + warmup + 2 of them.

    Args:
        step: Takes a step, the same each time.
        model: Whose modules are told apart; not compiled, for within compiled code no module begins
            or ends.
        device: Where it is.
        steps: How many are timed each way.
        warmup: Steps before.

    Raises:
        ValueError: `steps` is less than 1, or `warmup` less than 0.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup is {warmup}; give 1 or more, and 0 or more")
    for _ in range(warmup):
        step()
    parts = Parts(model, device)
    plain, profiled = [], []
    for _ in range(steps):
        plain.append(_timed(step, device))
        with parts.step():
            step()
        profiled.append((parts.seconds, parts.totals()))
    profiled.sort(key=lambda each: each[0])
    seconds, totals = profiled[len(profiled) // 2]
    counted = CountedOperations(lambda: parts.current)
    with parts.step(), counted:
        step()
    trace = trace_step(step, parts, device)
    peak_bytes, peak_part = peak_of(trace)
    return StepProfile(
        seconds=statistics.median(plain),
        profiled_seconds=seconds,
        totals=totals,
        operations=dict(counted.counts),
        again=counted.again,
        parameters={
            name: sum(p.numel() for p in module.parameters(recurse=False))
            for name, module in model.named_modules()
        },
        peak_bytes=peak_bytes,
        peak_part=peak_part,
        trace=trace,
    )


def _timed(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
