"""Bytes that a rank sends, step by step, beside those of an fp32 all-reduce of the same gradients.

{"bytes_sent": 236_000, "compression": 30.8}   compression: over the last `window` steps, for
                                               schedules that skip some
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pyops.comm.collectives.communicator import Communicator

__all__ = ["Traffic"]


class Traffic:
    """Counts what `communicator` sends; None (one rank alone): nothing is sent, and rows say
    nothing of it.

    Args:
        numel: Of all trained parameters. An fp32 all-reduce sends 2 (N - 1) / N times their 4 bytes
            each from every rank (kernels of ring and two-shot alike).
    """

    def __init__(self, communicator: Communicator | None, *, numel: int, window: int) -> None:
        self._communicator = communicator
        size = communicator.size if communicator is not None else 1
        self.uncompressed = 2 * (size - 1) / size * 4 * numel
        self._recent: deque[int] = deque(maxlen=window)
        self._before = self._count()

    def _count(self) -> int:
        return self._communicator.bytes_sent if self._communicator is not None else 0

    def step(self) -> dict[str, Any]:
        """What was sent since the last call."""
        if self._communicator is None:
            return {}
        now = self._count()
        self._recent.append(now - self._before)
        self._before = now
        total = sum(self._recent)
        ratio = {"compression": self.uncompressed * len(self._recent) / total} if total else {}
        return {"bytes_sent": self._recent[-1], **ratio}
