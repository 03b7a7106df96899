"""serve: a process that holds one shard of the vectors, until it is told to stop.

main thread             does what the coordinator orders, of the term that the run is in
two threads a worker    one receives gradients, one answers with parameters

    folder/iteration-7/shard-0.pt       vectors, and the coordinator's numbers, of the last two
    folder/iteration-8/shard-0.pt       snapshots: another shard may have but the first of them
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyops.failure import CommunicationError
from pyops.parameter_server.config import check_number
from pyops.parameter_server.messages import HEADER_BYTES, Reply, Request, Verdict, message
from pyops.parameter_server.sessions.session import Session, Tag
from pyops.parameter_server.snapshots import load_snapshot, save_snapshot
from pyops.parameter_server.vectors import layout_digest
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.recovery import EVALUATIONS, current_term
from pyops.sandblaster.remote import STOP, agree, notes, waited
from pyops.sandblaster.shard import VectorShard
from pyops.sandblaster.worker import Worker

__all__ = ["serve"]

POLL = 0.01  # seconds
GRACE = 10.0  # seconds in which workers fetch the last parameters when the run is over
FOREVER = 1e9


def serve(
    store: dist.Store,
    model: nn.Module,
    *,
    shard: int,
    shards: int,
    config: SandblasterConfig,
    snapshots: Path | str | None = None,
) -> Tensor:
    """Hold shard `shard` of `shards`, until `stop(store)`.

    Args:
        store: Where all meet.
        model: With the first parameters, the same in all processes.
        shard: Which one.
        shards: How many there are.
        config: The run's options, the same in all processes.
        snapshots: The folder of snapshots, which a shard that is started again goes back to. One
            for all shards, or one for each. None: a shard can't be started again.

    Returns:
        This part of the parameters at the end.

    Raises:
        ValueError: For a number that does not fit, another model or other options than those of
            the other processes, a damaged snapshot or one of another model, or where another
            process holds this shard and there are no snapshots.
        CommunicationError: The store is gone, or another process has been started for this shard.
    """
    check_number(shards, name="shards", least=1)
    check_number(shard, name="shard", least=0)
    if shard >= shards:
        raise ValueError(f"shard is {shard} of {shards}; give a number below {shards}")
    values = Worker(model, lambda *_: _nothing()).parts(shards)[shard]
    place = notes(store)
    agree(place, model, shards, config)
    digest = layout_digest(model, shards=shards)
    kept = None if snapshots is None else _Kept(Path(snapshots), shard, digest)
    if int(place.add(f"{shard}/claims", 1)) > 1 and kept is None:
        raise ValueError(
            f"another process holds shard {shard} of this run; let one do it, or give each run a "
            "store of its own: torch.distributed.PrefixStore(name, store)"
        )
    start = int(place.add(f"{shard}/served", 1))
    held = VectorShard(values, history_size=config.history_size, leaves=config.portions)
    serving = _Serving(held, shard, config, kept=kept, start=start)
    threading.Thread(target=serving.greet, args=(notes(store),), daemon=True).start()
    try:
        serving.obey(place)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise CommunicationError(f"shard {shard}: the store is gone ({reason})") from error
    finally:
        serving.end()
    return held.point


def _nothing() -> Tensor:
    raise AssertionError("a shard computes no loss")


class _OtherTerm(Exception):
    """What was waited for will not come: the run is in another term."""


class _Kept:
    """Snapshots of a shard."""

    def __init__(self, folder: Path, shard: int, digest: str) -> None:
        self._folder, self._shard, self._digest = folder, shard, digest
        for iteration in self.iterations():  # a damaged one is named before anything is started
            self.load(iteration)

    def _place(self, iteration: int) -> Path:
        return self._folder / f"iteration-{iteration}"

    def iterations(self) -> list[int]:
        """Those that there is a snapshot of."""
        found = self._folder.glob(f"iteration-*/shard-{self._shard}.pt")
        return sorted(int(path.parent.name.removeprefix("iteration-")) for path in found)

    def load(self, iteration: int) -> dict[str, Any]:
        """A snapshot. ValueError where it is damaged, or of another model."""
        place = self._place(iteration)
        state = load_snapshot(place, self._shard)
        if state is None or state.get("digest") != self._digest:
            raise ValueError(
                f"{place} is of another model or another number of shards; give the folder of this "
                "run, or remove it to begin anew"
            )
        return state

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Keep a snapshot and the one before it."""
        state = {**state, "digest": self._digest}
        save_snapshot(self._place(iteration), self._shard, state)
        keep = [each for each in self.iterations() if each <= iteration][-2:]
        for each in self.iterations():
            if each not in keep:
                (self._place(each) / f"shard-{self._shard}.pt").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another shard's is there
                    self._place(each).rmdir()


