"""A replica that is killed at any byte of its pushes: each shard has all of a push or nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pyops.comm import Int8
from pyops.comm.compression.codec import Codec
from pyops.optim import Adagrad
from pyops.parameter_server import ParameterShard, ServerConfig
from pyops.parameter_server.endpoint import Endpoint
from pyops.parameter_server.messages import HEADER_BYTES, Kind, Reply, Request, Verdict, message
from pyops.parameter_server.serving import _Replica, _Serving
from pyops.parameter_server.sessions.session import Tag
from pyops.parameter_server.sessions.turns import Turns
from pyops.parameter_server.vectors import Part
from tests.parameter_server.shard_threads import tcp_store

pytestmark = pytest.mark.cpu_only
NUMEL, SHARDS = 7, 2


class CutSession:
    """A session whose other end dies after so many bytes: what has come is in the buffer of the
    receive that fails, as Gloo leaves it there."""

    def __init__(self, sent: Tensor) -> None:
        self._sent, self._at = sent, 0
        self.replies: list[Reply] = []

    def buffer(self, tag: int, payload_bytes: int) -> Tensor:
        return message(payload_bytes)

    def receive(self, buffer: Tensor, tag: int) -> Tensor:
        here = self._sent[self._at : self._at + buffer.numel()]
        self._at += here.numel()
        buffer[: here.numel()] = here
        if here.numel() < buffer.numel():
            raise RuntimeError("Connection closed by peer")
        return buffer

    def receive_payload(self, whole: Tensor, turns: Turns) -> None:
        with turns.turn(len(whole) - HEADER_BYTES):
            self.receive(whole[HEADER_BYTES:], Tag.PAYLOAD)

    def send(self, reply: Tensor, tag: int) -> None:
        self.replies.append(Reply.of(reply))


def adagrad(flat: torch.nn.Parameter) -> torch.optim.Optimizer:
    return Adagrad([flat], lr=0.1)


class Served:
    """A shard that a replica has joined."""

    def __init__(self, store, codec: Codec | None) -> None:
        self.codec = codec
        self.held = ParameterShard(NUMEL, adagrad)
        self.held.initialize(torch.linspace(-1, 1, NUMEL))
        self.held.join(0, 1)
        self._serving = _Serving(store, adagrad, (0, 1), None, ServerConfig())
        self._serving._held = self.held

    def push(self, sequence: int) -> Tensor:
        """The bytes of a push."""
        part = Part(NUMEL, dtype=torch.float32, codec=self.codec)
        whole = message(part.payload_bytes)
        part.write(torch.arange(1.0, NUMEL + 1) * sequence, whole[HEADER_BYTES:])
        return Request(Kind.PUSH, 0, 1, sequence=sequence, count=1).write(whole)

    def receives(self, sent: Tensor) -> list[Reply]:
        """A session in which so many bytes come and nothing after them."""
        session = CutSession(sent)
        replica = _Replica(0, 1, session=session)  # type: ignore[arg-type]
        end = Endpoint(self.held, push_codec=self.codec, fetch_codec=None)
        self._serving._run(self._serving._pushes, replica, end)
        assert replica.over
        assert self._serving._failed is None
        self.held.join(0, 1)
        return session.replies

    def state(self) -> tuple[Tensor, ...]:
        (kept,) = self.held.optimizer.state.values()
        return (self.held.parameter.detach().clone(), *(kept[name].clone() for name in ("sum",)))


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("codec", [None, Int8()], ids=["plain", "int8"])
def test_each_shard_has_all_of_a_push_or_nothing_at_every_byte(codec: Codec | None):
    store = tcp_store()
    plain = Served(store, codec)
    before = plain.state()
    plain.receives(plain.push(1))
    first = plain.state()
    plain.receives(plain.push(2))
    second = plain.state()
    assert not equal(before, first)
    assert not equal(first, second)
    size = len(plain.push(1))
    for killed_at in range(SHARDS * size + 1):
        for number, (a, b) in enumerate(pairwise(range(0, SHARDS * size + 1, size))):
            come = min(max(killed_at - a, 0), b - a)
            shard = Served(store, codec)
            replies = shard.receives(shard.push(1)[:come])
            whole = come == size
            assert equal(shard.state(), first if whole else before), (killed_at, number)
            assert shard.held.version == whole == len(replies)
            # Its next session sends what was not answered, and goes on.
            again = shard.receives(torch.cat([shard.push(1), shard.push(2)]))
            expected = Verdict.REPEATED if whole else Verdict.APPLIED
            assert [reply.verdict for reply in again] == [expected, Verdict.APPLIED]
            assert equal(shard.state(), second)
