"""VirtualCluster: shards and workers in one process, on a clock that jumps from portion to portion.

    worker 0   | 0 | 2 | 4 | 5 |           5 was worker 1's: a backup, and the first answer counts
    worker 1   |    1    |    5    |

Gradients are computed for real; how long that takes is told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyops.comm.model_parts import flat_values
from pyops.failure import CommunicationError
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.portions import PortionGradients, PortionLoss
from pyops.sandblaster.shard import VectorShard
from pyops.sandblaster.sums import PortionSums

__all__ = ["VirtualCluster", "VirtualPace"]


@dataclass(frozen=True)
class VirtualPace:
    """How fast a worker of virtual time is.

    Attributes:
        seconds: Of a run of portions: a number, or a function of (evaluation, run).
        dies: When it is lost, in seconds; None: never.
    """

    seconds: float | Callable[[int, int], float] = 1.0
    dies: float | None = None


class VirtualCluster:
    """The Cluster of a Coordinator, in virtual time.

    Args:
        model: Has the first values; all workers compute with it.
        loss: As of PortionGradients.
        workers: How fast each is.
        config: How portions are handed out.
        shards: How many parts the vectors are cut into.

    Attributes:
        now: Seconds.
        repeated: Answers that came second, and changed nothing.
        shards: The shards.
        term: 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PortionLoss,
        workers: Sequence[VirtualPace],
        *,
        config: SandblasterConfig | None = None,
        shards: int = 1,
    ) -> None:
        if not workers:
            raise ValueError("there are no workers; give at least one VirtualPace")
        self.config = config or SandblasterConfig()
        values = flat_values(model)
        self.gradients = PortionGradients(model, loss, self.config, shards=shards)
        self.workers = list(workers)
        self.shards = [VectorShard(len(p), dtype=p.dtype) for p in self.gradients.parts(values)]
        for shard, part in zip(self.shards, self.gradients.parts(values), strict=True):
            shard.initialize(part)
        self.now, self.repeated, self.term = 0.0, 0, 1

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """As of Cluster."""
        return [shard.run(command) for shard in self.shards]

    def parameters(self) -> Tensor:
        """The parameters at which workers compute, as the model's flat vector."""
        self._fetch()
        return self.gradients.buffer.data.clone()

    def _fetch(self) -> None:
        parts = self.gradients.parts(self.gradients.buffer.data)
        for part, shard in zip(parts, self.shards, strict=True):
            part.copy_(shard.point)

    def evaluate(self, evaluation: int) -> float:
        """As of Cluster. CommunicationError where all workers are lost."""
        self._fetch()
        losses: PortionSums[float] = PortionSums(self.config.portions)
        waiting, begun = list(range(self.config.runs)), dict[int, set[int]]()
        events: list[tuple[float, int, int]] = []

        def give(worker: int) -> None:
            run = self._next(waiting, begun, worker)
            if run is None:
                return
            pace = self.workers[worker]
            seconds = pace.seconds
            took = seconds(evaluation, run) if callable(seconds) else seconds
            begun.setdefault(run, set()).add(worker)
            if pace.dies is None or self.now + took < pace.dies:
                heapq.heappush(events, (self.now + took, worker, run))

        for worker in range(len(self.workers)):
            give(worker)
        while losses.result() is None:
            if not events:
                raise CommunicationError("all workers are lost; start others")
            self.now, worker, run = heapq.heappop(events)
            self._answered(evaluation, run, losses)
            if losses.result() is None:
                begun[run].add(len(self.workers))  # is answered
                give(worker)
        total = losses.result()
        assert total is not None
        return total

    def _next(self, waiting: list[int], begun: dict[int, set[int]], worker: int) -> int | None:
        """What a free worker computes: a run that is waiting, or one that another has not
        answered."""
        if waiting:
            return waiting.pop(0)
        answered = len(self.workers)
        if self.config.backups:
            for run in sorted(begun, key=lambda run: (len(begun[run]), run)):
                if not begun[run] & {worker, answered}:
                    return run
        return None

    def _answered(self, evaluation: int, run: int, losses: PortionSums[float]) -> None:
        loss, gradient = self.gradients.run(run)
        height = self.config.height
        for shard, part in zip(self.shards, self.gradients.parts(gradient), strict=True):
            shard.push(evaluation, height, run, part.clone())
        if not losses.add(height, run, loss):
            self.repeated += 1
