"""Memory that a shard and a replica of one host share: the same numbers as over the wire, and never
a part of a push."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm import Int8
from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    ParameterShard,
    connect,
    endpoint,
    serving,
)
from pyops.parameter_server.endpoint import Endpoint
from pyops.parameter_server.messages import HEADER_BYTES, Kind, Reply, Request, Verdict, message
from pyops.parameter_server.sessions import line
from pyops.parameter_server.sessions.line import Line
from pyops.parameter_server.sessions.shared_memory import (
    LOADS_IN_ORDER,
    Gradients,
    LentParameters,
    Room,
)
from tests.open_files import open_files
from tests.parameter_server.replicas import adagrad, gradient, model, run, uneven
from tests.parameter_server.shard_threads import Served, replica, served, tcp_store

pytestmark = pytest.mark.cpu_only

WAYS = {
    "plain": {},
    "int8": {"push_codec": Int8(), "fetch_codec": Int8()},
    "own steps": {"local_lr": 0.01, "push_every": 2, "fetch_every": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_replica_has_the_bits_of_virtual_time_with_a_room_and_without(way: str, shared: bool):
    options = {"fetch_delay": 0} | WAYS[way]
    config = DownpourConfig(**options)
    with served(adagrad(0.05), shards=2) as shards:
        client = replica(shards.store, 0, 6, shards=2, config=config, shared_memory=shared)
    rooms = [line._session._rooms for line in client.links.lines]
    assert all(bool(room) == shared for room in rooms)
    assert all(line.lends == (shared and way != "int8") for line in client.links.lines)
    assert all(line._session.near == (shared and LOADS_IN_ORDER) for line in client.links.lines)
    virtual = run(uneven(1, steps=6), adagrad(0.05), shards=2, **options)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def _files() -> set[int]:
    """The numbers of the inodes of the open files that are rooms. A room of an earlier test may be
    collected at any time, so that a test may only say that no room was added."""
    return {os.fstat(number).st_ino for number in open_files("pyops-s")}


@pytest.mark.parametrize("where", ["another host", "hidden", "no memory"])
def test_messages_travel_where_there_is_no_room(where: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> Room:
        raise OSError("Permission denied")

    if where == "another host":
        monkeypatch.setattr(serving, "host", lambda: "another")
    elif where == "hidden":
        monkeypatch.setattr(Room, "open", refuse)
    else:
        monkeypatch.setattr(Room, "make", refuse)
    before = _files()
    with served(adagrad(0.05)) as shards:
        client = replica(shards.store, 0, 4, config=DownpourConfig(fetch_delay=0))
    assert client.links.lines[0]._session._rooms == {}
    assert _files() <= before
    virtual = run(uneven(1, steps=4), adagrad(0.05), fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def test_a_room_of_another_size_is_refused_and_files_are_closed():
    before = _files()
    room = Room.make(100, 64)
    assert [len(part) for part in (room.pushes, room.fetches)] == [
        HEADER_BYTES + 128,
        HEADER_BYTES + 64,
    ]
    with pytest.raises(OSError, match="a room of 512 bytes"):
        Room.open(room.address, 100, 65)
    other = Room.open(room.address, 100, 64)
    room.pushes[5], room.fetches[7] = 3, 4
    assert (int(other.pushes[5]), int(other.fetches[7])) == (3, 4)
    room.close()
    with pytest.raises(OSError, match="No such file"):
        Room.open(room.address, 100, 64)
    del room, other
    assert _files() <= before


def test_parameters_that_change_while_they_are_read_are_read_again_from_a_copy():
    room = Room.make(64, 64)
    shard = Room.open(room.address, 64, 64)
    room.close()
    values = torch.arange(16.0)
    before = values.clone()
    payloads = room.lent(1, values.view(torch.uint8))
    assert next(payloads).data_ptr() == values.data_ptr()
    shard.settle(1, values)
    values += 100
    assert torch.equal(next(payloads).view(torch.float32), before)
    assert list(payloads) == []
    assert [each.data_ptr() for each in room.lent(2, values.view(torch.uint8))] == [
        values.data_ptr()
    ]
    shard.settle(2, values)  # it has been read: nothing is copied
    assert torch.equal(room.fetches[HEADER_BYTES:].view(torch.float32), before)


class Settled:
    """A loan that keeps what it is settled with."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Tensor]] = []

    def settle(self, number: int, values: Tensor) -> None:
        self.found.append((number, values.clone()))


