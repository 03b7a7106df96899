"""Stages: what the ranks of a pipeline send one another while they generate.

    turn of a group   first stage        chosen tokens of the turn before, from the last stage
                      between            those tokens, then hidden states of each job
                      last stage         hidden states of each job; chooses

Every rank derives the size of each message from what was chosen before, so none needs a header.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Pending, ProcessGroupTransport
from pyops.tensor_parallel import Ranks

__all__ = ["Stages"]

TAG = 0x67656E  # of these messages over Gloo, which meet no others


class Stages:
    """The ranks of the stages, in order; one of them alone sends nothing.

    Args:
        ranks: One for each stage.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.stage, self.count = ranks.rank, ranks.size
        self.first, self.last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self._transport = None
        if ranks.size > 1:
            self._transport = ProcessGroupTransport(ranks.process_group, tag=TAG)
        self._sending: list[Pending] = []

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage.

        Args:
            hidden: Any tensor; it must not be changed afterwards.
        """
        self._send(hidden, self.stage + 1)

    def receive(self, like: Tensor) -> Tensor:
        """Hidden states from the stage before.

        Args:
            like: Of their shape, dtype and device.
        """
        return self._receive(like, self.stage - 1)

    def chosen(self, own: Tensor | None, *, like: Tensor) -> Tensor:
        """What the last stage chose, on every stage. The last stage, which has it, sends it to the
        first, and each of the others to the next.

        Args:
            own: On the last stage; None on others.
            like: Of its shape, dtype and device.
        """
        if own is not None:
            return own
        found = self._receive(like, (self.stage - 1) % self.count)
        if self.stage + 2 < self.count:
            self._send(found, self.stage + 1)
        return found

    def announce(self, chosen: Tensor) -> None:
        """On the last stage: send what was chosen to the first.

        Args:
            chosen: Tokens and their ln p.
        """
        if self.count > 1:
            self._send(chosen, 0)

    def finish(self) -> None:
        """Wait until all has been sent."""
        while self._sending:
            self._sending.pop(0).wait()

    def _send(self, message: Tensor, stage: int) -> None:
        assert self._transport is not None
        while len(self._sending) > self.count:
            self._sending.pop(0).wait()
        self._sending.append(self._transport.post([(message.contiguous(), stage)], []))

    def _receive(self, like: Tensor, stage: int) -> Tensor:
        assert self._transport is not None
        found = torch.empty_like(like)
        self._transport.post([], [(found, stage)]).wait()
        return found
