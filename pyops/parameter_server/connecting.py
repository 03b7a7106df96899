"""connect: a replica's sessions with the shards, opened anew when a shard is started again.

two threads a shard      one pushes, one fetches, beside what the model computes
one more                 gives a sign of life
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyops.parameter_server.client import Client
from pyops.parameter_server.config import ConnectConfig, DownpourConfig, check_number
from pyops.parameter_server.messages import (
    Fetched,
    Kind,
    Request,
    message,
)
from pyops.parameter_server.sessions.line import Line
from pyops.parameter_server.sessions.session import OPENING, rendezvous
from pyops.parameter_server.sessions.shared_memory import Gradients
from pyops.parameter_server.vectors import (
    check_model,
    cut,
    flat_values,
    layout_digest,
    named_parameters,
)

__all__ = ["SessionLinks", "connect"]


def _end(over: threading.Event, beats: threading.Thread) -> None:
    """End a replica's signs of life."""
    over.set()
    if beats is not threading.current_thread():
        beats.join(OPENING)


class SessionLinks:
    """A replica's sessions with all shards; see `connect`."""

    def __init__(
        self,
        store: dist.Store,
        starts: Sequence[int],
        hellos: Sequence[dict[str, Any]],
        push_bytes: Sequence[int],
        config: ConnectConfig,
        gradients: Gradients | None = None,
    ) -> None:
        self.starts, self._push_bytes, self._gradients = starts, push_bytes, gradients
        self._store, self._config = store, config
        self.lines = [
            Line(rendezvous(store), shard, hello, config) for shard, hello in enumerate(hellos)
        ]
        self._over = threading.Event()
        self._name = f"beat/{hellos[0]['worker']}/{hellos[0]['incarnation']}"
        self._worker = (hellos[0]["worker"], hellos[0]["incarnation"])
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()
        # A thread that comes back from the store when the interpreter has ended aborts the process:
        # a replica that never calls close ends it at exit.
        self._end_beats = weakref.finalize(self, _end, self._over, self._beats)

    def _beat(self) -> None:
        number, store = 0, None
        while not self._over.is_set():
            try:
                store = store or rendezvous(self._store)
                number += 1
                store.set(self._name, str(number))
                for line in self.lines:
                    line.watch(store)
            except RuntimeError:  # a busy store was late: that connection is of no more use
                store = None
            self._over.wait(self._config.beat_every)

    def open(self, values: Tensor) -> None:
        """Begin the sessions.

        Args:
            values: The model's, with which shards begin that have none.
        """
        for line, (a, b) in zip(self.lines, pairwise(self.starts), strict=True):
            line.values = values[a:b].clone
            if self._gradients is not None:
                line.gradients = self._gradients.part(a, b - a)
            line.open()
        if self._gradients is not None and not any(line.lends for line in self.lines):
            for line in self.lines:
                line.keep_gradients()
            self._gradients.close()
            self._gradients = None

    @property
    def gradients(self) -> Sequence[Tensor]:
        """As of Links."""
        return () if self._gradients is None else self._gradients.vectors

    def message(self, shard: int, payload_bytes: int) -> Tensor:
        """As of Links."""
        return self.lines[shard].message(payload_bytes)

    def check(self, shard: int, request: Request) -> None:
        """As of Links."""
        self.lines[shard].submit(0, self.lines[shard].check, request)

    def push(self, shard: int, request: Request, whole: Tensor | None) -> Future[Tensor]:
        """As of Links."""
        return self.lines[shard].submit(0, self.lines[shard].push, request, whole)

    def fetch(
        self, shard: int, request: Request, reply_bytes: Callable[[bool], int]
    ) -> Future[Fetched]:
        """As of Links."""
        return self.lines[shard].submit(1, self.lines[shard].fetch, request, reply_bytes)

    def close(self) -> None:
        """As of Links."""
        self._over.set()
        for line, size in zip(self.lines, self._push_bytes, strict=True):
            line.leave(Request(Kind.LEAVE, *self._worker), message(size).zero_())
        self._end_beats()
        if self._gradients is not None:
            self._gradients.close()

    def abandon(self) -> None:
        """End the sessions without a word, as a process that dies does."""
        self._over.set()
        for line in self.lines:
            line.abandon()
        if self._gradients is not None:
            self._gradients.close()


def connect(
    model: nn.Module,
    store: dist.Store,
    *,
    worker: int,
    shards: int = 1,
    config: DownpourConfig | None = None,
    patience: ConnectConfig | None = None,
) -> Client:
    """Make a replica of this process, and wait until it has the shards' parameters.

    Args:
        model: Whose parameters become the shards'. The first replica's are where the run begins.
        store: The one that the shards were given.
        worker: This replica's number, 0 or more: a process that is started anew has the number
            that it had, and the shards refuse what its earlier start still sends.
        shards: How many there are.
        config: When it exchanges and how.
        patience: How long it waits for shards.

    Returns:
        The replica; call `step` after each backward pass, and `close` at the end.

    Raises:
        ValueError: Before anything is changed, for a model that shards can't hold, or that is
            another one than the shards'.
        CommunicationError: A shard does not answer.
    """
    check_number(worker, name="worker", least=0)
    check_number(shards, name="shards", least=1)
    config, patience = config or DownpourConfig(), patience or ConnectConfig()
    codecs = (config.push_codec, config.fetch_codec)
    check_model(model, buffers=config.buffers, codecs=any(codecs))
    starts, digest = cut(model, shards=shards), layout_digest(model, shards=shards)
    names = [None if codec is None else codec.name for codec in codecs]
    dtype = named_parameters(model)[0][1].dtype
    place = rendezvous(store)
    incarnation = int(place.add(f"incarnation/{worker}", 1))
    gradients = None
    if config.push_codec is None and patience.shared_memory:
        with contextlib.suppress(OSError):
            gradients = Gradients.make(starts[-1], dtype)
    sizes = [b - a for a, b in pairwise(starts)]
    codec = config.push_codec
    push_bytes = [codec.payload_bytes(n) if codec else n * dtype.itemsize for n in sizes]
    hellos = [
        {
            "worker": worker,
            "incarnation": incarnation,
            "digest": digest,
            "shards": shards,
            "numel": size,
            "start": start,
            "model_numel": starts[-1],
            "gradients": None if gradients is None else gradients.address,
            "dtype": str(dtype).removeprefix("torch."),
            "push_codec": names[0],
            "fetch_codec": names[1],
            "push_bytes": pushed,
            "fetch_bytes": size * dtype.itemsize,
        }
        for start, size, pushed in zip(starts, sizes, push_bytes, strict=False)
    ]
    links = SessionLinks(store, starts, hellos, push_bytes, patience, gradients)
    try:
        links.open(flat_values(model))
        client = Client(model, links, config=config, worker=worker, incarnation=incarnation)
        for shard, line in enumerate(links.lines):
            line.values = partial(client.values_of, shard)
        return client.start()
    except BaseException:
        links.abandon()
        raise
