"""confirm: of the numbers of micro-batches that the simulator likes best, the one that a short
trial finds fastest.

    simulated  8: 1.00 s  4: 1.02 s  12: 1.05 s  16: 1.4 s  the best three are tried
    rank 0     8: 1.31 s  4: 1.10 s  12: 1.50 s
    rank 1     8: 1.12 s  4: 1.15 s  12: 1.48 s             slowest rank: 1.31, 1.15, 1.50, so 4

A trial depends on what else the machine does, and in how many micro-batches a batch is summed
changes the last bits of its gradients. So nothing is tried unless asked for: without it a run's
numbers depend on no clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from pyops.comm.agreement import agree, gather
from pyops.elastic.planning.packing import Packing
from pyops.mesh import check_initialized

__all__ = ["confirm", "fastest"]


def confirm(
    packing: Packing,
    measure: Callable[[int], float],
    *,
    most: int = 3,
    rounds: int = 3,
    group: dist.ProcessGroup | None = None,
) -> Packing:
    """The packing with the number of micro-batches that the trial finds fastest; the same on all
    ranks of the group.

    What measure raises on one rank is raised on all.

    Args:
        measure: measure(count) -> seconds of a step of the batch in so many micro-batches, such as
            its forward and backward, whose gradients are then dropped. Every rank calls it as
            often, in the same order: `rounds` times for each of the best `most` numbers in
            packing.simulated, in turn, so that the machine's slow moments hit all alike. The median
            counts.

    Raises:
        ValueError: For no rounds, nothing to try, or seconds that are none.
    """
    check_initialized("confirm", group)
    for what, value in (("most", most), ("rounds", rounds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
    counts = [count for count, _ in packing.simulated[:most]]
    if not counts:
        raise ValueError(
            "the packing has no simulated numbers of micro-batches to try; take it from pack"
        )
    if len(counts) == 1:
        return packing
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    error: Exception | None = None
    try:
        for _ in range(rounds):
            for count in counts:
                seconds[count].append(measure(count))
    except Exception as caught:
        error = caught
    agree(error, group=group)
    measured = gather(
        {count: statistics.median(several) for count, several in seconds.items()}, group=group
    )
    found = fastest(measured)
    times = ", ".join(f"{count}: {max(each[count] for each in measured):.3g} s" for count in counts)
    reason = f"{packing.reason}; of micro-batches tried ({times}) {found} are fastest"
    return replace(packing, micro_batches=found, time=dict(packing.simulated)[found], reason=reason)


def fastest(measured: Sequence[Mapping[int, float]]) -> int:
    """The number of micro-batches with which the slowest rank is the fastest; of equal ones that
    with the fewest.

    Args:
        measured: Of each rank {number: seconds}.

    Raises:
        ValueError: For ranks that tried other numbers, and for seconds that are none.
    """
    if not measured or not measured[0]:
        raise ValueError(
            "nothing was measured; give {number of micro-batches: seconds} of each rank"
        )
    for rank, each in enumerate(measured):
        if each.keys() != measured[0].keys():
            raise ValueError(
                f"rank 0 tried {sorted(measured[0])} micro-batches, but rank {rank} "
                f"{sorted(each)}; try the same"
            )
        if wrong := [
            (count, time) for count, time in each.items() if not (math.isfinite(time) and time >= 0)
        ]:
            raise ValueError(
                f"rank {rank} measured {wrong[0][1]!r} seconds with {wrong[0][0]} "
                "micro-batches; expected a time"
            )
    return min(measured[0], key=lambda count: (max(each[count] for each in measured), count))
