"""work: a worker's process: fetch the point, compute portions while there are any, push them.

evaluation 9   fetch | run 0 push | run 3 push | run 5 push |     run 5 is a backup
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.model_parts import check_model, flat_values, layout_digest
from pyops.comm.session import Session, Tag, rendezvous
from pyops.failure import CommunicationError
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.holding import FETCH, PUSH, header
from pyops.sandblaster.portions import PortionGradients, PortionLoss
from pyops.sandblaster.store_cluster import POLL, ROOM, STOP

__all__ = ["WorkReport", "work"]


@dataclass(frozen=True)
class WorkReport:
    """What a worker did.

    Attributes:
        portions: That it computed.
        backups: Runs of portions among them that another worker had begun.
        second: Runs that another worker had finished before it.
    """

    portions: int
    backups: int
    second: int


def work(
    store: dist.Store,
    model: nn.Module,
    loss: PortionLoss,
    *,
    worker: int = 0,
    shards: int = 1,
    patience: float = 60.0,
) -> WorkReport:
    """Compute portions until the run is over; the model has the last iteration's parameters then.

    Args:
        store: Where the processes of the run meet.
        model: Whose parameters become the shards'. The first worker's are where the run begins.
        loss: (model, portion) -> the portion's share of the batch's loss, a function of the
            parameters and the portion's number alone.
        worker: This one's number, for messages.
        shards: How many there are.
        patience: Seconds that it waits for the shards and the coordinator to be there.

    Returns:
        What it did.

    Raises:
        ValueError: For a model that shards can't hold or that is another one than theirs, or a loss
            that differs between two calls.
        CommunicationError: A shard or the store is lost.
    """
    check_model(model, buffers="refuse", codecs=False)
    try:
        with contextlib.closing(_Worker(rendezvous(store, room=ROOM), worker, patience)) as found:
            found.join(model, loss, shards)
            return found.live()
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CommunicationError(
            f"worker {worker}: a shard or the store is lost ({reason}); start the run again"
        ) from error


class _Worker:
    def __init__(self, store: dist.Store, worker: int, patience: float) -> None:
        self._store, self._worker, self._patience = store, worker, patience
        self._sessions: list[Session] = []
        self._backups = self._second = 0

    def close(self) -> None:
        """End the sessions."""
        for session in self._sessions:
            session.close()

    def _wait(self, key: str, what: str) -> bytes:
        end = time.monotonic() + self._patience
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise CommunicationError(
                    f"worker {self._worker}: {what} did not answer within {self._patience:g} "
                    "seconds; start it, or give more patience"
                )
            time.sleep(POLL)
        found: bytes = self._store.get(key)
        return found

    def join(self, model: nn.Module, loss: PortionLoss, shards: int) -> None:
        """Find the coordinator's options, and open a session with each shard."""
        options = json.loads(self._wait("config", "the coordinator"))
        values, digest = flat_values(model), layout_digest(model, shards=shards)
        self._config = SandblasterConfig(**options)
        self._gradients = PortionGradients(model, loss, self._config, shards=shards)
        for shard, (a, b) in enumerate(pairwise(self._gradients.starts)):
            name = f"{shard}/join/{int(self._store.add(f'{shard}/joins', 1))}"
            hello = {
                "worker": self._worker,
                "shards": shards,
                "digest": digest,
                "numel": b - a,
                "dtype": str(values.dtype).removeprefix("torch."),
            }
            self._store.set(name, json.dumps(hello))
            answer = json.loads(self._wait(f"{name}/answer", f"shard {shard}"))
            if "error" in answer:
                raise ValueError(answer["error"])
            self._sessions.append(Session(self._store, name=name, end=1))
            if answer["values"]:
                self._sessions[-1].send(values[a:b].clone(), Tag.VALUES)
        self._store.set(f"joined/{self._worker}", "yes")

    def live(self) -> WorkReport:
        """Compute evaluation after evaluation."""
        last = ""
        while True:
            now = self._now()
            if now == STOP:
                self._fetch()
                return WorkReport(self._gradients.computed, self._backups, self._second)
            if now in ("0", last):
                time.sleep(POLL)
                continue
            last = now
            if self._fetch() == {int(now)}:
                self._compute(now)

    def _now(self) -> str:
        if self._store.check([STOP]):
            return STOP
        return self._store.get("evaluation").decode()

    def _fetch(self) -> set[int]:
        """Get the shards' points; the evaluations that they are of."""
        found = set()
        for session in self._sessions:
            session.send(header(FETCH), Tag.FETCH)
        parts = self._gradients.parts(self._gradients.buffer.data)
        for session, part in zip(self._sessions, parts, strict=True):
            found.add(int(session.receive(header(), Tag.FETCH_REPLY)[1]))
            session.receive(part, Tag.VALUES)
        return found

    def _compute(self, evaluation: str) -> None:
        for run in self._runs(evaluation):
            try:
                loss, gradient = self._gradients.run(run)
            except ValueError as error:
                self._store.set("failed", f"worker {self._worker}: {error}")
                raise
            self._push(int(evaluation), run, gradient)
            if self._now() != evaluation:
                return
            key = f"done/{evaluation}/{run}"
            self._second += self._store.check([key])
            self._store.compare_set(key, "", repr(loss))

    def _runs(self, evaluation: str) -> Iterator[int]:
        """Runs to compute: the next one, and then those that others have not finished."""
        runs = self._config.runs
        while (number := int(self._store.add(f"next/{evaluation}", 1)) - 1) < runs:
            yield number
        if not self._config.backups:
            return
        for turn in range(runs):
            run = (turn + self._worker) % runs
            if self._now() != evaluation:
                return
            if not self._store.check([f"done/{evaluation}/{run}"]):
                self._backups += 1
                yield run

    def _push(self, evaluation: int, run: int, gradient: Tensor) -> None:
        height = self._config.height
        parts = self._gradients.parts(gradient)
        for session, part in zip(self._sessions, parts, strict=True):
            session.send(header(PUSH, evaluation, height, run), Tag.FETCH)
            session.send(part.contiguous(), Tag.PUSH)
        for session in self._sessions:
            session.receive(header(), Tag.PUSH_REPLY)
