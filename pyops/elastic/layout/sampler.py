"""Sampler: every sample once an epoch, whatever the number of replicas, and when it changes in the
middle of one.

    epoch      7 2 9 0 | 4 1 8 3 | 6 5     global batch 4 of 10 samples; the last batch is what is
                                           left
    2 replicas 7 2|9 0 | 4 1|8 3 |         resize(replicas=3)
    3 replicas                   | 6|5|-   a replica may have nothing, but takes part in the step

The order is a function of (seed, epoch) and the cursor is how many samples are behind it, so both
are the same on every replica and know nothing of the replicas. Nothing is left out and nothing
comes twice to make numbers even: shares differ by a sample at most, and `ReplicaBatch.weight` is
what
makes the sum of the replicas' gradients that of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops import random

__all__ = ["ReplicaBatch", "Sampler"]

POLICIES = ("global", "replica")
RULES: dict[str, Callable[[float], float]] = {
    "constant": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's part of a batch.

    Attributes:
        samples: int64 [n], which may be empty.
        batch: Samples of all replicas together. weight: n / batch, the weight of the mean loss of
            this part in that of the batch.
        epoch: To which the batch belongs.
    """

    samples: Tensor
    batch: int
    epoch: int

    @property
    def weight(self) -> float:
        """The part of the global batch that these samples are."""
        return len(self.samples) / self.batch


class Sampler:
    """The samples of one of `replicas` replicas, batch by batch, without end.

    Args:
        samples: How many there are, numbered from 0.
        batch: With batch_policy="global" of all replicas together, which a change of their number
            leaves as it is, and with it the losses; with "replica" of each, so that the global
            batch changes.
        lr_rule: With batch_policy="replica", how the learning rate follows the global batch, r
            times that of the start: "linear" (r; Goyal et al., 2017), "sqrt", or "constant".
            `lr_factor` says by how much; nobody multiplies by it here.
        shuffle: False: 0, 1, 2, ... in every epoch.

    Raises:
        ValueError: For numbers that make no sense. Fewer samples than replicas are no error: some
            have empty shares.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch: int,
        seed: int,
        rank: int = 0,
        replicas: int = 1,
        batch_policy: str = "global",
        lr_rule: str = "linear",
        shuffle: bool = True,
    ) -> None:
        for what, value in (("samples", samples), ("batch", batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
        if batch_policy not in POLICIES:
            raise ValueError(
                f"batch_policy is {batch_policy!r}; choose one of {', '.join(POLICIES)}"
            )
        if lr_rule not in RULES:
            raise ValueError(f"lr_rule is {lr_rule!r}; choose one of {', '.join(RULES)}")
        self.samples, self.batch, self.batch_policy, self.lr_rule = (
            samples,
            batch,
            batch_policy,
            lr_rule,
        )
        self._seed, self._shuffle = seed, shuffle
        self.resize(rank=rank, replicas=replicas)
        self._start = self.global_batch
        self.epoch, self.position = 0, 0
        self._order = self._permutation()

    def resize(self, *, rank: int, replicas: int) -> None:
        """Go on as replica `rank` of so many, from the next batch on; the cursor stays. All
        replicas do it between the same batches, and new ones load the state of one that was
        there."""
        if (
            isinstance(replicas, bool)
            or not isinstance(replicas, int)
            or not isinstance(rank, int)
            or not 0 <= rank < replicas
        ):
            raise ValueError(
                f"this is replica {rank!r} of {replicas!r}; expected whole numbers, 0 <= "
                "rank < replicas"
            )
        self.rank, self.replicas = rank, replicas

    @property
    def global_batch(self) -> int:
        """Samples of all replicas in a batch, but for an epoch's last."""
        return self.batch if self.batch_policy == "global" else self.batch * self.replicas

    @property
    def lr_factor(self) -> float:
        """By what the learning rate of the start is to be multiplied now: 1 while the global batch
        is what it was, and where it is no replica's own."""
        return (
            1.0
            if self.batch_policy == "global"
            else RULES[self.lr_rule](self.global_batch / self._start)
        )

    def next(self) -> ReplicaBatch:
        """This replica's share of the next batch. An epoch's last batch is what is left of it, so
        all have as many batches."""
        if self.position == self.samples:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        batch, mine = min(self.global_batch, self.samples - self.position), self.peek()
        self.position += batch
        return ReplicaBatch(mine, batch, self.epoch)

    def peek(self) -> Tensor:
        """What `next` will give this replica, as things are now; nothing at the end of an epoch.
        The cursor stays."""
        batch = min(self.global_batch, self.samples - self.position)
        first, end = (
            self.position + batch * part // self.replicas for part in (self.rank, self.rank + 1)
        )
        return self._order[first:end]

    def rest(self) -> Iterator[ReplicaBatch]:
        """The shares of what is left of this epoch; of a whole one, if that is nothing. The cursor
        moves with each that is taken: a loader that runs ahead of training has a cursor that is
        ahead."""
        yield self.next()
        while self.position < self.samples:
            yield self.next()

    def _permutation(self) -> Tensor:
        if not self._shuffle:
            return torch.arange(self.samples, device="cpu")
        return torch.argsort(
            random.uniform(self._seed, f"data.epoch.{self.epoch}", (self.samples,)), stable=True
        )

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the same on all replicas, and of any number of them: plain numbers."""
        return {
            "samples": self.samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "start": self._start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch after which it was taken.

        Raises:
            ValueError: For the state of other samples or another order.
        """
        own = self.state_dict()
        for key in ("samples", "seed", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the state is of a sampler with {key}={state[key]}, but this has "
                    f"{own[key]}; give the same"
                )
        self.epoch, self.position, self._start = (
            int(state["epoch"]),
            int(state["position"]),
            int(state["start"]),
        )
        self._order = self._permutation()