def test_a_shard_settles_each_loan_before_its_parameters_change_also_of_a_replica_that_has_left():
    shard, loan = ParameterShard(4, adagrad(0.1)), Settled()
    shard.initialize(torch.ones(4))
    shard.join(0, 1)
    shard.join(1, 1)
    shard.lend(loan, 7)
    shard.leave(0, 1, lost=True)
    shard.push(Request(Kind.PUSH, 1, 1, sequence=1), torch.full((4,), float("nan")))
    assert loan.found == []
    shard.push(Request(Kind.PUSH, 1, 1, sequence=2), torch.ones(4))
    shard.push(Request(Kind.PUSH, 1, 1, sequence=3), torch.ones(4))
    shard.lend(loan, 8)
    later = shard.parameter.detach().clone()
    shard.load_values(torch.zeros(4), shard.optimizer.state_dict(), applied=2)
    assert [number for number, _ in loan.found] == [7, 8]
    assert torch.equal(loan.found[0][1], torch.ones(4))
    assert torch.equal(loan.found[1][1], later)
    assert not torch.equal(later, torch.ones(4))


def test_a_fetch_has_its_parameters_though_others_push_before_they_are_read():
    with served(adagrad(0.05)) as shards:
        config = DownpourConfig(push_every=100)
        reads = connect(model(), shards.store, worker=0, config=config)
        pushes = connect(model(), shards.store, worker=1, config=DownpourConfig(fetch_delay=0))
        gradient(reads.model, 0, 0)
        reads.step()  # its only push
        reads._pushing[0].result()
        gradient(reads.model, 0, 1)
        reads.step()
        fetched = reads._fetching[0].result()
        assert isinstance(fetched, LentParameters) == LOADS_IN_ORDER
        asked = connect(model(), shards.store, worker=2)
        present = asked.buffer.data.clone()
        gradient(pushes.model, 1, 0)
        pushes.step()
        assert not torch.equal(pushes.buffer.data, present)
        gradient(reads.model, 0, 2)
        reads.step()
        assert torch.equal(reads.buffer.data, present)
        gradient(reads.model, 0, 3)
        reads.step()
        assert torch.equal(reads.buffer.data, pushes.buffer.data)
        for client in (reads, pushes, asked):
            client.close()


