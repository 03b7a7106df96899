"""A buffer of symmetric memory: memory of this rank that the other ranks see, and its collectives.

all_reduce, reduce_scatter -- in symmetric memory --> a kernel over every rank's buffer
                           -- in ordinary memory ---> the backend's own collective
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.arithmetic import scale_in_place
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.failure import PeerError
from pyops.ops.communication.reduce import scale_cast_
from pyops.ops.optimizers.grad_norm import squared_norm

__all__ = ["BufferMemory", "SymmetricBuffer"]


class BufferMemory(Protocol):
    """What a buffer needs of the memory that it lies in, which is a `SymmetricMemory`."""

    buffers: list[SymmetricBuffer]

    def two_shot(
        self,
        buffer: SymmetricBuffer,
        out: SymmetricBuffer,
        scale: float,
        *,
        norm: Tensor | None = None,
    ) -> Tensor:
        """out = scale * (sum of the buffer over ranks), on every rank."""

    def scatter(
        self,
        buffer: SymmetricBuffer,
        flat: Tensor,
        out: Tensor,
        *,
        starts: list[int],
        scale: float,
        norm: Tensor | None = None,
    ) -> Tensor:
        """out = scale * (sum over ranks of flat[starts[rank]:starts[rank + 1]])."""

    def multimem(self, buffer: SymmetricBuffer, scale: float) -> Tensor:
        """The sum by the switch, in place."""

    def tell(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Collective."""

    def synchronize(self) -> None:
        """Wait for this rank's device."""


