"""What a schedule costs, by the table that stands at the head of pyops/pipeline/schedules/families:
how long the ranks of a pipeline are idle, and how many micro-batches each keeps.

    step = m (F + I + W) + idle        F, I, W: of a micro-batch on all stages of a rank

The simulator of `pyops.pipeline` finds the same; the table takes no time, however many ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from pyops.plan.layout import Layout

__all__ = ["fewest_microbatches", "idle", "kept"]

Idle = Callable[[int, int, float, float, float], float]

IDLE: dict[str, Idle] = {  # of p ranks with v stages each
    "gpipe": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "interleaved": lambda p, v, f, i, w: (p - 1) / v * (f + i + w),
    "zb1p": lambda p, v, f, i, w: (p - 1) * max(0.0, f + i - w),
    "interleaved_zb": lambda p, v, f, i, w: (p - 1) / v * (f + i + w),
    "zbv": lambda p, v, f, i, w: (p - 1) * f,
}


def idle(layout: Layout, forward: float, input_gradient: float, weight_gradient: float) -> float:
    """Seconds of a step that a rank of the pipeline waits.

    Args:
        layout: With pp ranks and its schedule.
        forward: Seconds of a micro-batch on all stages of a rank.
        input_gradient: Of the gradients of its inputs, with what is computed again.
        weight_gradient: Of the gradients of the weights.
    """
    if layout.pp == 1:
        return 0.0
    return IDLE[layout.schedule](
        layout.pp, layout.stages_per_rank, forward, input_gradient, weight_gradient
    )


def kept(layout: Layout, rank: int) -> float:
    """Micro-batches whose activations a rank of the pipeline keeps at most, on all its stages.

    Args:
        layout: With pp ranks and its schedule.
        rank: Of the pipeline, from 0.
    """
    p, m, v = layout.pp, layout.num_microbatches, layout.stages_per_rank
    if p == 1:
        return 1.0
    found = {
        "gpipe": float(m),
        "1f1b": float(p - rank),
        "interleaved": (2 * (p - 1 - rank) + (v - 1) * p + 1) / v,
        "zb1p": float(p),
        "interleaved_zb": ((v - 1) * p + p) / v,
        "zbv": float(p),
    }[layout.schedule]
    return min(float(m), found)


def fewest_microbatches(layout: Layout) -> int:
    """From which number of micro-batches on the table holds.

    Args:
        layout: With pp ranks and its schedule.
    """
    if layout.schedule == "zbv":
        return 2 * layout.pp - 1
    return layout.pp if layout.pp > 1 else 1
