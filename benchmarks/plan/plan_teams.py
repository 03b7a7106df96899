"""Layouts of one GPT on the ranks of a `rank_teams.Team`: steps and memory as `pyops train` takes
them, and the machine itself as `pyops plan --measured` measures it.

    python -m benchmarks.plan.plan_teams plan SIZE        a rank; SIZE of `SIZES`
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.instruments.rank_teams import serve
from benchmarks.instruments.storages import storages
from benchmarks.parallel.pipeline.bench_pipeline_memory import allocated
from pyops.config import config_of
from pyops.models import GPTConfig
from pyops.plan import Layout, Machine, MeasuredCosts, ModelShape, measure_blocks
from pyops.plan.settings import sections
from pyops.train.setup.trial import Trial

__all__ = ["DEGREES", "LAYOUTS", "PRECISION", "SIZES", "Ranks", "Size", "join", "shape_of"]

PRECISION = "fp32"
DEGREES = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # of tp, by ranks


@dataclass(frozen=True)
class Size:
    """A GPT and the rows of a step."""

    model: GPTConfig
    batch: int
    ranks: tuple[int, ...] = field(default=(1, 2, 4))
    """With how many ranks it is run."""


SIZES = {
    "reference": Size(
        GPTConfig(vocab_size=1024, sequence_length=256, num_layers=8, num_heads=8, dim=256), batch=8
    ),
    "small": Size(
        GPTConfig(vocab_size=512, sequence_length=128, num_layers=4, num_heads=4, dim=128), batch=8
    ),
    "tiny": Size(
        GPTConfig(vocab_size=256, sequence_length=16, num_layers=2, num_heads=2, dim=16),
        batch=4,
        ranks=(1,),
    ),
}

# By ranks; rows of a step are those of the size.
LAYOUTS: dict[int, tuple[Layout, ...]] = {
    1: (
        Layout(micro_batch=8),
        Layout(micro_batch=2, num_microbatches=4),
        Layout(micro_batch=1, num_microbatches=8),
        Layout(micro_batch=4, num_microbatches=2, recompute="block"),
    ),
    2: (
        Layout(dp=2, micro_batch=4),
        Layout(dp=2, zero=1, micro_batch=4),
        Layout(dp=2, zero=2, micro_batch=1, num_microbatches=4),
        Layout(dp=2, zero=3, micro_batch=4),
        Layout(dp=2, zero=3, micro_batch=4, recompute="block"),
        Layout(tp=2, micro_batch=8),
        Layout(tp=2, micro_batch=2, num_microbatches=4, sequence_parallel=True),
        Layout(pp=2, schedule="1f1b", micro_batch=2, num_microbatches=4),
        Layout(pp=2, schedule="zb1p", micro_batch=1, num_microbatches=8),
        Layout(pp=2, schedule="interleaved", stages_per_rank=2, micro_batch=2, num_microbatches=4),
    ),
    4: (
        Layout(dp=4, micro_batch=2),
        Layout(dp=4, zero=3, micro_batch=2),
        Layout(tp=2, dp=2, zero=1, micro_batch=4),
        Layout(pp=2, dp=2, schedule="1f1b", micro_batch=1, num_microbatches=4),
        Layout(tp=2, pp=2, schedule="1f1b", micro_batch=2, num_microbatches=4),
        Layout(pp=4, schedule="1f1b", micro_batch=1, num_microbatches=8),
    ),
}


def shape_of(size: Size) -> ModelShape:
    """The model as numbers."""
    return ModelShape.of_gpt(size.model)


class Ranks:
    """A rank's trials, made when they are first asked for.

    Args:
        layouts: That are tried, by the number of ranks.
        make: Of a layout makes a trial, with `step()` and `batch_bytes`.
        costs: Measures what the model's parts take, with so many ranks: a dataclass.
    """

    def __init__(
        self,
        layouts: Mapping[int, Sequence[Layout]],
        *,
        make: Callable[[Layout], Any],
        costs: Callable[[int], Any],
    ) -> None:
        self.number = dist.get_world_size() if dist.is_initialized() else 1
        self.layouts, self.make, self.costs = layouts[self.number], make, costs
        self.trials: list[Any] = []

    def prepare(self) -> list[float]:
        """Make all trials; the bytes of each: what stays between steps, and the most that a step
        takes beside."""
        found = []
        for layout in self.layouts:
            gc.collect()
            before = sum(storages().values())
            trial = self.make(layout)
            for _ in range(2):
                trial.step()
            stays = sum(storages().values()) - before - trial.batch_bytes
            found.append(float(stays + allocated(trial.step)))
            self.trials.append(trial)
        return found

    def round(self) -> list[list[float]]:
        """Seconds of a step of each trial, in turn: on the wall, and of the processor."""
        found = []
        for trial in self.trials:
            if dist.is_initialized():
                dist.barrier()
            start = time.process_time()
            wall = trial.step()
            found.append([wall, time.process_time() - start])
        return found

    def machine(self) -> dict[str, Any]:
        """This machine with so many ranks."""
        costs = self.costs(self.number)
        return {"machine": asdict(Machine.here()), "costs": asdict(costs)}

    def functions(self) -> dict[str, Callable[[], Any]]:
        """What a `Team` calls."""
        return {"prepare": self.prepare, "round": self.round, "machine": self.machine}


def join() -> None:
    """One thread, and the other ranks where there are some."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")


def make(size: Size) -> dict[str, Callable[[], Any]]:
    """The functions of one rank."""
    join()

    def trial(layout: Layout) -> Trial:
        tables = sections(layout, precision=PRECISION)
        tables["model"] = asdict(size.model)
        return Trial(config_of(tables))

    def costs(number: int) -> MeasuredCosts:
        return measure_blocks(shape_of(size), precision=PRECISION, tp=DEGREES[number])

    return Ranks(LAYOUTS, make=trial, costs=costs).functions()


if __name__ == "__main__":
    serve(lambda: make(SIZES[sys.argv[2]]))
