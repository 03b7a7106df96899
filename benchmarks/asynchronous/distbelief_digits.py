"""Downpour SGD and Sandblaster L-BFGS on scikit-learn's digits, in virtual time: a small network
that many replicas train at once, as those of DistBelief do.

    64 pixels -> 256 -> 128 -> 10        1,800 pushes of 16 images; each takes its replica a second

(Dean et al., Large scale distributed deep networks, NeurIPS 2012, sections 4 and 5.)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.data import load_digits
from pyops.flat import FlatBuffer
from pyops.optim import SGD, Adagrad
from pyops.parameter_server import DownpourConfig, ShardConfig, VirtualTime, VirtualWorker
from pyops.sandblaster import (
    Coordinator,
    LocalShards,
    SandblasterConfig,
    VectorShard,
    VirtualBatch,
    VirtualMember,
    Worker,
)

__all__ = ["IMAGES", "Downpour", "Found", "Sandblaster", "digits", "digits_network"]

IMAGES, PUSHES, EVERY = 16, 1800, 100  # of a push; of a run; from look to look at the accuracy
SPREAD = 0.5  # a step takes 1 s, and up to this part of it more or less
RULES: dict[str, Any] = {"SGD": SGD, "Adagrad": Adagrad}


@dataclass(frozen=True)
class Found:
    """What became of a run.

    Attributes:
        curve: (virtual seconds, share of the held-out images that are read) from look to look.
        staleness: Mean of all pushes.
        warm: Pushes that were applied before any replica but the first had fetched.
        evaluations: Of the whole batch for each iteration; 0 for Downpour SGD.
    """

    curve: tuple[tuple[float, float], ...]
    staleness: float = 0.0
    warm: int = 0
    evaluations: float = 0.0

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.curve[-1][1]

    def seconds_to(self, accuracy: float) -> float | None:
        """Virtual seconds until the accuracy is reached for the first time; None: it never is."""
        return next((at for at, reached in self.curve if reached >= accuracy), None)


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels from 0 to 1 [n, 64] and labels to train on, and those held out, a fifth."""
    train, held_out = load_digits(held_out=0.2)
    found = []
    for each in (train, held_out):
        found += [(each.images.flatten(1) + 1) / 2, each.labels]
    return found[0], found[1], found[2], found[3]


def digits_network(seed: int) -> nn.Module:
    """He et al.'s normal numbers for ReLU, and biases of 0."""
    key = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((64, 256), (256, 128), (128, 10)):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(outputs, inputs, generator=key) * (2 / inputs) ** 0.5)
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def _accuracy(network: nn.Module, buffer: FlatBuffer, values: Tensor) -> float:
    _, _, images, labels = digits()
    buffer.data.copy_(values)
    return float((network(images).argmax(1) == labels).double().mean())


@dataclass(frozen=True)
class Downpour:
    """A run of Downpour SGD.

    Attributes:
        rule: Of the shard: "SGD" or "Adagrad".
        rate: Its learning rate.
        replicas: How many there are, each with its own part of the images.
        warm_start: Pushes of the first replica alone.
        pushes: After which the run ends.
        seed: Of first parameters, of what each replica draws, and of the seconds that it takes.
    """

    rule: str
    rate: float
    replicas: int
    warm_start: int = 0
    pushes: int = PUSHES
    seed: int = 0

    def run(self) -> Found:
        """Train until the shard has applied all pushes."""
        virtual = self._virtual()
        shard, network = virtual.shards[0], digits_network(self.seed)
        buffer = FlatBuffer(network.named_parameters())
        curve, applied, looked = [], 0, 0
        while applied < self.pushes:
            virtual.run(virtual.clock.now + 1 / self.replicas)
            applied = shard.counts.applied
            if applied >= min(looked + EVERY, self.pushes):
                looked = applied
                reached = _accuracy(network, buffer, virtual.parameters())
                curve.append((round(virtual.clock.now, 3), reached))
        others = [at for at, (kind, worker, _) in enumerate(shard.log) if worker]
        first = shard.log[: others[0]] if others else shard.log
        return Found(
            curve=tuple(curve),
            staleness=sum(k * n for k, n in shard.staleness.items()) / applied,
            warm=sum(kind == "push" for kind, *_ in first),
        )

    def _virtual(self) -> VirtualTime:
        images, labels, *_ = digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        parts = order.tensor_split(self.replicas)

        def gradient(network: nn.Module, worker: int, step: int) -> None:
            key = torch.Generator().manual_seed(1_000_000 * self.seed + 10_000 * worker + step)
            own = parts[worker]
            rows = own[torch.randint(len(own), (IMAGES,), generator=key)]
            functional.cross_entropy(network(images[rows]), labels[rows]).backward()

        rule = RULES[self.rule]
        return VirtualTime(
            lambda: digits_network(self.seed),
            gradient,
            lambda flat: rule([flat], lr=self.rate),
            [VirtualWorker(_seconds(self.seed, worker)) for worker in range(self.replicas)],
            config=DownpourConfig(fetch_delay=0),
            shard_config=ShardConfig(warm_start=self.warm_start, record=True),
        )


def _seconds(seed: int, worker: int) -> Callable[[int], float]:
    """A step takes another time each time, the same in every run of a seed."""
    drawn = random.Random(1000 * seed + worker)
    times = [1 + SPREAD * (2 * drawn.random() - 1) for _ in range(257)]
    return lambda step: times[step % 257]


@dataclass(frozen=True)
class Sandblaster:
    """A run of Sandblaster L-BFGS over the whole batch, in portions of as many images as a push of
    Downpour SGD has, and as long.

    Attributes:
        replicas: Workers.
        iterations: After which the run ends.
        slow: How many times slower the last worker is than the others.
        seed: Of first parameters.
    """

    replicas: int
    iterations: int = 40
    slow: float = 1.0
    seed: int = 0

    def run(self) -> Found:
        """Take the iterations."""
        images, labels, *_ = digits()
        config = SandblasterConfig(portions=len(labels) // IMAGES)
        rows = torch.arange(len(labels)).tensor_split(config.portions)

        def loss(network: nn.Module, portion: int) -> Tensor:
            here = rows[portion]
            total = functional.cross_entropy(network(images[here]), labels[here], reduction="sum")
            return total / len(labels)

        network = digits_network(self.seed)
        worker = Worker(network, loss)
        shards = LocalShards(
            [
                VectorShard(part, history_size=config.history_size, leaves=config.portions)
                for part in worker.parts(1)
            ]
        )
        crew = [VirtualMember()] * self.replicas
        crew[-1] = replace(crew[-1], seconds=self.slow)
        batch = VirtualBatch(shards, worker.compute, crew, config)
        leads = Coordinator(shards, batch, config)
        curve = []
        for _ in range(self.iterations):
            report = leads.run(1)
            reached = _accuracy(network, worker.buffer, shards.shards[0].point)
            curve.append((round(batch.now, 3), reached))
        # The first point is looked at twice, which is no iteration's.
        return Found(tuple(curve), evaluations=(report.evaluations - 2) / report.iterations)
