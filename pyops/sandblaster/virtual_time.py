"""VirtualWorkers: the workers of a batch in one process, on a clock that jumps from answer to
answer.

Losses and gradients are computed; only the time that they take is told. For trying what a slow or
a dying worker costs, and for tests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.failure import CommunicationError
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.coordinator import LocalShards
from pyops.sandblaster.portions import Portions
from pyops.sandblaster.tree_sum import TreeSum

__all__ = ["VirtualBatch", "VirtualMember"]

Compute = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]
"""(parameters, portions) -> (loss, gradient), as of Worker.compute."""


@dataclass(frozen=True)
class VirtualMember:
    """A worker of virtual time.

    Raises:
        ValueError: For a time that is not above 0.
    """

    seconds: float = 1.0
    """Of one portion."""
    dies: float | None = None
    """When it does; what it had not answered is handed out again after `noticed` seconds."""
    hangs: float | None = None
    """When it stops answering, without a report of its death."""
    noticed: float = 0.2
    """Seconds until its death is known."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds!r}; give the time of a portion, above 0")

    def answers_at(self, begun: float, portions: int) -> float | None:
        """When it has computed some portions; None: never."""
        over = begun + self.seconds * portions
        gone = [at for at in (self.dies, self.hangs) if at is not None and at < over]
        return None if gone else over


class VirtualBatch:
    """One pass over the batch at a time, by virtual workers: what a Coordinator evaluates.

    Args:
        shards: Which hold the parameters, and add the gradients.
        compute: What a worker does.
        workers: How long each takes.
        config: How the batch is cut.

    Attributes:
        now: The time, in seconds.
        again: Units that were handed out more than once.
        answered: Units that each worker was the first to answer.
    """

    def __init__(
        self,
        shards: LocalShards,
        compute: Compute,
        workers: Sequence[VirtualMember],
        config: SandblasterConfig,
    ) -> None:
        if not workers:
            raise ValueError("workers is empty; give one or more")
        self._shards, self._compute = shards.shards, compute
        self._workers, self._config = list(workers), config
        self.now = 0.0
        self.again = 0
        self.answered = [0] * len(workers)

    def __call__(self) -> float:
        """All portions, at the shards' trial point; the sum of losses.

        Raises:
            CommunicationError: No worker is left.
        """
        config = self._config
        portions = Portions(config.units, backups=config.backups)
        losses = TreeSum(config.portions)
        events: list[tuple[float, int, int | None]] = []  # (when, worker, unit answered or None)
        idle = []
        for number, worker in enumerate(self._workers):
            if worker.dies is None or worker.dies > self.now:
                idle.append(number)
        while not portions.over:
            idle = [n for n in idle if not self._begun(n, portions, events)]
            if not events:
                raise CommunicationError(
                    f"portions are left and no worker is: {len(self._workers)} died or hang; start "
                    "others"
                )
            self.now, number, unit = heapq.heappop(events)
            if unit is None:
                portions.lose(number)
                continue
            if portions.finish(unit):
                self._answer(unit, losses)
                self.answered[number] += 1
            idle.append(number)
        self.again += portions.again
        return float(losses.total)

    def _begun(
        self, number: int, portions: Portions, events: list[tuple[float, int, int | None]]
    ) -> bool:
        """Let an idle worker begin; whether there was anything for it."""
        worker = self._workers[number]
        if worker.hangs is not None and worker.hangs <= self.now:
            return True
        unit = portions.take(number)
        if unit is None:
            return False
        over = worker.answers_at(self.now, len(self._config.portions_of(unit)))
        if over is not None:
            heapq.heappush(events, (over, number, unit))
        elif worker.dies is not None:
            heapq.heappush(events, (max(self.now, worker.dies + worker.noticed), number, None))
        return True

    def _answer(self, unit: int, losses: TreeSum) -> None:
        """Compute what is answered first."""
        level = self._config.level
        values = torch.cat([shard.trial for shard in self._shards])
        loss, gradient = self._compute(values, self._config.portions_of(unit))
        losses.add(loss, index=unit, level=level)
        parts = gradient.split([shard.trial.numel() for shard in self._shards])
        for shard, part in zip(self._shards, parts, strict=True):
            shard.add_gradient(part.clone(), unit, level)
