"""Memory that a shard and a replica of one host share: the same numbers as over the wire, and never
a part of a push."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pyops.comm import Int8
from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    ParameterShard,
    connect,
    connecting,
    serving,
)
from pyops.parameter_server.messages import HEADER_BYTES, Kind, Request
from pyops.parameter_server.session import LOADS_IN_ORDER, LentParameters, Room
from tests.open_files import open_files
from tests.parameter_server.replicas import adagrad, gradient, model, run, uneven
from tests.parameter_server.shard_threads import replica, served

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
        monkeypatch.setattr(connecting, "_opened", lambda address: None)
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
        assert isinstance(line, connecting._Line)
        gradient(client.model, 0, 0)
        client.step()
        client.settle()
        whole = client.links.message(0, client.pushes[0].payload_bytes)
        whole[HEADER_BYTES : len(whole) // 2] = 65  # half of a push, and its header never comes
        client.links.abandon()
    with served(adagrad(0.05)) as again:
        other = replica(again.store, 0, 1, config=DownpourConfig(fetch_delay=0))
    assert shards.reports[0].counts.applied == 1
    assert shards.reports[0].counts.lost_members == 1
    assert again.reports[0].version == other.step_number == 1
