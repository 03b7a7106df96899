"""`python -m benchmarks.training.profile_step`: where one training step of a GPT spends its time,
and how often the host waits in it.

kernels    each by its name: time, share, how often          on a CPU: operations
waits      calls in which the host waits for the device; reading loss and norm, as training does, is
           two of them
torch's own table of operations, longest first
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.instruments.trace import CALL, kernels, profiled, takes_place, waits
from benchmarks.training.gpt_step import SIZES, PyopsStep

__all__ = ["longest", "main", "report"]


def longest(events: Iterable[Any], *, device: bool, most: int) -> str:
    """A table of what ran on the device, or on the host by itself, longest first; a last line adds
    up all."""
    time, count = Counter[str](), Counter[str]()
    for event in events:
        if takes_place(event, device=device) and event.name != CALL:
            time[event.name] += (
                event.time_range.elapsed_us() if device else event.self_cpu_time_total
            )
            count[event.name] += 1
    total = sum(time.values()) or 1.0
    lines = [f"{'ms':>10} {'%':>6} {'count':>6}  name"]
    for name, us in time.most_common(most):
        lines.append(f"{us / 1e3:>10.3f} {100 * us / total:>6.1f} {count[name]:>6}  {name[:100]}")
    return "\n".join(
        [*lines, f"{total / 1e3:>10.3f} {100:>6.1f} {sum(count.values()):>6}  all {len(time)}"]
    )


def report(title: str, device: torch.device, *, most: int = 40) -> str:
    """Of the fourth step of a GPT."""
    step = partial(PyopsStep(SIZES[title], device), compiled=False)
    for _ in range(3):
        step()
    found = profiled(step, device)
    events, cuda = found.events(), device.type == "cuda"
    waited = ", ".join(f"{name} {count}" for name, count in waits(events).items()) or "never"
    averages = found.key_averages()
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    return "\n".join(
        [
            f"a training step of {title} on {device.type}: "
            f"{sum(kernels(events).values())} kernels launched",
            f"the host waited: {waited}",
            longest(events, device=cuda, most=most),
            averages.table(sort_by=by, row_limit=most, max_name_column_width=60),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.profile_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--size", choices=sorted(SIZES), help="GPT 125M on a GPU, GPT tiny on a CPU"
    )
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    print(report(given.size or ("GPT 125M" if device.type == "cuda" else "GPT tiny"), device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
