"""What a micro-batch costs besides its rows: with it `pack` weighs many small micro-batches against
few large ones.

rows of a micro-batch    4   16
milliseconds            26   50   2 for each row, and 18, as much as 9 rows, however few there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import on_first_rank
from pyops.elastic.planning.packing_config import Machine
from pyops.mesh import ALONE
from pyops.pipeline import Profile, profile

__all__ = ["machine_of", "rows_besides"]

MOST = 1024.0  # rows; also where rows cost nothing that can be measured


def rows_besides(
    layers: Callable[[], Sequence[nn.Module]],
    rows_of: Callable[[int], tuple[Any, Any, Mapping[str, Any]]],
    *,
    loss: Callable[[Any, Any], Tensor],
    rows: int,
    rounds: int = 5,
    group: dist.ProcessGroup | None = None,
) -> float:
    """How many rows take as long as what a micro-batch costs the whole model besides its rows, in
    forward and backward.

    Measured with `rows` and a quarter of that, on the group's first rank, while the others wait;
    every rank gets the number, or the error.

    Args:
        layers: Makes all of the model, with memory; called on the first rank alone.
        rows_of: A number of rows -> (inputs, target, named arguments), as for `Pipeline.step`,
            shape included.
    """
    few, many = max(1, rows // 4), max(2, rows)

    def found() -> float:
        times, whole = [], layers()
        for count in (few, many):
            inputs, target, named = rows_of(count)
            times.append(
                _seconds(
                    profile(
                        whole,
                        inputs,
                        target=target,
                        named=named,
                        loss=loss,
                        rounds=rounds,
                        group=ALONE,
                    )
                )
            )
        return _crossing(few, times[0], many, times[1])

    return on_first_rank(found, group=group)


def machine_of(
    layers: Iterable[nn.Module], *, besides: float, stages: int, context: int = 1
) -> Machine:
    """The machine of all ranks for `pack`, to which the layers' parameters are given as costs: a
    row takes as many seconds as there are parameters. The stages share out what a micro-batch
    costs.

    Args:
        layers: All of the model.
        besides: What a micro-batch costs besides its rows, in rows.
        stages: Over which that is shared out.
        context: Ranks that share out the tokens of each row, or the weights: one device of the
            machine.
    """
    parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return Machine(devices=ranks // context, overhead=besides * parameters / 2 / stages)


def _seconds(found: Profile) -> float:
    return sum(layer.time for layer in found.layers)


def _crossing(few: int, less: float, many: int, more: float) -> float:
    """Of the straight line through both: where it begins, in rows."""
    row = (more - less) / (many - few)
    return min(MOST, max(0.0, (more - many * row) / row)) if row > 0 else MOST
