"""The direction of L-BFGS: inner products in one pass and the direction in another, beside torch's
two loops, one after the other, over the same history.

    python -m benchmarks lbfgs
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.optim.lbfgs.history import History

__all__ = ["run", "two_loops"]

NUMEL, PAIRS = 4 << 20, 10


def two_loops(gradient: Tensor, steps: list[Tensor], bends: list[Tensor]) -> Tensor:
    """As torch.optim.LBFGS computes it: 4 passes over two vectors for each pair."""
    scales = [1.0 / y.dot(s) for s, y in zip(steps, bends, strict=True)]
    q = gradient.neg()
    weights: list[Tensor] = []
    for s, y, scale in reversed(list(zip(steps, bends, scales, strict=True))):
        weights.append(s.dot(q) * scale)
        q.add_(y, alpha=-float(weights[-1]))
    q.mul_(bends[-1].dot(steps[-1]) / bends[-1].dot(bends[-1]))
    for s, y, scale in zip(steps, bends, scales, strict=True):
        q.add_(s, alpha=float(weights.pop() - y.dot(q) * scale))
    return q


def direction_case(numel: int, device: torch.device) -> Case:
    random = torch.Generator().manual_seed(0)
    history = History(numel, size=PAIRS, dtype=torch.float32, device=device)
    history.begin(torch.randn(numel, generator=random).to(device))
    for _ in range(PAIRS):
        step = torch.randn(numel, generator=random).to(device)
        curvature = torch.rand(numel, generator=random).to(device).add_(0.5)
        history.add(step, history.gradient + step * curvature)
    steps = [history.rows[place].clone() for place in history.pairs]
    bends = [history.rows[PAIRS + 1 + place].clone() for place in history.pairs]
    gradient = history.gradient.clone()

    def ours() -> Tensor:
        history.refresh(history.pairs[-1])
        return history.direction()

    def check() -> float:
        error = (ours() - two_loops(gradient, steps, bends)).norm() / gradient.norm()
        assert error < 1e-4, f"the directions differ by {float(error)}"
        return float(error)

    return Case(
        "lbfgs",
        f"direction, {numel >> 20} Mi, {PAIRS} pairs",
        {"pyops": ours, "torch": lambda: two_loops(gradient, steps, bends)},
        check=check,
        device=device,
        bytes_moved=(2 * (2 * PAIRS + 1) + 1) * 4 * numel,
        targets={"torch": 1.8},
    )


def run(options: Options) -> list[Row]:
    """The rows of this bench."""
    return run_cases([lambda: direction_case(NUMEL, options.device)], rounds=options.rounds)
