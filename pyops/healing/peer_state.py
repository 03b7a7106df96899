"""A nested state (numbers, texts, tensors) from one rank to all, in buckets of bytes.

{"step": 3, "exp_avg": tensor} --> {"step": 3, "exp_avg": Hole 0} pickled
                                   tensor's bytes, with those of others, in buckets
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.broadcast import broadcast
from pyops.failure import naming_lost_ranks

__all__ = ["send_state"]

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class _Hole:
    """Where a tensor stood."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """The same nest, in which `replace` has been called on each value of a type."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, replace) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, kind, replace) for each in value)
    return value


def send_state(
    state: Any, *, source: int, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
) -> Any:
    """The state that one rank has, on every rank. Collective.

    Args:
        state: Dictionaries, lists and tuples of tensors and of what can be pickled; read on the
            rank `source` alone.
        source: The rank within the group that has it.
        group: The ranks.
        bucket_bytes: How many bytes travel at a time: what it takes beside the states.

    Returns:
        On `source` the state itself; elsewhere a copy with the same bits, whose tensors lie on
        devices of the same names.

    Raises:
        CommunicationError: A rank is lost; the error names it.
    """
    tensors: list[Tensor] = []

    def hole(tensor: Tensor) -> _Hole:
        tensors.append(tensor.detach())
        return _Hole(len(tensors) - 1, tuple(tensor.shape), tensor.dtype, tensor.device)

    mine = dist.get_rank(group) == source
    skeleton = [_replaced(state, Tensor, hole) if mine else None]
    with naming_lost_ranks("the broadcast of a replica's state", group=group):
        dist.broadcast_object_list(skeleton, group=group, group_src=source)
    if not mine:

        def make(each: _Hole) -> _Hole:
            tensors.append(torch.empty(each.shape, dtype=each.dtype, device=each.device))
            return each

        _replaced(skeleton[0], _Hole, make)
    _send_bytes(tensors, source=source, group=group, bucket_bytes=bucket_bytes)
    return state if mine else _replaced(skeleton[0], _Hole, lambda each: tensors[each.number])


def _send_bytes(
    tensors: list[Tensor], *, source: int, group: dist.ProcessGroup, bucket_bytes: int
) -> None:
    """Fill the tensors with those of the source: small ones together, large ones in parts."""
    mine = dist.get_rank(group) == source
    parts: list[Tensor] = []
    for tensor in tensors:
        # Of a tensor that is not contiguous only the source has one, and it is read alone.
        flat = (
            tensor.contiguous().view(-1).view(torch.uint8)
            if tensor.numel()
            else tensor.new_empty(0)
        )
        parts.extend(flat.split(bucket_bytes) if flat.numel() else [])
    while parts:
        bucket, size = [parts.pop(0)], 0
        size = bucket[0].numel()
        while parts and size + parts[0].numel() <= bucket_bytes:
            size += parts[0].numel()
            bucket.append(parts.pop(0))
        # Gloo carries bytes of the host.
        message = (
            torch.cat([part.cpu() for part in bucket])
            if mine
            else torch.empty(size, dtype=torch.uint8)
        )
        broadcast([message], group=group, source=source)
        if not mine:
            for part, values in zip(
                bucket, message.split([p.numel() for p in bucket]), strict=True
            ):
                part.copy_(values)
