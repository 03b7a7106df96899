"""Replicas and shards that die while a session is opened: whoever lives goes on without them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from pyops.comm import Int8
from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    connect,
    connecting,
    serving,
)
from pyops.parameter_server.messages import Kind, Request
from pyops.parameter_server.sessions import session
from pyops.parameter_server.sessions.session import Session, rendezvous
from tests.parameter_server.replicas import adagrad, gradient, model
from tests.parameter_server.shard_threads import Served, replica, served, tcp_store

pytestmark = pytest.mark.cpu_only
HOURS = 1e4  # seconds: what waits so long hangs


class Dies(BaseException):
    """What ends a replica at once."""


class DyingStore:
    """A store whose owner dies before it writes for the time number `last`; in other threads, all
    is well. To read changes nothing that others see."""

    def __init__(self, store: dist.Store, last: int) -> None:
        self._store, self._left = store, last
        self._owner = threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            writes = name in ("add", "set", "compare_set")
            if writes and threading.current_thread() is self._owner:
                self._left -= 1
                if self._left < 0:
                    raise Dies
            return call(*arguments)

        return counted


def test_a_replica_that_dies_at_any_moment_of_its_joining_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
):
    def live(moment: int) -> bool:
        """Join and leave, and die before the write number `moment`. Says whether there was one."""
        with monkeypatch.context() as patched:
            patched.setattr(
                connecting, "rendezvous", lambda store: DyingStore(rendezvous(store), moment)
            )
            try:
                connect(model(), shards.store, worker=moment).close()
            except Dies:
                return False
        return True

    last = 0
    with served(adagrad(0.05)) as shards:
        while not live(last):
            last += 1
            client = replica(shards.store, 100 + last, 1, config=DownpourConfig(fetch_delay=0))
            assert client.step_number == 1
    assert last == 3  # an incarnation; a note, how many there are, and that its end is there
    assert shards.reports[0].counts.applied == last


def test_a_shard_that_dies_while_a_session_is_opened_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """It has answered, and its end of the session never comes."""
    monkeypatch.setattr(session, "OPENING", HOURS)
    store = tcp_store()
    notes, done = rendezvous(store), threading.Event()
    notes.add("0/epochs", 1)
    notes.set("0/epoch", "1")

    def live() -> None:
        replica(store, 0, 3, patience=60.0)
        done.set()

    threading.Thread(target=live, daemon=True).start()
    notes.wait(["0/1/join/1"])
    answer = {"values": False, "room": False, "parameters": None}
    notes.set("0/1/join/1/answer", json.dumps(answer))
    shards = Served(store, adagrad(0.05), 1)
    assert done.wait(60), "the replica waits for the shard that is gone"
    shards.stop()
    Session(notes, name="0/1/join/1", end=0).close()  # so that no thread waits for hours
    assert shards.reports[0].epoch == 2
    assert shards.reports[0].counts.applied == 3


def test_a_replica_that_dies_before_its_session_begins_holds_up_no_shard_that_ends(
    monkeypatch: pytest.MonkeyPatch,
):
    """It has left its note, and its end of the session never comes."""
    for module in (serving, session):
        monkeypatch.setattr(module, "OPENING", 60.0)  # longer than a shard is given to end
    monkeypatch.setattr(connecting, "rendezvous", lambda store: DyingStore(rendezvous(store), 2))
    with served(adagrad(0.05)) as shards, pytest.raises(Dies):
        connect(model(), shards.store, worker=0)
    assert shards.reports[0].counts.applied == 0


def test_a_replica_gives_signs_of_life_again_after_the_store_was_late(
    monkeypatch: pytest.MonkeyPatch,
):
    beats: list[str] = []

    class Late:
        """A store that is late once, at the third beat; that connection stays of no use."""

        def __init__(self, store: dist.Store) -> None:
            self._store, self._late = store, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def set(self, key: str, value: str) -> None:
            if key.startswith("beat/"):
                beats.append(value)
                self._late |= len(beats) == 3
            if self._late:
                raise dist.DistStoreError("wait timeout")
            self._store.set(key, value)

    monkeypatch.setattr(connecting, "rendezvous", lambda store: Late(rendezvous(store)))
    with served(adagrad(0.05)) as shards:
        client = connect(model(), shards.store, worker=0, patience=ConnectConfig(beat_every=0.01))
        end = time.monotonic() + 60
        while len(beats) < 6 and time.monotonic() < end:
            time.sleep(0.01)
        assert int(rendezvous(shards.store).get("beat/0/1")) > 3
        client.close()


def test_a_new_session_asks_for_whole_parameters_though_the_one_before_answers_last():
    """With a codec, differences would be added to what the replica has; the shard's new session
    begins at nothing."""
    config = DownpourConfig(fetch_delay=0, fetch_codec=Int8())
    with served(adagrad(0.05)) as shards:
        client = connect(model(), shards.store, worker=0, config=config)
        gradient(client.model, 0, 0)
        client.step()
        line = client.links.lines[0]
        before = line._session
        assert isinstance(before, Session)
        received = before.receive

        def late(*arguments: Any, **options: Any) -> Any:
            """The answer is there, and another thread opens the next session."""
            answer = received(*arguments, **options)
            line.drop(before)
            line.open()
            return answer

        before.receive = late  # type: ignore[method-assign]
        client._begin_fetch()
        for pending in client._arrive():
            pending.result()
        after = line._session
        assert after is not before
        assert isinstance(after, Session)
        assert after.fresh
        request = Request(Kind.FETCH, 0, 1, sequence=9)
        assert line.fetch(request, lambda whole: 4 * len(client.buffer.data)).whole
        client.close()