@pytest.mark.parametrize("where", ["hidden", "another processor"])
def test_parameters_are_copied_where_they_cannot_be_read_in_place(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    if where == "hidden":
        monkeypatch.setattr(line, "_opened", lambda address: None)
    else:
        monkeypatch.setattr(serving, "LOADS_IN_ORDER", False)
    with served(adagrad(0.05)) as shards:
        client = replica(shards.store, 0, 4, config=DownpourConfig(fetch_delay=0))
    session = client.links.lines[0]._session
    assert session._rooms
    assert not session.near
    virtual = run(uneven(1, steps=4), adagrad(0.05), fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def test_a_replica_that_dies_while_it_writes_into_the_room_has_pushed_nothing():
    with served(adagrad(0.05)) as shards:
        client = connect(
            model(), shards.store, worker=0, patience=ConnectConfig(), config=DownpourConfig()
        )
        line = client.links.lines[0]
        assert isinstance(line, Line)
        gradient(client.model, 0, 0)
        client.step()
        client.settle()
        client.buffer.grad[:100] = 65  # a part of a push, and its header never comes
        client.links.abandon()
    with served(adagrad(0.05)) as again:
        other = replica(again.store, 0, 1, config=DownpourConfig(fetch_delay=0))
    assert shards.reports[0].counts.applied == 1
    assert shards.reports[0].counts.lost_members == 1
    assert again.reports[0].version == other.step_number == 1


def _kept(shared: bool, config: DownpourConfig, *, nan_at: set[int]) -> Any:
    """A replica of eight steps, some of whose gradients are not finite; closed."""
    with served(adagrad(0.05), shards=2) as shards:
        patience = ConnectConfig(shared_memory=shared)
        client = connect(
            model(), shards.store, worker=0, shards=2, config=config, patience=patience
        )
        assert bool(client.links.gradients) == shared
        for step in range(8):
            gradient(client.model, 0, step)
            if step in nan_at:
                client.buffer.grad[3] = math.nan
            if step == 5:
                before = client.buffer.grad.clone()
                client.settle()
                assert torch.equal(client.buffer.grad, before)
            client.step()
            assert not client.buffer.grad.any()
        client.close()
    assert {report.version for report in shards.reports.values()} == {client._sequences[0]}
    return client


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("push_every", "nan_at"), [(1, {2, 3}), (3, {3, 4}), (3, {0, 6})])
def test_pushes_that_lie_in_the_gradients_are_those_of_the_wire(
    push_every: int, nan_at: set[int], mean: bool
):
    config = DownpourConfig(push_every=push_every, fetch_delay=0, mean=mean, local_lr=0.01)
    near, far = (_kept(shared, config, nan_at=nan_at) for shared in (True, False))
    assert near.skipped == far.skipped == len(nan_at)
    assert torch.equal(near.buffer.data, far.buffer.data)


def test_gradients_are_computed_beside_those_of_a_push_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
):
    """The shard begins with a push when the next gradient is whole."""
    computed, applied = threading.Semaphore(0), []
    genuine = ParameterShard.push

    def push(shard: ParameterShard, request: Request, vector: Tensor, **options: Any) -> Reply:
        computed.acquire(timeout=20)
        applied.append(vector.clone())
        return genuine(shard, request, vector, **options)

    monkeypatch.setattr(ParameterShard, "push", push)
    pushed = []
    with served(adagrad(0.05)) as shards:
        client = connect(
            model(), shards.store, worker=0, config=DownpourConfig(fetch_every=100, fetch_delay=1)
        )
        places = set()
        for step in range(4):
            gradient(client.model, 0, step)
            if step:
                computed.release()
            pushed.append(client.buffer.grad.clone())
            places.add(client.buffer.grad.data_ptr())
            client.step()
            found = {p.grad.data_ptr() for p in client.model.parameters()}
            assert client.buffer.grad.data_ptr() in found
        computed.release()
        client.close()
    assert places == {vector.data_ptr() for vector in client._lent}
    assert len(applied) == 4
    assert all(torch.equal(a, b) for a, b in zip(applied, pushed, strict=True))


