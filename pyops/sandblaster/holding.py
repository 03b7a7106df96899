"""hold: a process that holds one part of the vectors, until the run is over.

main thread              carries out the coordinator's commands, and greets workers
one thread a worker      sends it parameters, and takes its gradients in
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.session import Session, Tag, rendezvous
from pyops.failure import CommunicationError
from pyops.sandblaster.shard import VectorShard
from pyops.sandblaster.store_cluster import POLL, ROOM, STOP

__all__ = ["FETCH", "PUSH", "header", "hold"]

FETCH, PUSH = 1, 2
LEAVING = 20.0  # seconds for a worker's last portion, at the end of the run


def header(*numbers: int) -> Tensor:
    """int64 [4]: what is asked for, the evaluation, and a run's level and index."""
    return torch.tensor([*numbers, 0, 0, 0, 0][:4], dtype=torch.int64, device="cpu")


def hold(store: dist.Store, *, shard: int = 0, shards: int = 1) -> VectorShard | None:
    """Hold part `shard` of `shards` of the vectors, until the coordinator stops the run.

    Args:
        store: Where the processes of the run meet, such as a TCPStore that another one serves.
        shard: Which part.
        shards: How many there are.

    Returns:
        The part; None where no worker came.

    Raises:
        ValueError: For a number that is no shard's, or a shard that another process holds.
        CommunicationError: The store is gone.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard is {shard} of {shards}; give a number from 0 to {shards - 1}")
    holding = _Holding(rendezvous(store, room=ROOM), shard, shards)
    try:
        holding.run()
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        reason = str(error).splitlines()[0]
        raise CommunicationError(f"shard {shard}: the store is gone ({reason})") from error
    finally:
        holding.end()
    return holding.held


class _Holding:
    def __init__(self, store: dist.Store, shard: int, shards: int) -> None:
        self._store, self._shard, self._shards = store, shard, shards
        self.held: VectorShard | None = None
        self._digest: str | None = None
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._threads: list[threading.Thread] = []
        self._joined = self._serial = 0
        self._term = 1
        if int(store.add(f"{shard}/holders", 1)) > 1:
            raise ValueError(f"another process holds shard {shard}; give each one its own number")

    def run(self) -> None:
        """Serve until it is time to stop."""
        while not self._store.check([STOP]):
            self._greet()
            if not (self.held is not None and self.held.initialized and self._obeyed()):
                time.sleep(POLL)

    def end(self) -> None:
        """Let workers fetch their last parameters and go, and end all sessions."""
        end = time.monotonic() + LEAVING
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for session in self._sessions:
            session.close()

    def _obeyed(self) -> bool:
        """Carry out a command, where there is one."""
        assert self.held is not None
        place = f"{self._term}/{self._serial + 1}"
        if not self._store.check([f"command/{place}"]):
            leads = int(self._store.get("term")) if self._store.check(["term"]) else 1
            if leads > self._term:
                self._term, self._serial = leads, 0
            return False
        self._serial += 1
        command = json.loads(self._store.get(f"command/{place}"))
        answer: dict[str, Any]
        try:
            with self._lock:
                answer = {"numbers": self.held.run(command)}
        except ValueError as error:
            answer = {"error": str(error)}
        self._store.set(f"answer/{place}/{self._shard}", json.dumps(answer))
        return True

    def _greet(self) -> None:
        """Answer the workers that have announced themselves."""
        joins = int(self._store.add(f"{self._shard}/joins", 0))
        while self._joined < joins:
            name = f"{self._shard}/join/{self._joined + 1}"
            if not self._store.check([name]):
                return
            self._joined += 1
            answer = self._admit(json.loads(self._store.get(name)), name)
            self._store.set(f"{name}/answer", json.dumps(answer))

    def _admit(self, hello: dict[str, Any], name: str) -> dict[str, Any]:
        if hello["shards"] != self._shards or hello["digest"] != (self._digest or hello["digest"]):
            return {
                "error": f"worker {hello['worker']} and shard {self._shard} differ in the model's "
                f"parameters (name, shape, dtype) or in the number of shards ({hello['shards']} "
                f"and {self._shards}); start all with the same model and shards"
            }
        if self.held is None:
            dtype = {"float32": torch.float32, "float64": torch.float64}[hello["dtype"]]
            self.held, self._digest = VectorShard(hello["numel"], dtype=dtype), hello["digest"]
        wants = not self.held.initialized
        talk = threading.Thread(target=self._talk, args=(self.held, name, wants), daemon=True)
        self._threads.append(talk)
        talk.start()
        return {"values": wants}

    def _talk(self, held: VectorShard, name: str, wants: bool) -> None:
        """A session's life; a worker that dies ends it and changes nothing else."""
        with contextlib.suppress(RuntimeError):
            session = Session(self._store, name=name, end=0)
            self._sessions.append(session)
            if wants:
                values = session.receive(torch.empty_like(held.origin), Tag.VALUES)
                with self._lock:
                    held.initialize(values)
            while True:
                kind, evaluation, level, index = session.receive(header(), Tag.FETCH).tolist()
                if kind == FETCH:
                    with self._lock:
                        numbers, point = header(FETCH, held.evaluation), held.point
                    session.send(numbers, Tag.FETCH_REPLY)
                    session.send(point, Tag.VALUES)
                else:
                    gradient = session.receive(torch.empty_like(held.origin), Tag.PUSH)
                    with self._lock:
                        held.push(evaluation, level, index, gradient)
                    session.send(header(PUSH), Tag.PUSH_REPLY)
