"""What the flight record of collectives costs a step of a GPT over 2 ranks of one host, one thread
each: the step noted and not, in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from pyops.config import config_of
from pyops.flight_record import FlightRecord, entered, recording
from pyops.observe import read_records
from pyops.train.setup.trial import Trial

__all__ = ["run"]

SIZE = 2
# name -> ([model], [zero] stage); batch of 4 rows
STEPS = {
    "GPT 0.8 M": ({"sequence_length": 128, "num_layers": 4, "num_heads": 4, "dim": 128}, 0),
    "GPT 0.8 M, ZeRO 3": ({"sequence_length": 128, "num_layers": 4, "num_heads": 4, "dim": 128}, 3),
}


def _unnoted(step: Callable[[], object]) -> None:
    with entered():
        step()


def _calls(record: FlightRecord) -> int:
    """How many there were, of which the record keeps the last."""
    entries = read_records(record.folder)[dist.get_rank()].entries
    return max((entry.index for entry in entries), default=0)


def _check(record: FlightRecord, step: Callable[[], object]) -> None:
    """That the step is noted, and is not where it should not be."""
    _unnoted(step)
    before = _calls(record)
    step()
    if _calls(record) == before:
        raise AssertionError("a step of two ranks left no entry in the flight record")


def _case(name: str, *, device: torch.device, record: FlightRecord) -> Case:
    model, stage = STEPS[name]
    tables = {"model": model, "train": {"batch": 4}, "zero": {"stage": stage}}
    step = Trial(config_of(tables), device=device).step
    step()
    return Case(
        bench="flight_record",
        name=f"step of {name}, {SIZE} ranks, collectives noted",
        implementations={"noted": step, "not noted": partial(_unnoted, step)},
        check=partial(_check, record, step),
        device=device,
        targets={"not noted": 0.99},
        facts={"ranks": SIZE, "threads": torch.get_num_threads()},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    with tempfile.TemporaryDirectory() as folder, recording(folder) as record:
        for name in STEPS:
            if options.only is None or options.only in name:
                yield partial(_case, name, device=device, record=record)


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return measure_on_ranks(_cases, size=SIZE, options=options)
