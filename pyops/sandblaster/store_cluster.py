"""StoreCluster: the coordinator's process, whose commands and replies are notes in a store.

command/1/7          {"kind": "direct", ...}         of coordinator 1, its 7th
answer/1/7/0         {"numbers": {...}}              of shard 0
evaluation           the one that workers compute
done/9/3             the loss of run 3 of evaluation 9, once all shards have its gradient
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from pyops.comm.session import rendezvous
from pyops.failure import CommunicationError
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.sums import PortionSums

__all__ = ["POLL", "ROOM", "STOP", "StoreCluster"]

POLL = 0.001  # seconds
ROOM = "sandblaster"
STOP = "stop"


class StoreCluster:
    """The Cluster of a Coordinator: shards of `hold` and workers of `work` that meet in a store.

    Args:
        store: The one that shards and workers were given.
        shards: How many there are.
        config: How portions are handed out; workers read it in the store.
        take_over: Whether this coordinator replaces one that has died: the run goes on from where
            its last iteration began, without its history.

    Attributes:
        term: The coordinator's number.

    Raises:
        ValueError: For numbers out of range, and where another coordinator leads the run.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        shards: int = 1,
        config: SandblasterConfig | None = None,
        take_over: bool = False,
    ) -> None:
        if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
            raise ValueError(f"shards is {shards!r}; give a whole number, 1 or more")
        self._store, self._shards = rendezvous(store, room=ROOM), shards
        self.config = config or SandblasterConfig()
        if int(self._store.add("coordinators", 0)) and not take_over:
            raise ValueError(
                "another coordinator leads this run; end this one, or give take_over=True where "
                "the other one has died"
            )
        self.term = int(self._store.add("coordinators", 1))
        if self.term > 1 and not take_over:
            raise ValueError(
                "another coordinator leads this run: two were started at once; end this one"
            )
        self._serial = 0
        self._store.set("evaluation", "0")
        self._store.set("config", json.dumps(asdict(self.config)))
        self._store.set("term", str(self.term))

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """As of Cluster.

        Raises:
            CommunicationError: Shards do not answer, or another coordinator leads the run.
        """
        self._serial += 1
        place = f"{self.term}/{self._serial}"
        self._store.set(f"command/{place}", json.dumps(command))
        answers = [f"answer/{place}/{shard}" for shard in range(self._shards)]
        self._wait(answers, what="shard", numbers=range(self._shards))
        replies = [json.loads(self._store.get(key)) for key in answers]
        for key in (f"command/{place}", *answers):
            self._store.delete_key(key)
        for reply in replies:
            if "error" in reply:
                raise CommunicationError(reply["error"])
        return [reply["numbers"] for reply in replies]

    def evaluate(self, evaluation: int) -> float:
        """As of Cluster.

        Raises:
            CommunicationError: No worker makes any progress for `patience` seconds.
            ValueError: What a worker says of its loss.
        """
        runs = range(self.config.runs)
        self._store.set("evaluation", str(evaluation))
        done = [f"done/{evaluation}/{run}" for run in runs]
        self._wait(done, what="run", numbers=runs)
        losses: PortionSums[float] = PortionSums(self.config.portions)
        for run, key in zip(runs, done, strict=True):
            losses.add(self.config.height, run, float(self._store.get(key)))
        for key in (*done, f"next/{evaluation}"):
            self._store.delete_key(key)
        total = losses.result()
        assert total is not None
        return total

    def stop(self) -> None:
        """Tell all shards and workers to end; workers take the parameters with them. Call the
        coordinator's `settle` before."""
        self._store.set(STOP, "1")

    def _wait(self, keys: Sequence[str], *, what: str, numbers: range) -> None:
        """Wait until all keys are there; a new one begins the patience anew."""
        missing = dict(zip(keys, numbers, strict=True))
        since = time.monotonic()
        while True:
            before = len(missing)
            for key in list(missing):
                if not self._store.check([key]):
                    break
                del missing[key]
            if not missing:
                return
            now = time.monotonic()
            if len(missing) < before:
                since = now
            elif now - since > self.config.patience:
                left = {key for key in missing if not self._store.check([key])}
                lost = [number for key, number in missing.items() if key in left]
                raise CommunicationError(
                    f"coordinator {self.term}: {what} {lost[0]} did not answer within "
                    f"{self.config.patience:g} seconds; start the shards and at least one worker",
                    ranks=lost if what == "shard" else (),
                )
            self._look_for_trouble()
            time.sleep(POLL)

    def _look_for_trouble(self) -> None:
        if self._store.check(["failed"]):
            raise ValueError(self._store.get("failed").decode())
        leads = int(self._store.get("term"))
        if leads != self.term:
            raise CommunicationError(
                f"coordinator {self.term}: coordinator {leads} leads the run since; let this "
                "process end"
            )
