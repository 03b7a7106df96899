"""What replicas and shards say to each other: a header of 16 whole numbers, and a payload.

    check   Request                -->
    push    Request + gradients    -->                      <--   Reply
    fetch   Request                -->                      <--   Reply + parameters

A message is one tensor of bytes, so that it arrives whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "HEADER_BYTES",
    "Fetched",
    "Kind",
    "Links",
    "Pending",
    "Reply",
    "Request",
    "Verdict",
    "message",
]

NUMBERS = 16  # of a header
HEADER_BYTES = 8 * NUMBERS
MARK = 0x70796F7073  # the first number of every header


class Kind(IntEnum):
    """What a replica asks for."""

    VALUES = 1
    PUSH = 2
    FETCH = 3
    LEAVE = 4
    CHECK = 5


class Verdict(IntEnum):
    """What a shard did with a request."""

    APPLIED = 1
    REPEATED = 2
    OLD_INCARNATION = 3
    OLD_EPOCH = 4
    NOT_FINITE = 5
    TOO_STALE = 6
    FETCHED = 7


def message(payload_bytes: int = 0) -> Tensor:
    """Room for a message: uint8 [HEADER_BYTES + payload_bytes], not set."""
    return torch.empty(HEADER_BYTES + payload_bytes, dtype=torch.uint8, device="cpu")


def _write(whole: Tensor, header: Sequence[int]) -> Tensor:
    numbers = [MARK, *header]
    numbers += [0] * (NUMBERS - len(numbers))
    whole[:HEADER_BYTES] = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)
    return whole


def _numbers(whole: Tensor, count: int) -> list[int]:
    numbers: list[int] = whole[:HEADER_BYTES].clone().view(torch.int64).tolist()
    if numbers[0] != MARK:
        raise ValueError(
            f"a message begins with {numbers[0]}, not with {MARK}; let no other program connect to "
            "the shards' addresses"
        )
    return numbers[1 : 1 + count]


@dataclass(frozen=True)
class Request:
    """What a replica sends.

    Attributes:
        kind: A Kind.
        worker: The replica's number, and `incarnation`: which start of it this is.
        epoch: The start of the shard that the replica has seen last.
        sequence: Of a push: 1, 2, ...; of a fetch: how many came before it.
        seen: The version of the parameters that the gradients of a push saw.
        count: Gradients in a push.
        whole: Of a fetch: whether all numbers are asked for, as they are.
        near: Of a fetch: whether the replica can read the shard's own memory. Of a push: which of
            the replica's vectors holds it, 1 or 2; 0: it is in the message.
        checked: Of a check: its number, from 1. Of a push: which check saw these gradients; 0:
            none did.
        after: Of a fetch: the push of this replica behind which it is answered; 0: at once.
    """

    kind: int
    worker: int
    incarnation: int
    epoch: int = 0
    sequence: int = 0
    seen: int = 0
    count: int = 0
    whole: int = 0
    near: int = 0
    checked: int = 0
    after: int = 0

    def write(self, whole: Tensor) -> Tensor:
        """Write the request into a message; returns the message."""
        return _write(whole, astuple(self))

    @classmethod
    def of(cls, whole: Tensor) -> Request:
        """The request of a message. ValueError where it is none."""
        return cls(*_numbers(whole, 11))


@dataclass(frozen=True)
class Reply:
    """What a shard answers.

    Attributes:
        verdict: A Verdict.
        version: Of the shard's parameters, after the request.
        epoch: The start of the shard.
        staleness: Of a push: the version it was applied to, less the version that it saw.
        known: The sequence of the last push of this replica that the shard has counted.
        near: Of a fetch: whether the parameters are to be read in the shard's own memory.
    """

    verdict: int
    version: int = 0
    epoch: int = 0
    staleness: int = 0
    known: int = 0
    near: int = 0

    def write(self, whole: Tensor) -> Tensor:
        """Write the reply into a message; returns the message."""
        return _write(whole, astuple(self))

    @classmethod
    def of(cls, whole: Tensor) -> Reply:
        """The reply of a message. ValueError where it is none."""
        return cls(*_numbers(whole, 6))


class Fetched:
    """What a fetch has brought.

    Args:
        answer: The reply's message.
        whole: Whether the parameters in it are whole.

    Attributes:
        reply: The reply.
    """

    def __init__(self, answer: Tensor, *, whole: bool) -> None:
        self.reply, self.whole = Reply.of(answer), whole
        self._payload = answer[HEADER_BYTES:]

    def payloads(self) -> Iterator[Tensor]:
        """What is to be read, once: the parameters. Where a second one follows, the first was
        overwritten while it was read, and the second takes its place."""
        yield self._payload


class Pending(Protocol):
    """An exchange that was begun; a Future is one."""

    def done(self) -> bool:
        """Whether the reply is there."""
        ...

    def result(self) -> Any:
        """Wait for the reply: a message, header and payload. Raises what went wrong."""
        ...


class Links(Protocol):
    """A replica's ways to the shards, whatever carries them."""

    @property
    def starts(self) -> Sequence[int]:
        """Where each shard's part of the vector begins, and the end."""
        ...

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Two vectors that shards read where they lie: gradients are computed in one while a push
        is read in the other. Empty where no shard can."""
        ...

    def message(self, shard: int, payload_bytes: int) -> Tensor:
        """Where the message of a push is best written; the push before has been answered."""
        ...

    def check(self, shard: int, request: Request) -> None:
        """Have a shard look whether its part of one of `gradients` is finite, beside what the
        replica does until it pushes it. Nothing is answered."""
        ...

    def push(self, shard: int, request: Request, whole: Tensor | None) -> Pending:
        """Begin a push. The result is the reply's message.

        Args:
            shard: Which one.
            request: What is written into the message's header, but for the epoch of the shard,
                which the links know.
            whole: The message, whose payload is written; it is the links' from now on. None: the
                payload lies in `gradients[request.near - 1]`, and stays until the reply is there.
        """
        ...

    def fetch(self, shard: int, request: Request, reply_bytes: Callable[[bool], int]) -> Pending:
        """Begin a fetch. The result is a Fetched.

        Args:
            shard: Which one.
            request: Where it asks for differences, a new session asks for whole parameters
                instead.
            reply_bytes: Bytes of the reply's payload, of whole parameters or of differences.
        """
        ...

    def close(self) -> None:
        """Say goodbye to the shards and end the sessions."""
        ...
