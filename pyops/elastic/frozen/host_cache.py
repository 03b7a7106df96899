"""HostCache: one cache of a host for all layouts of a run, and whether the frozen layers of this
one
are read from it.

first freeze    first stages compute one example -> its shape goes to all ranks -> the cache, which
                the ranks of a host share
every freeze    first stages measure computing, keeping and reading -> all ranks decide alike; what
                pays once does so later on, since computing more takes longer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import agree, gather
from pyops.comm.collectives.communicator import release
from pyops.comm.collectives.shared_memory import host
from pyops.elastic.frozen.activation_cache import ActivationCache, open_cache
from pyops.elastic.frozen.cache_timing import MODES, measure, reading_pays
from pyops.elastic.frozen.frozen_layers import FrozenLayers
from pyops.elastic.layout.process_groups import make_group

__all__ = ["CacheOptions", "Example", "HostCache"]

Example = Callable[
    [Tensor], tuple[Any, Mapping[str, Any]]
]  # samples [n] -> inputs of the first layer, named arguments
MEASURED = 16  # samples


@dataclass(frozen=True)
class CacheOptions:
    """Whether and where the frozen layers' output is kept.

    Attributes:
        mode: "auto" where that is measured to pay, "on", or "off".
        example: Samples [n] -> (inputs, named arguments) of these rows, as in a step: what is
            measured.
        budget: Bytes of memory on each host; None: half of what is free.
        stored: A dtype to round to.
        disk: A folder for what is beyond the budget, up to disk_budget bytes.

    Raises:
        ValueError: For another mode, and for "auto" or "on" without an example.
    """

    mode: str = "off"
    example: Example | None = None
    budget: int | None = None
    stored: torch.dtype | None = None
    disk: str | None = None
    disk_budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"cache mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if self.mode != "off" and self.example is None:
            raise ValueError(
                f"cache mode is {self.mode!r}, which needs an example: a function of "
                "samples that gives their rows"
            )


class HostCache:
    """options: the same on all ranks. samples: to train on; held-out ones are numbered behind them.
    control_group: a group
    of all ranks; None: one process alone."""

    def __init__(
        self,
        options: CacheOptions,
        *,
        samples: int,
        held_out: int,
        control_group: dist.ProcessGroup | None,
    ) -> None:
        self.options, self._samples, self._held_out, self._control_group = (
            options,
            samples,
            held_out,
            control_group,
        )
        self.cache: ActivationCache | None = None
        self._host: dist.ProcessGroup | None = None
        self._wanted, self._pays = options.mode != "off", options.mode == "on"

    def attach(self, prefix: FrozenLayers | None, *, replica: int) -> bool:
        """Let these frozen layers be read and kept, if that pays; the same answer on all ranks,
        which all call it.

        Args:
            prefix: Of this rank, None where it has none.
            replica: This rank's, so that no two measure with the same samples.
        """
        if not self._wanted:
            return False
        inputs, named, numbers, shape = None, {}, None, None
        error: Exception | None = None
        try:
            if (
                prefix is not None
                and self.options.example is not None
                and not (self._pays and self.cache is not None)
            ):
                count = min(MEASURED, self._samples)
                spread = torch.linspace(0, self._samples - 1, count, device="cpu").long()
                numbers = (spread + replica) % self._samples
                inputs, given = self.options.example(numbers)
                named = dict(given)
                if self.cache is None:
                    one = prefix(*(inputs if isinstance(inputs, tuple) else (inputs,)), **named)
                    shape = (tuple(one.shape[1:]), one.dtype)
        except Exception as caught:
            error = caught
        agree(error, group=self._control_group)
        if self.cache is None:
            self._open(
                next(each for each in gather(shape, group=self._control_group) if each is not None)
            )
        if not self.is_open():
            return False
        if (
            prefix is not None and self.cache is not None and self.cache.room
        ):  # none: it was lost in this process
            prefix.cache = self.cache
        if self._pays:
            return True
        times = None
        try:
            if prefix is not None and prefix.cache is not None:
                assert numbers is not None
                times = measure(
                    prefix,
                    *(inputs if isinstance(inputs, tuple) else (inputs,)),
                    samples=numbers,
                    **named,
                )
        except Exception as caught:
            error = caught
        agree(error, group=self._control_group)
        self._pays = reading_pays(times, mode=self.options.mode, group=self._control_group)
        if prefix is not None and not self._pays:
            prefix.cache = None
        return self._pays

    def is_open(self) -> bool:
        """Whether every rank has the cache; when one has not, none uses it from then on."""
        everywhere = all(gather(self.cache is not None, group=self._control_group))
        self._wanted = self._wanted and everywhere
        return everywhere

    def _open(self, shape: tuple[tuple[int, ...], torch.dtype]) -> None:
        if self._control_group is not None and self._host is None:
            hosts = gather(host(), group=self._control_group)
            for name in dict.fromkeys(hosts):  # all ranks make all groups, in one order
                made = make_group(
                    [rank for rank, each in enumerate(hosts) if each == name], backend="gloo"
                )
                self._host = made if name == host() else self._host
        self.cache = open_cache(
            self._samples + self._held_out,
            shape=shape[0],
            dtype=shape[1],
            stored=self.options.stored,
            budget=self.options.budget,
            disk=self.options.disk,
            disk_budget=self.options.disk_budget,
            group=self._host,
        )

    def clear(self) -> None:
        """Nothing that is kept is of the layers as they are from now on: they were given other
        values."""
        self._pays = self.options.mode == "on"
        if self.cache is not None:
            self.cache.clear()

    def close(self) -> None:
        """Let go of the memory and the group."""
        if self.cache is not None:
            self.cache.close()
        if self._host is not None:
            release(self._host)
            dist.destroy_process_group(self._host)
        self.cache = self._host = self._control_group = None
