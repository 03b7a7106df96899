"""Mailbox: messages between two processes of a host arrive whole and in order, and never where
there is no room."""

from __future__ import annotations

import secrets
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from pyops.ops.library import native
from tests.workers import fork_server

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="pyops was built without kernels"),
]


def both_ends(nbytes: int = 4096):
    name = f"/pyops-test-{secrets.token_hex(8)}"
    writer = native().Mailbox(name, True, nbytes)
    try:
        reader = native().Mailbox(name, False, nbytes)
    finally:
        writer.unlink()
    return writer, reader


def received(reader, *, timeout: float = 5.0) -> torch.Tensor:
    size = reader.wait(64, timeout)
    assert size >= 0, size
    message = torch.empty(size, dtype=torch.uint8)
    reader.take(message.data_ptr())
    return message


def test_messages_of_all_sizes_around_the_end_of_the_ring():
    writer, reader = both_ends()
    generator = torch.Generator().manual_seed(0)
    for size in [
        0,
        1,
        7,
        8,
        9,
        4088,
        *torch.randint(0, 2000, (200,), generator=generator).tolist(),
    ]:
        message = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        assert not reader.ready()
        assert writer.put(message.data_ptr(), size)
        assert reader.ready()
        assert torch.equal(received(reader), message)


def test_several_wait_in_order_and_one_without_room_is_refused():
    writer, reader = both_ends()
    messages = [torch.full((1000,), i, dtype=torch.uint8) for i in range(5)]
    assert [writer.put(message.data_ptr(), 1000) for message in messages] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert torch.equal(received(reader), messages[0])
    assert writer.put(messages[4].data_ptr(), 1000)
    assert [int(received(reader)[0]) for _ in range(4)] == [1, 2, 3, 4]
    assert not writer.put(torch.zeros(5000, dtype=torch.uint8).data_ptr(), 5000)


def test_two_threads():
    writer, reader = both_ends()
    messages = [torch.arange(i % 600, dtype=torch.int32).view(torch.uint8) for i in range(3000)]

    def write() -> None:
        for message in messages:
            while not writer.put(message.data_ptr(), len(message)):
                time.sleep(
                    0
                )  # let the other thread have the interpreter, which it would wait for 5 ms

    thread = threading.Thread(target=write)
    thread.start()
    assert all(torch.equal(received(reader), message) for message in messages)
    thread.join()


def _write_nothing(name: str, pipe: Connection) -> None:
    """A writer that is there until it is killed."""
    mailbox = native().Mailbox(name, True, 4096)
    pipe.send("made")
    pipe.recv()
    del mailbox


def test_a_late_writer_and_a_dead_one():
    _, reader = both_ends()
    assert reader.wait(1, 0.05) == -3
    name = f"/pyops-test-{secrets.token_hex(8)}"
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_nothing, args=(name, theirs))
    process.start()
    assert ours.recv() == "made"
    reader = native().Mailbox(name, False, 4096)
    reader.unlink()
    process.kill()
    process.join()
    assert reader.wait(1, 30.0) == -2
