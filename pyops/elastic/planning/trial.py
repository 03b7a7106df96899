"""Trial: how long a batch takes in so many micro-batches, by forward and backward of real rows
whose gradients are dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pyops.elastic.layout.padded_batch import PaddedBatch, padded_batch
from pyops.elastic.layout.process_groups import agree_in_group
from pyops.pipeline import Pipeline

__all__ = ["RowsOf", "Trial"]

RowsOf = Callable[
    [PaddedBatch], tuple[Any, Any, Mapping[str, Any]]
]  # -> inputs, target, named arguments of a step


class Trial:
    """trial(count) -> seconds; all ranks of a pipeline call it. The same pipeline is used for each
    trial of a number.

    Args:
        make: (count) -> a pipeline of this rank's stage in so many micro-batches, over layers
            without gradients.
        rows: Of a replica's batch.
        first: The number of its first sample, so that no two replicas keep the same ones; of so
            many samples.
        numbered: The pipeline's first layer takes the samples' numbers.
    """

    def __init__(
        self,
        make: Callable[[int], Pipeline],
        rows_of: RowsOf,
        *,
        rows: int,
        first: int,
        samples: int,
        numbered: bool,
    ) -> None:
        self._make, self._rows_of, self._rows, self._numbered = make, rows_of, rows, numbered
        self._numbers = (first + torch.arange(min(rows, samples), device="cpu")) % samples
        self._pipelines: dict[int, Pipeline] = {}

    def __call__(self, count: int) -> float:
        if count not in self._pipelines:
            self._pipelines[count] = self._make(count)
            self._run(count)  # makes buffers, and warms up
        return self._run(count)

    def _run(self, count: int) -> float:
        """Seconds. What rows_of raises on one rank is raised on all of the pipeline."""
        pipeline = self._pipelines[count]
        portion = padded_batch(
            self._numbers,
            most=self._rows,
            micro_batches=count,
            first_row=0,
            batch=self._rows,
            epoch=0,
            step=0,
        )
        error: Exception | None = None
        try:
            inputs, target, given = self._rows_of(portion)
        except Exception as caught:
            error = caught
        agree_in_group(error, group=pipeline.group)
        named = {**given, "samples": portion.samples} if self._numbered else dict(given)
        begin = time.perf_counter()
        pipeline.step(inputs, target, **named)
        seconds = time.perf_counter() - begin
        for parameter in pipeline.parameters():
            parameter.grad = None
        return seconds

    def close(self) -> None:
        """Let go of the pipelines."""
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()