def test_a_shard_that_is_started_again_and_can_not_read_gradients_gets_them_in_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    def refuse(*arguments: object) -> Gradients:
        raise OSError("Permission denied")

    store = tcp_store()
    options = {"server": serving.ServerConfig(snapshots=tmp_path)}
    shards = Served(store, adagrad(0.05), 1, **options)
    client = connect(
        model(),
        store,
        worker=0,
        config=DownpourConfig(fetch_delay=0),
        patience=ConnectConfig(beat_every=0.2),
    )
    lends = []
    for step in range(6):
        gradient(client.model, 0, step)
        if step == 3:
            shards.stop()
            monkeypatch.setattr(Gradients, "open", refuse)
            shards = Served(store, adagrad(0.05), 1, **options)
        client.step()
        lends.append(client.links.lines[0].lends)
    client.close()
    shards.stop()
    assert lends == [True] * 3 + [False] * 3
    virtual = run(uneven(1, steps=6), adagrad(0.05), fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def test_one_of_two_shards_reads_gradients_and_the_other_gets_messages(
    monkeypatch: pytest.MonkeyPatch,
):
    genuine = serving._room_of
    monkeypatch.setattr(
        serving, "_room_of", lambda hello, end: None if hello["start"] else genuine(hello, end)
    )
    with served(adagrad(0.05), shards=2) as shards:
        client = replica(shards.store, 0, 4, shards=2, config=DownpourConfig(fetch_delay=0))
    assert [line.lends for line in client.links.lines] == [True, False]
    virtual = run(uneven(1, steps=4), adagrad(0.05), shards=2, fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def _counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often an end of a shard has summed a push."""
    seen, genuine = [], endpoint.all_finite

    def look(numbers: Tensor) -> bool:
        seen.append(numbers)
        return genuine(numbers)

    monkeypatch.setattr(endpoint, "all_finite", look)
    return lambda: len(seen)


def test_a_checked_push_is_summed_once(monkeypatch: pytest.MonkeyPatch):
    count, sent, genuine = _counted(monkeypatch), [], Endpoint.read_push

    def read(end: Endpoint, request: Request, whole: Tensor) -> None:
        sent.append((request.kind, request.checked))
        genuine(end, request, whole)

    monkeypatch.setattr(Endpoint, "read_push", read)
    with served(adagrad(0.05)) as shards:
        replica(shards.store, 0, 4, config=DownpourConfig(fetch_delay=0))
    assert sent == [(kind, n) for n in range(1, 5) for kind in (Kind.CHECK, Kind.PUSH)]
    assert count() == shards.reports[0].counts.applied == 4


def test_what_a_check_has_seen_holds_for_its_own_push_only(monkeypatch: pytest.MonkeyPatch):
    count = _counted(monkeypatch)
    shard = ParameterShard(4, adagrad(0.1))
    shard.initialize(torch.ones(4))
    shard.join(0, 1)
    vectors = [torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])]
    end = Endpoint(shard, push_codec=None, fetch_codec=None, gradients=vectors)
    sequence = iter(range(1, 9))

    def ask(kind: Kind, near: int, checked: int) -> Verdict | None:
        number = 0 if kind == Kind.CHECK else next(sequence)
        request = Request(kind, 0, 1, sequence=number, near=near, checked=checked)
        end.read_push(request, message())
        return None if kind == Kind.CHECK else Verdict(Reply.of(end.push(request)).verdict)

    before = shard.parameter.detach().clone()
    assert end.push_bytes == 0
    ask(Kind.CHECK, 2, 1)
    assert ask(Kind.PUSH, 2, 1) == Verdict.NOT_FINITE
    assert count() == 1
    ask(Kind.CHECK, 1, 2)  # its replica found a number that is not finite, and pushes later
    assert ask(Kind.PUSH, 2, 0) == Verdict.NOT_FINITE
    ask(Kind.CHECK, 1, 3)
    assert ask(Kind.PUSH, 2, 4) == Verdict.NOT_FINITE
    assert torch.equal(shard.parameter, before)
    assert shard.counts.refused == {"NOT_FINITE": 3}
    ask(Kind.CHECK, 2, 5)
    assert ask(Kind.PUSH, 1, 0) == Verdict.APPLIED
    assert count() == 7
    assert not torch.equal(shard.parameter, before)


def test_gradients_of_another_size_are_refused_and_their_file_is_closed():
    before = _files()
    made = Gradients.make(100, torch.float32)
    other = Gradients.open(made.address, 100, torch.float32)
    made.vectors[1][7] = 3.0
    assert other.part(6, 2)[1].tolist() == [0.0, 3.0]
    with pytest.raises(OSError, match="two vectors of 200"):
        Gradients.open(made.address, 200, torch.float32)
    made.close()
    made.close()  # the number may be another file's: it is closed once
    with pytest.raises(OSError, match="No such file"):
        Gradients.open(made.address, 100, torch.float32)
    del made, other
    assert _files() <= before
