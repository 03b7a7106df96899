"""Options of `pack`, beside the layers' costs and what changes from one layout to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["RENAMED", "Machine", "PackingConfig"]

POLICIES = ("global", "replica")
MEASURES = ("parameters", "memory")


@dataclass(frozen=True)
class Machine:
    """What a step costs besides the layers."""

    devices: int
    """Devices of all replicas together."""

    overhead: float = 0.0
    """Seconds that a micro-batch costs a stage in forward, and again in backward, however small it
    is."""

    latency: float = 0.0
    """Seconds until a tensor begins to arrive at the next stage."""

    bandwidth: float = math.inf
    """Bytes a second from a stage to the next."""

    reduce_bandwidth: float = math.inf
    """Bytes a second of a ring over the replicas, for gradients."""


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How layers are packed on stages."""

    machine: Machine | None = None
    """None: as many devices as stages, and nothing costs but the layers."""

    by: str = "parameters"
    """"parameters": a stage holds its parameters (of costs that are numbers: these), and layers are
    cut so that the fullest stage holds the least, as in the paper. "memory", of a Profile: weights,
    gradients, Adam's moments, and activations of the micro-batches that the schedule keeps; layers
    are cut so that the slowest stage is the fastest of those that fit."""

    lambda_frozen: float | None = 1 / 6
    """What a frozen layer holds, in parts of what it holds when active. None, of a Profile: with
    by="memory" each layer's weights, no gradients, no activations; with by="parameters"
    `frozen_share(costs)`. Its time is that of its forward, whatever lambda_frozen is."""

    ceiling: float | None = None
    """The most a stage may hold. None: what the fullest stage holds at the start; or, where no
    number of stages fits that, as frozen layers are not cut, the least that the fullest then
    holds."""

    profiled: float = 1.0
    """Samples of the micro-batch that the costs are of."""

    batch_policy: str = "global"
    """"global": the batch of all replicas together stays; "replica": that of each stays, and the
    whole grows."""

    schedule: str = "1f1b"
    """A schedule of pyops.pipeline."""

    together: Sequence[tuple[int, int]] = ()
    """As for `pyops.pipeline.balance`."""

    same_stage: Sequence[Sequence[int]] = ()
    """As for `pyops.pipeline.balance`."""

    replicate: bool = True
    """False: devices that are set free are no new replicas."""

    head: int = 1
    """How many of the last layers are never frozen."""

    def check(self, *, stages: int, numbers: bool) -> Machine:
        """The machine.

        Args:
            stages: at the start.
            numbers: whether the costs are numbers, not a Profile.

        Raises:
            ValueError: for options that make no sense, or do not fit the costs.
        """
        machine = self.machine or Machine(devices=stages)
        for name, known in (("by", MEASURES), ("batch_policy", POLICIES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}"
                )
        if self.by == "memory" and numbers:
            raise ValueError(
                "by is 'memory', which needs to know what layers keep; give a Profile: "
                "profile(layers, inputs)"
            )
        if self.lambda_frozen is None and numbers:
            raise ValueError(
                "lambda_frozen is None, which is what a profile measured, but the costs are "
                "numbers; give one, such as 1 / 6"
            )
        if self.lambda_frozen is not None and not 0 <= self.lambda_frozen <= 1:
            raise ValueError(
                f"lambda_frozen is {self.lambda_frozen!r}; expected a number in [0, 1]"
            )
        if (
            not self.profiled > 0
            or not min(machine.overhead, machine.latency) >= 0
            or not machine.reduce_bandwidth > 0
        ):
            raise ValueError(
                f"profiled is {self.profiled!r}, and the machine {machine}; seconds must be 0 or "
                "more, the others more than 0"
            )
        return machine


RENAMED = {
    **{each.name: f"config=PackingConfig({each.name}=...)" for each in fields(PackingConfig)},
    "fewest": "min_stages",
}
"""Keywords that `pack` had, and what to write instead."""
