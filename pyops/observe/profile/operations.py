"""Operations of a step by formula, each under the part that ran it, and what share of a device's
peak they are.

A multiplication and an addition are two. Products of matrices, convolutions and attention count, by
the formulas of torch.utils.flop_counter, to which every op of pyops adds its own; all else counts
0. Attention is counted as torch counts its own: whole, its masked half too, with two products in
forward and five in backward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from pyops.observe.profile.parts import Part
from pyops.torch_private import TorchDispatchMode, in_backward

__all__ = ["CONVENTION", "CountedOperations", "measured_peak", "utilization"]

CONVENTION = (
    "operations by formula over the step's time and the peak; attention whole, no half for a "
    "mask, with five products in backward; activations computed again left out"
)


class CountedOperations(TorchDispatchMode):  # type: ignore[misc]
    """Within the block, counts operations.

    Args:
        current: The part that runs now.

    Attributes:
        counts: Operations by part.
        again: How many of them were forward within backward: activations computed again.
    """

    def __init__(self, current: Callable[[], Part]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current = current
        self.counts: dict[Part, int] = defaultdict(int)
        self.again = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        formula = flop_registry.get(func.overloadpacket)
        out = func(*args, **options)
        if formula is not None:
            number = int(formula(*args, **options, out_val=out))
            part = self._current()
            self.counts[part] += number
            if part.phase == "forward" and in_backward():
                self.again += number
        return out

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, width: int | None = None, seconds: float = 0.3
) -> float:
    """Operations a second of the fastest square product seen: what a device delivers, not what its
    data sheet says.

    Args:
        device: Which one.
        dtype: Of the matrices.
        width: Of the matrices; by default 4096 on a GPU and 1024 elsewhere.
        seconds: How long to look.
    """
    n = width or (4096 if device.type == "cuda" else 1024)
    a = torch.ones(n, n, device=device, dtype=dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        begun = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * n**3 / (time.perf_counter() - begun))
    return best


def utilization(operations: float, *, seconds: float, peak: float) -> float:
    """Model FLOP utilization (PaLM, arXiv:2204.02311, appendix B): the share of the peak.

    Args:
        operations: Of one rank's step, by CONVENTION.
        seconds: That the step takes.
        peak: Operations a second of the rank's device.

    Raises:
        ValueError: `seconds` or `peak` is not more than 0.
    """
    if seconds <= 0 or peak <= 0:
        raise ValueError(f"seconds is {seconds} and peak is {peak}; give more than 0")
    return operations / seconds / peak
