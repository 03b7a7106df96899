"""RecoveringCoordinator: an iteration begins again where a shard, or another coordinator, is lost.

    iteration 6 | save | iteration 7 | save | iteration 8 ...          shard 1 is killed
                                               newest -> go back to 7 | iteration 8 ...

A snapshot is a shard's vectors, with the coordinator's scalars and inner products: whoever leads
next needs nothing else. Whoever leads, leads a term: what was ordered in an earlier one is void.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pyops.failure import CommunicationError
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.coordinator import Coordinator, SandblasterReport, Shards

__all__ = [
    "EVALUATIONS",
    "LOOK",
    "RecoveringCoordinator",
    "ShardRestartedError",
    "Term",
    "current_term",
]

LOOK = 0.1  # seconds from one look whether a term is over to the next
EVALUATIONS = 1 << 32  # evaluations of a term are numbered from its number times this


def current_term(store: dist.Store) -> int:
    """The number of the term that the run is in; 0 before the first one."""
    return int(store.get("term").decode().split(":")[0]) if store.check(["term"]) else 0


class ShardRestartedError(CommunicationError):
    """A shard was started again since this term began: it knows its last snapshot alone."""


class Term:
    """What a coordinator leads, from one loss of a shard to the next.

    Args:
        store: As of `notes`.
        shards: How many there are.
        take_over: Whether another coordinator's term ends with this one's first.

    Attributes:
        number: From 1 on, over all coordinators of the run.

    Raises:
        ValueError: Another coordinator leads the run.
    """

    def __init__(self, store: dist.Store, *, shards: int, take_over: bool) -> None:
        self._store, self._shards = store, shards
        self._own = int(store.add("coordinators", 1))
        before = store.get("term").decode() if take_over and store.check(["term"]) else ""
        if not self._claimed(before):
            raise ValueError(
                "another process coordinates the run of this store; let one do it, give "
                "take_over=True where the other one has died, or give each run a store of its "
                "own: torch.distributed.PrefixStore(name, store)"
            )
        self._fresh = True

    def _claimed(self, before: str) -> bool:
        """Whether the run's term went from `before` to the next one, and it is this one's."""
        self.number = int(before.split(":")[0] or 0) + 1 if before else 1
        self._name = f"{self.number}:{self._own}"
        self._starts = self._started()
        return self._store.compare_set("term", before, self._name).decode() == self._name

    def _started(self) -> list[int]:
        """How often each shard was started."""
        return [int(self._store.add(f"{shard}/served", 0)) for shard in range(self._shards)]

    def begin(self) -> None:
        """Begin the next term, or the first one.

        Raises:
            CommunicationError: Another coordinator has taken over.
        """
        if not self._fresh and not self._claimed(self._name):
            self._say_who_leads()
        self._fresh = False

    def _say_who_leads(self) -> None:
        raise CommunicationError(
            f"coordinator {self._own}: coordinator "
            f"{self._store.get('term').decode().split(':')[1]} has taken over the run; let this "
            "process end"
        )

    def look(self) -> None:
        """See whether the term is over.

        Raises:
            CommunicationError: Another coordinator has taken over, or a shard was started again.
        """
        if self._store.get("term").decode() != self._name:
            self._say_who_leads()
        for shard, (before, now) in enumerate(zip(self._starts, self._started(), strict=True)):
            if before and now != before:
                raise ShardRestartedError(f"shard {shard} was started again")
            self._starts[shard] = now


class RecoveringCoordinator(Coordinator):
    """A Coordinator whose shards keep snapshots.

    Args:
        shards: Which hold the vectors, and take "newest", "go_back" and "save" besides.
        evaluate: As of Coordinator.
        config: How iterations are taken.
        begin_term: Called before shards are asked to go back: what was ordered before is void.
        save_every: Iterations from one snapshot to the next.
    """

    def __init__(
        self,
        shards: Shards,
        evaluate: Callable[[], float],
        config: SandblasterConfig,
        *,
        begin_term: Callable[[], None],
        save_every: int,
    ) -> None:
        super().__init__(shards, evaluate, config)
        self._begin_term, self._save_every = begin_term, save_every
        self._begun = False

    def run(self, iterations: int) -> SandblasterReport:
        """Take iterations; see Coordinator.run. Where a shard is started again meanwhile, all go
        back to the newest snapshot that each of them has, and on from there.

        Raises:
            CommunicationError: A shard does not come back, another coordinator leads the run, or
                no worker is left.
        """
        self._recover_until_begun()
        until = self.iterations + iterations
        report: SandblasterReport = self._again(
            lambda: super(RecoveringCoordinator, self).run(until - self.iterations)
        )
        return report

    def finish(self) -> None:
        """See Coordinator.finish."""
        self._recover_until_begun()
        reached = self.iterations

        def end() -> None:
            if self.iterations < reached:
                super(RecoveringCoordinator, self).run(reached - self.iterations)
            super(RecoveringCoordinator, self).finish()

        self._again(end)

    def _again(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except ShardRestartedError:
                self._begun = False
                self._recover_until_begun()

    def _recover_until_begun(self) -> None:
        """Begin a term, with all shards at one snapshot."""
        while not self._begun:
            try:
                self._begin_term()
                kept = [set(each) for each in self.shards.call("newest")]
                states = self.shards.call("go_back", max(set.intersection(*kept)))
                self.load_state_dict(states[0])
                self._begun = True
            except ShardRestartedError:
                continue

    def _iterate(self) -> None:
        super()._iterate()
        if self.iterations % self._save_every == 0:
            self.shards.call("save", self.iterations, self.state_dict())
