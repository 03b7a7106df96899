"""Collectives among the ranks of one host through POSIX shared memory
(csrc/native/shared_memory.cpp): CPU tensors only.

    rank 0 makes the region -- its name goes round -- the others map it -- all say so -- rank 0
    removes the name

From then on no file is left behind, whatever dies. Sums are in rank order, fp32 inside for 16-bit
and rounded once: the same bits as two_shot.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Transport, exchange_bytes
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.ops.library import native

__all__ = ["AGREEMENT", "SharedMemory", "Unavailable", "host"]

SPINS_ALONE = 64  # the caller has nothing better to do than to wait
SPINS_BESIDE_COMPUTE = (
    8  # spinning would take the processor from the computation that the collective hides behind
)
AGREEMENT = (
    1  # tag of an all_gather by which ranks compare what they are about to do some other way
)
_WIDTH = 512
_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}
_NAMES = {code: str(dtype) for dtype, code in reversed(_CODES.items())}
_KINDS = {1: "all_reduce", 2: "reduce_scatter", 3: "all_gather"}
_DISAGREE, _DIED, _STALLED = 1, 2, 3


class Unavailable(Exception):
    """These ranks can't share memory; the text says why."""


def host() -> str:
    """The same text for processes that see one another and one /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists() or not os.path.isdir("/dev/shm"):
        return f"no shared memory on this system {secrets.token_hex(4)}"
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {namespace} {os.stat('/dev/shm').st_dev}"


class SharedMemory:
    """One rank's end. Every method is a collective: all ranks of the transport call it in the same
    order."""

    def __init__(self, transport: Transport, *, timeout: float) -> None:
        """Collective. Raises Unavailable, on every rank alike, when the ranks are on several hosts
        or something is missing."""
        self.rank, self.size, self.timeout = transport.rank, transport.size, timeout
        module = native()
        name, problem = (
            f"/pyops-{secrets.token_hex(8)}",
            "" if module is not None else "pyops was built without kernels",
        )
        if not problem and self.rank == 0:
            problem = self._open(module, name, create=True)
        try:
            messages = self._tell(transport, {"host": host(), "name": name, "problem": problem})
            if any(message["host"] != messages[0]["host"] for message in messages):
                problem = "the ranks are on several hosts"
            problem = problem or next(
                (message["problem"] for message in messages if message["problem"]), ""
            )
            if not problem and self.rank > 0:
                problem = self._open(module, messages[0]["name"], create=False)
            problems = [
                message["problem"] for message in self._tell(transport, {"problem": problem})
            ]
        finally:  # all have mapped it, or one never will
            if hasattr(self, "_ring") and self.rank == 0:
                self._ring.unlink()
        if any(problems):
            raise Unavailable(next(p for p in problems if p))

    def _open(self, module: Any, name: str, *, create: bool) -> str:
        try:
            # Slots of at most 4 MiB a rank, 32 MiB in all up to 16 ranks: containers often have no
            # more than 64 MiB.
            chunk_bytes = max(256 << 10, (4 << 20) // max(4, self.size) // 4096 * 4096)
            self._ring = module.SharedMemoryRing(name, self.rank, self.size, create, chunk_bytes)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    @staticmethod
    def _tell(transport: Transport, message: dict[str, str]) -> list[dict[str, str]]:
        payload = json.dumps({key: value[:200] for key, value in message.items()}).encode()
        return [
            json.loads(text.rstrip(b"\0"))
            for text in exchange_bytes(transport, payload, width=_WIDTH)
        ]

    def all_reduce(
        self, x: Tensor, *, scale: float = 1.0, tag: int = 0, spins: int = SPINS_ALONE
    ) -> None:
        """x = scale * (sum over ranks in rank order), in place.

        Args:
            x: Flat, contiguous, as `arithmetic.summable_view` gives it.
        """
        status = self._ring.all_reduce(
            x.data_ptr(), x.numel(), _CODES[x.dtype], scale, tag, spins, self.timeout
        )
        if status:
            self._raise(status, "all_reduce")

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        *,
        starts: list[int],
        scale: float = 1.0,
        tag: int = 0,
        spins: int = SPINS_ALONE,
    ) -> None:
        """out = scale * (sum over ranks of x[starts[rank]:starts[rank + 1]])."""
        status = self._ring.reduce_scatter(
            x.data_ptr(), out.data_ptr(), starts, _CODES[x.dtype], scale, tag, spins, self.timeout
        )
        if status:
            self._raise(status, "reduce_scatter")

    def all_gather(
        self, x: Tensor, out: Tensor, *, starts: list[int], tag: int = 0, spins: int = SPINS_ALONE
    ) -> None:
        """out[starts[p]:starts[p + 1]] = rank p's x. Any dtype."""
        in_bytes = [start * x.element_size() for start in starts]
        status = self._ring.all_gather(
            x.data_ptr(), out.data_ptr(), in_bytes, tag, spins, self.timeout
        )
        if status:
            self._raise(status, "all_gather" if tag != AGREEMENT else "comparing what comes next")

    def _raise(self, status: int, what: str) -> None:
        code, peer = status % 256, status // 256
        where = f"rank {self.rank}: {what} over shared memory failed: "
        if code == _DISAGREE:
            theirs, ours = self._describe(peer), self._describe(self.rank)
            raise DisagreementError(
                f"{where}this rank called {ours}, rank {peer} called {theirs}; ranks "
                "must call the same collectives in the "
                "same order, with equal shapes, dtypes and options",
                ranks=[peer],
            )
        if peer == self.rank:
            raise CommunicationError(
                f"{where}the others gave up, because this rank came too late", ranks=[peer]
            )
        reason = (
            "died"
            if code == _DIED
            else f"stalled: no sign of it within the group's timeout of {self.timeout:g} s"
        )
        raise CommunicationError(f"{where}rank {peer} {reason}", ranks=[peer])

    def _describe(self, rank: int) -> str:
        kind, count, dtype, _, tag = self._ring.signature(rank)
        kind_name = _KINDS.get(kind, "another collective")
        if kind == 3 and tag == AGREEMENT:
            return "a collective that does not go through shared memory"
        if kind == 1:
            return f"{kind_name} of {count} elements of {_NAMES.get(dtype, '?')}" + (
                f" with tag {tag}" if tag else ""
            )
        return f"{kind_name}" + (f" of {_NAMES.get(dtype, '?')}" if kind == 2 else "")
