"""Memory that a shard and a replica of one host share: the same numbers as over the wire, and never
a part of a push."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pyops.comm import Int8
from pyops.parameter_server import ConnectConfig, DownpourConfig, connect, connecting, serving
from pyops.parameter_server.messages import HEADER_BYTES
from pyops.parameter_server.session import Room
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
    virtual = run(uneven(1, steps=6), adagrad(0.05), shards=2, **options)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def _files() -> set[str]:
    names = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            names.add(f"{file.name} {os.readlink(file)}")
        except OSError:  # the folder's own
            continue
    return {name for name in names if "pyops-session" in name}


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
    assert _files() == before
    virtual = run(uneven(1, steps=4), adagrad(0.05), fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)


def test_a_room_of_another_size_is_refused_and_files_are_closed():
    before = _files()
    room = Room.make(100, 64)
    assert [len(part) for part in (room.pushes, room.fetches)] == [
        HEADER_BYTES + 128,
        HEADER_BYTES + 64,
    ]
    with pytest.raises(OSError, match="a room of 448 bytes"):
        Room.open(room.address, 100, 65)
    other = Room.open(room.address, 100, 64)
    room.pushes[5], room.fetches[7] = 3, 4
    assert (int(other.pushes[5]), int(other.fetches[7])) == (3, 4)
    room.close()
    with pytest.raises(OSError, match="No such file"):
        Room.open(room.address, 100, 64)
    del room, other
    assert _files() == before


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