class _Serving:
    """A shard, and who talks to it."""

    def __init__(
        self,
        held: VectorShard,
        shard: int,
        config: SandblasterConfig,
        *,
        kept: _Kept | None = None,
        start: int = 1,
    ) -> None:
        self._held, self._shard, self._level = held, shard, config.level
        self._first = held.point
        self._kept, self._start = kept, start
        self._term, self._turn = 0, 1
        self._lock = threading.Lock()
        self._evaluation = 0
        self._units: set[int] = set()
        self._sessions: list[Session] = []
        self._talks: list[threading.Thread] = []
        self._over = False

    # the coordinator

    def obey(self, store: dist.Store) -> None:
        """Do what is ordered, one thing after the other."""

        def look() -> None:
            if int(store.add(f"{self._shard}/served", 0)) != self._start:
                raise CommunicationError(
                    f"shard {self._shard}: another process has been started for it; let one "
                    "process hold each shard"
                )
            if current_term(store) != self._term:
                raise _OtherTerm

        while True:
            try:
                command = f"{self._term}/command/{self._turn}"
                if not waited(store, command, seconds=FOREVER, look=look):
                    return
                operation, arguments = json.loads(store.get(command))
            except _OtherTerm:
                self._term, self._turn = current_term(store), 1
                continue
            answer = self._answer(operation, arguments)
            name = f"{self._term}/answer/{self._turn}/{self._shard}"
            store.set(name, json.dumps(answer))
            self._turn += 1

    def _answer(self, operation: str, arguments: Sequence[Any]) -> dict[str, Any]:
        own: dict[str, Callable[..., Any]] = {
            "newest": self._newest,
            "go_back": self._go_back,
            "save": self._save,
        }
        try:
            with self._lock:
                if operation == "begin_evaluation":
                    self._evaluation += 1
                    self._units.clear()
                call = own.get(operation) or getattr(self._held, operation)
                return {"found": call(*arguments)}
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    # snapshots

    def _newest(self) -> list[int]:
        """The iterations that this shard can go back to; 0: the first parameters."""
        return [0, *(self._kept.iterations() if self._kept is not None else [])]

    def _go_back(self, iteration: int) -> dict[str, Any] | None:
        """Begin a term from a snapshot; the coordinator's numbers in it."""
        state = None
        if iteration and self._kept is not None:
            found = self._kept.load(iteration)
            self._held.load_state_dict(found["vectors"])
            state = json.loads(found["coordinator"])
        else:
            self._held.begin_anew(self._first)
        self._evaluation = self._term * EVALUATIONS
        self._units.clear()
        return state

    def _save(self, iteration: int, coordinator: dict[str, Any]) -> None:
        """Keep a snapshot, where there is a folder for it."""
        if self._kept is not None:
            state = {"vectors": self._held.state_dict(), "coordinator": json.dumps(coordinator)}
            self._kept.save(iteration, state)

    # workers

    def greet(self, store: dist.Store) -> None:
        """Open a session for every worker that announces itself."""
        opened = 0
        try:
            while not self._over and not store.check([STOP]):
                place = f"{self._shard}/{self._start}"
                if int(store.add(f"{place}/joins", 0)) > opened:
                    opened += 1
                    name = f"{place}/join/{opened}"
                    store.set(f"{name}/here", "1")
                    talk = threading.Thread(target=self._talk, args=(store, name), daemon=True)
                    self._talks.append(talk)
                    talk.start()
                else:
                    time.sleep(POLL)
        except dist.DistError:  # the main thread says so
            return

    def _talk(self, store: dist.Store, name: str) -> None:
        try:
            session = Session(store, name=name, end=0)
            self._sessions.append(session)
            threading.Thread(target=self._gradients, args=(session,), daemon=True).start()
            self._parameters(session)
        except RuntimeError:  # the worker is gone: the coordinator finds out
            return

    def _gradients(self, session: Session) -> None:
        point = self._held.point
        whole = message(point.numel() * point.element_size())
        try:
            while True:
                request = Request.of(session.receive(whole, Tag.PUSH))
                gradient = whole[HEADER_BYTES:].clone().view(point.dtype)
                with self._lock:
                    verdict = self._add(request, gradient)
                session.send(Reply(verdict).write(message()), Tag.PUSH_REPLY)
        except RuntimeError:
            return

    def _add(self, request: Request, gradient: Tensor) -> Verdict:
        """Add a unit's gradient, once, to the sum that it belongs to."""
        if request.epoch != self._evaluation:
            return Verdict.TOO_STALE
        if request.sequence in self._units:
            return Verdict.REPEATED
        self._units.add(request.sequence)
        self._held.add_gradient(gradient, request.sequence, self._level)
        return Verdict.APPLIED

    def _parameters(self, session: Session) -> None:
        asked = message()
        while True:
            session.receive(asked, Tag.FETCH)
            with self._lock:
                trial, evaluation = self._held.trial, self._evaluation
                answer = message(trial.numel() * trial.element_size())
                answer[HEADER_BYTES:].view(trial.dtype).copy_(trial)
            Reply(Verdict.FETCHED, version=evaluation).write(answer)
            session.send(answer, Tag.FETCH_REPLY)

    def end(self) -> None:
        """Close all sessions, when the workers have left."""
        self._over = True
        deadline = time.monotonic() + GRACE
        for talk in self._talks:
            talk.join(max(0.0, deadline - time.monotonic()))
        for session in self._sessions:
            session.close()
