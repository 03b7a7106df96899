"""Updates that come one step late: step k's gradients are applied while step k + 1 computes.

    computes    forward, backward 5       | forward, backward 6       | forward, backward 7
    parameters  after gradients 0 .. 3    | after 0 .. 4              | after 0 .. 5
    updates          gradients of 4       |      gradients of 5       |      gradients of 6
                                      step()                      step()
    step() waits for the update before it, whose result is then in the model

Ren et al., ZeRO-Offload, arXiv:2101.06840, section 5.2 (delayed parameter update): not in the first
steps, in which gradients change fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.work import ThreadWork, Worker
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState

__all__ = ["DelayedUpdate"]


class DelayedUpdate:
    """Updates of `owned` on a thread of its own.

    steps: how many there were, for checkpoints.

    Args:
        after: Steps that are taken at once, before updates are delayed.
    """

    def __init__(self, owned: ShardedOptimizerState, *, after: int) -> None:
        self._owned, self._after = owned, after
        self.steps = 0
        self._worker = Worker("delayed update")
        self._work: ThreadWork | None = None
        device = owned.flats[0].device if owned.flats else torch.device("cpu")
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def active(self) -> bool:
        """Whether the next step is a delayed one."""
        return self.steps >= self._after

    def wait(self) -> None:
        """Return when no update is under way; the model has not got its result. Raises what went
        wrong in it."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def start(self, factor: Tensor | None, *, reused: Sequence[bool]) -> None:
        """Begin to step with the gradients that `owned` has, times `factor`.

        Args:
            reused: By flat, whether the next backward's gradients will lie where they do.
        """
        for each in self._owned.all_pieces():
            if each.gradient is not None and reused[each.flat]:
                each.gradient = each.gradient.clone()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            if factor is not None and factor.is_cuda:
                # The caller's stream's, and let go of by the thread while this one may yet read it.
                factor.record_stream(self._stream)
        self._work = self._worker.submit(lambda: self._step(factor))

    def _step(self, factor: Tensor | None) -> Tensor:
        if self._stream is None:
            self._owned.step(factor=factor)
        else:
            with torch.cuda.stream(self._stream):
                self._owned.step(factor=factor)
        return torch.empty(0, device="cpu")
