"""How the inputs of a recomputed part are kept until backward: copies of them, or of this rank's
share of each.

x [2, 3, 5] of strides s  ->  30 elements in memory order  ->  rank r's part  ->  an arena, host
                                                                                  memory, or a clone
backward:   all-gather of the parts  ->  strides s again, so that kernels take the same path and
                                         give the same bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.functional import all_gather
from pyops.comm.collectives.work import StreamWork, Work
from pyops.recompute.arena import Arena

__all__ = ["Keeping", "Kept", "keeping_of"]


LABEL = "the input of a recomputed part"


class Kept(NamedTuple):
    """A copy of an input, or of a part of it.

    Attributes:
        part: 1-D.
        ready: Of a copy to the host that may still be under way.
    """

    part: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    ready: Any = None


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The elements as a 1-D tensor, and the strides that lay them out again.

    A dense tensor, whatever the order of its dims, is not copied. Gaps between elements and
    repeated elements go.
    """
    dense = torch.empty_like(
        tensor, device="meta"
    )  # torch keeps the order of the dims, and closes gaps
    order = dense.stride()
    if tensor.stride() != order:
        tensor = torch.empty_strided(
            tensor.shape, order, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()


@dataclass(frozen=True)
class Keeping:
    """What happens to inputs between forward and backward; pack and unpack are hooks of
    torch.autograd.graph.

    Attributes:
        group: Inputs are equal on its ranks, and each keeps a part; None: whole.
        offload: CUDA tensors go to pinned host memory.
        arena: Where the copies lie; None: memory of their own.
    """

    group: dist.ProcessGroup | None = None
    offload: bool = False
    arena: Arena | None = None

    def pack(self, tensor: Tensor) -> Kept | Tensor:
        """Copy an input, or this rank's part. A tensor without strides is kept as it is."""
        if tensor.layout != torch.strided:
            return tensor
        with torch.no_grad():
            if tensor.numel() == 0:
                return tensor.clone()  # it may be a part of something that should go
            flat, strides = _in_memory_order(tensor.resolve_conj().resolve_neg())
            if self.group is not None:
                flat = flat.tensor_split(dist.get_world_size(self.group))[dist.get_rank(self.group)]
            part, ready = self._put(flat)
            return Kept(part, tensor.shape, strides, tensor.device, ready)

    def _put(self, flat: Tensor) -> tuple[Tensor, Any]:
        """The elements somewhere else, and when they are there (None: now)."""
        if self.arena is not None:
            part = self.arena.empty(flat.shape, dtype=flat.dtype)
        elif self.offload and flat.is_cuda:
            part = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True, device="cpu")
        else:
            return flat.clone(), None
        before = self.arena.copies() if self.arena is not None else []
        if part.device == flat.device:
            for event in before:
                event.synchronize()
            return part.copy_(flat), None
        # To the host beside what the device goes on to compute, and from a copy: the input may be
        # changed in place meanwhile.
        flat = flat.clone()
        stream = torch.cuda.Stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        for event in before:  # from or to a tensor whose memory this one may have now
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            part.copy_(flat, non_blocking=True)
        flat.record_stream(stream)
        return part, self._noted(stream.record_event())

    def _noted(self, event: torch.cuda.Event) -> torch.cuda.Event:
        if self.arena is not None:
            self.arena.copying_until(event)
        return event

    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """The input as it was: values, shape, strides, device. With a group: a collective."""
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            part = kept.part
            if kept.ready is not None:
                torch.cuda.current_stream(kept.device).wait_event(kept.ready)
            if part.device != kept.device:
                part = part.to(kept.device, non_blocking=True)
                self._noted(torch.cuda.current_stream(kept.device).record_event())
            if self.group is not None:
                part = all_gather(part, group=self.group, length=kept.shape.numel(), label=LABEL)
            return part.as_strided(kept.shape, kept.strides)

    def start(self, kept: Kept) -> Work:
        """Begin what `unpack` does, beside what is computed meanwhile; `arrived` ends it. With a
        group: a collective."""
        with torch.no_grad():
            part, numel = kept.part, kept.shape.numel()
            if part.device == kept.device:
                return Work(part) if self.group is None else _gather(part, self.group, numel)
            stream = torch.cuda.Stream(kept.device)
            if kept.ready is not None:
                stream.wait_event(kept.ready)
            with torch.cuda.stream(stream):
                there = part.to(kept.device, non_blocking=True)
                event = self._noted(stream.record_event())
                if self.group is not None:
                    if "nccl" not in str(
                        dist.get_backend(self.group)
                    ):  # which itself waits for this stream
                        stream.synchronize()
                    return _gather(there, self.group, numel)
                return StreamWork(there, event)

    @staticmethod
    def arrived(kept: Kept, work: Work) -> Tensor:
        """As `unpack`, of what `start` began."""
        with torch.no_grad():
            return work.wait().as_strided(kept.shape, kept.strides)


def _gather(part: Tensor, group: dist.ProcessGroup, numel: int) -> Work:
    work: Work = all_gather(part, group=group, length=numel, async_op=True, label=LABEL)
    return work


def keeping_of(
    partition_group: dist.ProcessGroup | None,
    offload: str | None,
    arena: Arena | None,
    tensors: list[Tensor],
) -> Keeping | None:
    """Checked options, for these inputs; None where inputs are simply referred to.

    ValueError: an offload that is unknown, a group that this rank is not in. TypeError: an arena
    that is none.
    """
    if offload not in (None, "cpu"):
        raise ValueError(
            f"offload is {offload!r}; choose 'cpu', or None to keep inputs where they are"
        )
    if arena is not None and not isinstance(arena, Arena):
        raise TypeError(f"arena is {arena!r}; expected a pyops.recompute.Arena, or None")
    group = None
    if partition_group is not None:
        if not isinstance(partition_group, dist.ProcessGroup):
            raise ValueError(
                f"partition_group is {partition_group!r}; expected a process group that "
                "this rank is in"
            )
        group = partition_group if dist.get_world_size(partition_group) > 1 else None
    moves = offload == "cpu" and any(t.is_cuda for t in tensors)
    return Keeping(group, moves, arena) if group is not None or moves or arena is not None else None
