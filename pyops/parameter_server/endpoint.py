"""Endpoint: a shard's end of one replica's session, from message to message.

push message  -> Part.read -> ParameterShard.push  -> reply
fetch message -> ParameterShard.fetch -> Part.write -> reply with parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyops.comm.compression.codec import Codec
from pyops.parameter_server.messages import HEADER_BYTES, Request, Verdict, message
from pyops.parameter_server.shard import Loan, ParameterShard
from pyops.parameter_server.vectors import Part, all_finite

__all__ = ["Endpoint"]


class Endpoint:
    """What a shard keeps for one replica's session.

    Args:
        shard: The shard.
        push_codec: How pushes are written.
        fetch_codec: How fetches are written: as differences to what the replica has, which is
            kept here, one vector for each session.
        loan: Of a replica that can read the shard's parameters where they lie.
        gradients: Vectors of a replica that are read where they lie; without a codec only.
    """

    def __init__(
        self,
        shard: ParameterShard,
        *,
        push_codec: Codec | None,
        fetch_codec: Codec | None,
        loan: Loan | None = None,
        gradients: Sequence[Tensor] = (),
    ) -> None:
        numel, dtype = shard.parameter.numel(), shard.parameter.dtype
        self.shard, self.loan, self.gradients = shard, loan, gradients
        self.pushes = Part(numel, dtype=dtype, codec=push_codec)
        self.fetches = Part(numel, dtype=dtype, codec=fetch_codec)
        kept = numel if push_codec else 0
        self._gradient = torch.zeros(kept, dtype=dtype, device="cpu")
        self._finite, self._checked = True, 0  # of _gradient, and in which check that was seen
        self._sent = torch.zeros(numel, dtype=dtype, device="cpu") if fetch_codec else None

    @property
    def push_bytes(self) -> int:
        """Bytes of a push that come in its message."""
        return 0 if self.gradients else self.pushes.payload_bytes

    def read_push(self, request: Request, whole: Tensor) -> None:
        """Decode what is pushed or is to be checked, and see whether it is finite; the shard is not
        touched, so other sessions may use it meanwhile. A push without a codec is used where it
        lies, until the next."""
        payload = whole[HEADER_BYTES:]
        if self.gradients:
            self._gradient = self.gradients[request.near - 1]
        elif self.pushes.codec is None:
            self._gradient = payload.view(self._gradient.dtype)
        else:
            self.pushes.read(payload, self._gradient)
        if request.checked == 0 or request.checked != self._checked:
            self._finite = all_finite(self._gradient)
        self._checked = request.checked

    def push(self, request: Request) -> Tensor:
        """Apply the push that was read; the reply's message."""
        return self.shard.push(request, self._gradient, finite=self._finite).write(message())

    def fetch(self, request: Request, room: Callable[[int], Tensor] = message) -> Tensor:
        """The reply's message, with parameters as the request asks for them.

        Args:
            request: What is asked for.
            room: Where the message is written: of the bytes of its payload.
        """
        reply, values = self.shard.fetch(request)
        if (
            self.loan is not None
            and request.near
            and self._sent is None
            and reply.verdict == Verdict.FETCHED
        ):
            self.shard.lend(self.loan, request.sequence)
            return replace(reply, near=1).write(message())
        entire = bool(request.whole)
        answer = room(self.fetches.whole_bytes if entire else self.fetches.payload_bytes)
        payload = answer[HEADER_BYTES:]
        if reply.verdict != Verdict.FETCHED:
            payload.zero_()
        elif self._sent is None or entire:
            self.fetches.write(values, payload, whole=True)
            if self._sent is not None:
                self._sent.copy_(values)
        else:
            self.fetches.write(values - self._sent, payload)
            difference = torch.empty_like(values)
            self.fetches.read(payload, difference)
            self._sent += difference
        return reply.write(answer)
