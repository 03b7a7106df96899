"""`pyops plan MODEL --measured`: this machine, the model's blocks on it, and the three best layouts
tried for some steps on the ranks that run.

    pyops plan gpt.toml --measured                   one process
    pyops plan gpt.toml --measured --devices 2       two: this command starts them by torchrun
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyops.plan import MeasuredCosts, ModelShape, Plan

__all__ = ["TRIED", "blocks_measured", "launched", "num_ranks", "ranks_joined", "tried"]

TRIED = 3  # layouts
WARMUP, STEPS = 2, 5


def num_ranks() -> int:
    """That torchrun has started, or that have joined; 1 without."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched(devices: int, arguments: Sequence[str]) -> int:
    """Start the command again as so many processes of one thread each, and wait for them.

    Args:
        devices: How many.
        arguments: Of the command.

    Returns:
        Its exit code.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    command = [sys.executable, *torchrun, "-m", "pyops", *arguments]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


@contextmanager
def ranks_joined() -> Iterator[None]:
    """A process group of the ranks that run, while it lasts; nothing for one process."""
    import torch.distributed as dist

    if num_ranks() == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def blocks_measured(shape: ModelShape, precision: str) -> MeasuredCosts:
    """The model's blocks, as each number of ranks of tp cuts them. A collective.

    Args:
        shape: Of the model.
        precision: "fp32", "bf16" or "fp16".
    """
    from pyops.plan import measure_blocks

    ranks = num_ranks()
    degrees = [t for t in range(1, ranks + 1) if ranks % t == 0 and shape.num_heads % t == 0]
    return measure_blocks(shape, precision=precision, tp=degrees)


def tried(found: Plan, model: Mapping[str, Any]) -> Plan:
    """The plan with its three best layouts tried, the fastest in front. A collective.

    Args:
        found: A plan for the ranks that run.
        model: The section [model] of a GPT.
    """
    from pyops.comm.agreement import gather
    from pyops.config import config_of
    from pyops.plan.settings import sections
    from pyops.train.setup.trial import Trial

    seconds = []
    for each in (found.best, *found.runners_up)[:TRIED]:
        tables = sections(each.layout, precision=found.options.precision)
        trial = Trial(config_of({**tables, "model": dict(model)}))
        for _ in range(WARMUP):
            trial.step()
        own = statistics.median(trial.step() for _ in range(STEPS))
        seconds.append(max(gather(own)) if num_ranks() > 1 else own)
    return found.tried(seconds)
