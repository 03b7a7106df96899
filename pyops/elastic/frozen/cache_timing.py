"""When reading what frozen layers say pays: the seconds of computing, keeping and reading a sample,
one rule on all ranks.

    rank 0   compute 900 us   put 20 us   get 10 us  --.                               .-- read
    rank 1   (its stage has no frozen layers)        --+-- add up: 1700 > 45 + 25 ?    --+-- read
    rank 2   compute 800 us   put 25 us   get 15 us  --'                               '-- read

The rule: compute > put + get. An entry that is put in one epoch saves all of compute in the next,
in which it is read; that is all that is sure, since by then more may be frozen. If so, what is read
is gone on from and put again, at the new depth: of that epoch, too, reading saves the layers that
were frozen before, and the new ones are computed either way. Where nothing is frozen meanwhile, an
entry is read more often, and each time saves more than this. compute grows with the depth and the
others do not, so what pays goes on to pay; of the last epoch alone, whose entries nobody reads, the
put is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import agree, gather
from pyops.elastic.frozen.frozen_layers import FrozenLayers
from pyops.elastic.layout.padded_batch import PADDING
from pyops.mesh import check_initialized

__all__ = ["CacheTimes", "measure", "reading_pays"]

MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class CacheTimes:
    """Seconds for a sample: of all frozen layers, of keeping their output, and of reading it.

    Attributes:
        compute: Seconds for the forward of all frozen layers.
        put: Seconds for keeping their output.
        get: Seconds for reading it.
    """

    compute: float
    put: float
    get: float

    @property
    def saved(self) -> float:
        """Seconds that a sample's entry saves if it is read once."""
        return self.compute - self.put - self.get


def measure(
    prefix: FrozenLayers, *inputs: Any, samples: Tensor, rounds: int = 3, **named: Any
) -> CacheTimes | None:
    """The shortest of `rounds`, of a batch like those of training: inputs, samples and named
    arguments as in a forward.

    Args:
        samples: The true numbers of these rows, as their values are put; spread over all samples,
            so that each tier has its part. Those that the budget leaves out count for nothing. None
            where the prefix has no cache, or loses it now, and where nothing of these was kept.
    """
    values = prefix(*inputs, samples=samples, **named)  # and the check of its chunks
    cache, real = prefix.cache, samples.to("cpu", torch.int64) != PADDING
    mine, kept = samples.to("cpu", torch.int64)[real], 0
    if cache is None or not bool(real.any()):
        return None
    values = values[real.to(values.device)]

    def put() -> None:
        nonlocal kept
        kept = cache.put(mine, values, depth=prefix.depth, seed=prefix.key)

    def get() -> None:
        cache.get(mine, depth=prefix.depth, seed=prefix.key)[0].to(values.device)

    try:
        compute, write, read = (
            _shortest(each, rounds, values.device)
            for each in (lambda: prefix(*inputs, **named), put, get)
        )
    except (OSError, MemoryError) as error:
        prefix.detach_cache(error)
        return None
    return CacheTimes(compute / len(samples), write / kept, read / kept) if kept else None


def reading_pays(
    times: CacheTimes | None, *, mode: str = "auto", group: dist.ProcessGroup | None = None
) -> bool:
    """Whether to read, the same on all ranks of the group. All call it; None: of one that has
    nothing to read.

    Args:
        mode: "on" and "off" decide by themselves; "auto": if compute > put + get, added up over the
            ranks.

    Raises:
        ValueError: On every rank, for another mode.
    """
    check_initialized("reading_pays", group)
    error = (
        None
        if mode in MODES
        else ValueError(f"cache is {mode!r}; choose one of {', '.join(MODES)}")
    )
    if group is not None:
        agree(error, group=group)
    if error is not None:
        raise error
    if mode != "auto":
        return mode == "on"
    mine = 0.0 if times is None else times.saved
    every = [mine] if group is None else gather(mine, group=group)
    return math.fsum(every) > 0


def _shortest(call: Callable[[], Any], rounds: int, device: torch.device) -> float:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found)