@dataclass(eq=False)
class SymmetricBuffer:
    """Memory of this rank that the others see. `symmetric_empty` makes it."""

    tensor: Tensor
    """This rank's, flat. Ordinary memory where the group has no symmetric memory."""

    ranks: list[Tensor] = field(default_factory=list, repr=False)
    """Every rank's, as this rank sees it, in the order of ranks; empty for ordinary memory."""

    communicator: Communicator | None = field(default=None, repr=False)
    multicast: bool = False
    """Whether the switch can add (NVLS), on every rank."""

    freed: bool = False
    used: Any = field(default=None, repr=False)  # the event after the last kernel that uses it
    memory: BufferMemory | None = field(default=None, repr=False)
    """What it lies in; None for ordinary memory."""

    def _memory(self) -> tuple[Communicator, BufferMemory | None]:
        if self.freed or self.communicator is None:
            raise ValueError("this symmetric buffer was freed; make a new one by symmetric_empty")
        return self.communicator, self.memory

    def all_reduce(
        self,
        *,
        op: str = "sum",
        main: SymmetricBuffer | None = None,
        norm: Tensor | None = None,
        multimem: bool = False,
    ) -> Tensor:
        """The buffer's sum, or mean, over the ranks, in place. Collective.

        Args:
            op: "sum" or "mean".
            main: A buffer of as many fp32 numbers, which gets the sum before it is rounded; this
                one then stays as it is.
            norm: float64 [2], which gets the sum of squares of the result, and how many elements
                are inf or nan: `squared_norm` of it, with the same bits on all ranks.
            multimem: Whether the switch may add where it can (fp32 and bf16, without `main` and
                `norm`): fp32 inside, in an order of its own.

        Returns:
            The result: this buffer's tensor, or that of `main`.
        """
        scale = self._scale_of(op)
        if main is not None and (
            main.tensor.dtype != torch.float32 or main.tensor.numel() != self.tensor.numel()
        ):
            raise ValueError(
                f"main is {main.tensor.numel()} elements of {main.tensor.dtype}; give a symmetric "
                f"buffer of {self.tensor.numel()} elements of float32"
            )
        out = self if main is None else main
        comm, memory = self._memory()
        if memory is None:
            return _run(comm, "all_reduce", self.tensor, lambda: self._native(out, scale, norm))
        simple = main is None and norm is None and self.tensor.dtype != torch.float16
        if multimem and self.multicast and simple:
            return _run(comm, "all_reduce", self.tensor, lambda: memory.multimem(self, scale))
        return _run(
            comm, "all_reduce", self.tensor, lambda: memory.two_shot(self, out, scale, norm=norm)
        )

    def reduce_scatter(
        self, out: Tensor, *, starts: list[int], op: str = "sum", norm: Tensor | None = None
    ) -> Tensor:
        """This rank's part of the sum, or mean: out = that of [starts[rank]:starts[rank + 1]].
        Collective.

        Args:
            out: Flat, of the buffer's dtype or fp32 (then not rounded), this rank's alone.
            starts: Where the ranks' parts begin, and the end of the last.
            op: "sum" or "mean".
            norm: As for `all_reduce`, but of `out`: those of all ranks add up.
        """
        scale = self._scale_of(op)
        comm, memory = self._memory()
        if len(starts) != comm.size + 1 or out.numel() != starts[comm.rank + 1] - starts[comm.rank]:
            raise ValueError(
                f"out has {out.numel()} elements, and starts are {starts}; give the parts of "
                f"{comm.size} ranks, and an out of this rank's size"
            )

        def native() -> Tensor:
            total = self.tensor.clone()
            _sum_natively(comm, total)
            scale_cast_(out, total[starts[comm.rank] : starts[comm.rank + 1]], scale=scale)
            return _with_norm(out, norm)

        if memory is None:
            return _run(comm, "reduce_scatter", self.tensor, native)
        return _run(
            comm,
            "reduce_scatter",
            self.tensor,
            lambda: memory.scatter(self, self.tensor, out, starts=starts, scale=scale, norm=norm),
        )

    def free(self, *, wait: bool = False) -> None:
        """Give the memory back. Collective.

        Args:
            wait: Whether to wait for this rank's device before.

        Raises:
            ValueError: On all ranks alike, while a kernel of any of them uses it.
        """
        _, memory = self._memory()
        if memory is not None:
            if wait:
                memory.synchronize()
            busy = self.used is not None and not self.used.query()
            told = memory.tell("in use" if busy else "")
            if using := [rank for rank, text in enumerate(told) if text]:
                raise ValueError(
                    f"this symmetric buffer is still in use by the kernels of ranks {using}, which "
                    "read every rank's memory; synchronize the device on all ranks, and free it "
                    "then"
                )
            memory.buffers.remove(self)
        self.freed, self.ranks, self.communicator, self.memory = True, [], None, None
        self.tensor = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)

    def _scale_of(self, op: str) -> float:
        if op not in ("sum", "mean"):
            raise ValueError(f"op must be 'sum' or 'mean', got {op!r}")
        return 1.0 / self._memory()[0].size if op == "mean" else 1.0

    def _native(self, out: SymmetricBuffer, scale: float, norm: Tensor | None) -> Tensor:
        comm, _ = self._memory()
        if out is not self:
            out.tensor.copy_(self.tensor)
        _sum_natively(comm, out.tensor)
        scale_in_place(out.tensor, scale=scale)
        return _with_norm(out.tensor, norm)


def _sum_natively(comm: Communicator, x: Tensor) -> None:
    if comm.size == 1:
        return
    try:
        dist.all_reduce(x, group=comm.group)
    except RuntimeError as error:
        raise PeerError(-1, error) from error


def _with_norm(x: Tensor, norm: Tensor | None) -> Tensor:
    if norm is not None:
        norm.copy_(squared_norm([x]))
    return x


def _run(comm: Communicator, what: str, tensor: Tensor, call: Callable[[], Tensor]) -> Tensor:
    text = f"{what} of a symmetric buffer ({tensor.numel()} elements of {tensor.dtype})"
    with torch.no_grad():
        found: Tensor = comm.run(
            lambda spins: call(), what=text, tensor=tensor, async_op=False, direct=tensor.is_cuda
        )
    return found
