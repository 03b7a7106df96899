"""Scoring: what the replicas of a layout find on held-out samples, each on its part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.elastic.layout.padded_batch import PADDING, PaddedBatch
from pyops.elastic.layout.process_groups import abort_on_failure, agree_in_group
from pyops.elastic.planning.trial import RowsOf
from pyops.pipeline import Pipeline

__all__ = ["scored"]


def scored(
    pipeline: Pipeline,
    portions: Sequence[PaddedBatch],
    rows_of: RowsOf,
    score: Callable[[Any, Any], Tensor],
    *,
    first: int | None,
    waiting_group: dist.ProcessGroup | None,
) -> float:
    """The sum of score(what the last layer returns, target) over these portions, on the rank of the
    last stage; 0 on others.

    Args:
        first: The number of the first held-out sample in the cache; None: nothing is read there.
            What goes wrong on one rank is raised there, and on all of its pipeline before the next
            portion.
        waiting_group: Where idle ranks wait, and are told of one that is lost.
    """
    total = 0.0
    error: Exception | None = None
    pipeline.eval()
    try:
        for portion in portions:
            try:
                inputs, target, named = rows_of(portion)
            except Exception as caught:
                error = error or caught
            with abort_on_failure(waiting_group):
                agree_in_group(error, group=pipeline.group)
            if first is not None:
                numbers = portion.samples
                named = {
                    **named,
                    "samples": torch.where(numbers == PADDING, numbers, numbers + first),
                }
            with abort_on_failure(waiting_group):
                output = pipeline(inputs, **named)
            if pipeline.has_last:
                try:
                    total += float(score(output, target))
                except Exception as caught:
                    error = caught
    finally:
        pipeline.train()
    if error is not None:
        raise error
    return total
