"""Synchronous data parallelism, Downpour SGD and DiLoCo on one problem in virtual time: four
workers on the digits of `distbelief_digits`, of which one is slow, or whose links are.

    "four alike"        a step of 16 images takes each worker 10 ms; links as fast as memory
    "one 5x slower"     the fourth worker's takes 50 ms
    "100 Mbit/s"        203 KB of parameters take 16 ms each way

Synchronous training is `LocalSGD` that meets at every step, which is synchronous SGD to rounding.
Each worker has a link of its own; a shard's link is not counted, as if each machine held a part of
the shards. Rates are good ones of a few in the first situation; DiLoCo's outer momentum of 0.9 is
too much for the 16 meetings of such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.asynchronous.distbelief_digits import IMAGES, digits, digits_network
from pyops.comm import Int8
from pyops.flat import FlatBuffer
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import Link, VirtualReplica, run_replicas
from pyops.optim import SGD, Adagrad, AdamW
from pyops.parameter_server import DownpourConfig, ShardConfig, VirtualTime, VirtualWorker

__all__ = ["SITUATIONS", "WAYS", "WORKERS", "Course", "Situation"]

WORKERS, STEP = 4, 0.010  # seconds of a step
LOOKS = 40  # at the loss


@dataclass(frozen=True)
class Situation:
    """What the workers have to work with.

    Attributes:
        seconds: Of a step, for each worker.
        link: Of each worker.
        lasts: Virtual seconds of a run.
    """

    seconds: tuple[float, ...]
    link: Link
    lasts: float

    @property
    def steps_per_second(self) -> float:
        """Of all workers, if none ever waited."""
        return sum(1 / each for each in self.seconds)


ALIKE = (STEP,) * WORKERS
NEAR = Link(bytes_per_second=10e9, latency=50e-6)
SITUATIONS = {
    "four alike": Situation(ALIKE, NEAR, 4.0),
    "one 5x slower": Situation((STEP,) * (WORKERS - 1) + (5 * STEP,), NEAR, 4.0),
    "100 Mbit/s": Situation(ALIKE, Link(bytes_per_second=12.5e6, latency=0.5e-3), 4.0),
}


@dataclass(frozen=True)
class Course:
    """What became of a run.

    Attributes:
        curve: (virtual seconds, loss of the held-out images) from look to look.
        steps: Of all workers together, that reached the parameters.
    """

    curve: tuple[tuple[float, float], ...]
    steps: int

    def seconds_to(self, loss: float) -> float | None:
        """Virtual seconds until the loss is below for the first time; None: it never is."""
        return next((at for at, found in self.curve if found <= loss), None)


def _loss(model: nn.Module, worker: int, step: int) -> Tensor:
    """Of a minibatch, another one for each worker and step."""
    images, labels, *_ = digits()
    part = torch.arange(worker, len(labels), WORKERS)
    key = torch.Generator().manual_seed(10_000 * worker + step)
    rows = part[torch.randint(len(part), (IMAGES,), generator=key)]
    return functional.cross_entropy(model(images[rows]), labels[rows])


class _Looks:
    """The held-out loss of parameters, at about every fortieth of a run."""

    def __init__(self, lasts: float) -> None:
        self.model = digits_network(0)
        self.buffer = FlatBuffer(self.model.named_parameters())
        self.every, self.curve = lasts / LOOKS, [(0.0, self._held_out())]

    @torch.no_grad()
    def _held_out(self) -> float:
        _, _, images, labels = digits()
        return float(functional.cross_entropy(self.model(images), labels))

    def look(self, now: float, take: Callable[[], object]) -> None:
        """Take the loss, where it is time, of what `take` puts into the model."""
        if now >= self.curve[-1][0] + self.every:
            take()
            self.curve.append((round(now, 4), self._held_out()))


def _replicas(
    situation: Situation, config: LocalSGDConfig, inner: Callable[[Any], torch.optim.Optimizer]
) -> Course:
    looks = _Looks(situation.lasts)

    def replica(me: VirtualReplica) -> int:
        model = digits_network(0)
        optimizer = inner(model.parameters())
        outer = LocalSGD(model, optimizer, config, group=me.exchange)
        step = 0
        # All leave at the same step: clocks are equal after each meeting.
        while step % config.every or me.clock < situation.lasts:
            _loss(model, me.number, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            me.compute(situation.seconds[me.number])
            outer.step()
            step += 1
            if me.number == 0 and step % config.every == 0:
                looks.look(me.clock, lambda: looks.model.load_state_dict(model.state_dict()))
        return step

    steps = run_replicas(WORKERS, replica, link=situation.link)
    return Course(tuple(looks.curve), sum(each or 0 for each in steps))


def synchronous(situation: Situation) -> Course:
    """A sum over all workers at every step."""
    config = LocalSGDConfig(method="local_sgd", every=1)
    return _replicas(situation, config, lambda parameters: SGD(parameters, lr=0.5))


def diloco(situation: Situation) -> Course:
    """A meeting every 25 steps; AdamW between them."""
    config = LocalSGDConfig(method="diloco", every=25, outer_lr=0.7, outer_momentum=0.6)
    return _replicas(situation, config, lambda parameters: AdamW(parameters, lr=3e-3))


def downpour(situation: Situation, **options: Any) -> Course:
    """Adagrad at the shard, which takes what arrives."""
    looks, link = _Looks(situation.lasts), situation.link
    workers = [
        VirtualWorker(each, latency=link.latency, bandwidth=link.bytes_per_second)
        for each in situation.seconds
    ]
    virtual = VirtualTime(
        lambda: digits_network(0),
        lambda model, worker, step: _loss(model, worker, step).backward(),
        lambda flat: Adagrad([flat], lr=0.01),
        workers,
        config=DownpourConfig(**options),
        shard_config=ShardConfig(warm_start=20),
    )
    while virtual.clock.now < situation.lasts:
        virtual.run(virtual.clock.now + STEP)
        looks.look(virtual.clock.now, lambda: looks.buffer.data.copy_(virtual.parameters()))
    return Course(tuple(looks.curve), virtual.shards[0].counts.applied)


WAYS: Mapping[str, Callable[[Situation], Course]] = {
    "synchronous": synchronous,
    "Downpour": downpour,
    "Downpour, int8": lambda given: downpour(given, push_codec=Int8(), fetch_codec=Int8()),
    "DiLoCo, every 25": diloco,
}
