"""A transport for payloads on a GPU over a group that only carries CPU tensors: by copies on the
host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Pending, Transport

__all__ = ["HostTransport"]


class HostTransport:
    """`inner` for tensors on a GPU.

    Args:
        inner: The transport of CPU tensors.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    def post(self, sends: Any, receives: Any) -> Pending:
        arriving = [
            (torch.empty(t.shape, dtype=t.dtype, device="cpu"), peer) for t, peer in receives
        ]
        pending = self._inner.post([(t.cpu(), peer) for t, peer in sends], arriving)
        return _Arriving(
            pending, [(t, host) for (t, _), (host, _) in zip(receives, arriving, strict=True)]
        )


class _Arriving:
    def __init__(self, pending: Pending, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pending, self._pairs = pending, pairs

    def wait(self) -> None:
        self._pending.wait()
        for tensor, host in self._pairs:
            tensor.copy_(host)
