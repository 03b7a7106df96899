"""Links: all channels of one rank for a schedule, and what carries them: the group, mailboxes, groups from device to device.

    shape and short tensors    a mailbox where both ranks are on one host, else the group's CPU backend (Gloo)
    tensors on the CPU         the same
    tensors on a GPU           a group of the channel's two ranks by NCCL, where the group has that; else over the host

Each channel has a group of its own for its GPU tensors, since those of one group follow one another: an activation that a rank
sends would stand before the gradient that its neighbour sends it, and neither would come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm.communicator import Communicator
from pyops.pipeline.channel import Direct, Incoming, Outgoing
from pyops.pipeline.execute import Edge
from pyops.pipeline.mailboxes import Name, open_mailboxes
from pyops.pipeline.orders import Orders

__all__ = ["open_channels"]

MARKS = MappingProxyType({"F": 0, "B": 2, "FS": 4, "BS": 6})  # each kind has two tags


def open_channels(
    orders: Orders, *, group: dist.ProcessGroup, tag: int, device: torch.device
) -> tuple[dict[Edge, Incoming], dict[Edge, Outgoing]]:
    """{edge: channel} of what comes for this rank's stages, and of what leaves them. A collective.

    tag: the first of eight that are free. device: that of this rank's layers; of one kind on all ranks.
    """
    incoming: dict[Edge, Incoming] = {}
    outgoing: dict[Edge, Outgoing] = {}
    rank = dist.get_rank(group)
    mailboxes = open_mailboxes(orders.transfers, group=group)
    directs = _directs(orders.transfers, group=group, device=device)
    timeout = Communicator.of(group).timeout(torch.device("cpu"))
    for name, transfers in orders.transfers.items():
        source, target, kind = name
        carriers: dict[str, Any] = {
            "tag": tag + MARKS[kind], "mailbox": mailboxes.get(name), "direct": directs.get(name),
        }  # fmt: skip
        if target == rank:
            channel = Incoming(
                group,
                source,
                transfers=transfers,
                timeout=timeout,
                flush=partial(_flushed, outgoing),
                device=device,
                **carriers,
            )
            incoming |= {each.edge: channel for each in transfers}
        elif source == rank:
            sending = Outgoing(group, target, length=len(transfers), **carriers)
            outgoing |= {each.edge: sending for each in transfers}
    return incoming, outgoing


def _flushed(outgoing: Mapping[Edge, Outgoing]) -> bool:
    # All of them: one that is behind must not keep another from being looked at.
    return all([channel.flush() for channel in outgoing.values()])


def _directs(channels: Iterable[Name], *, group: dist.ProcessGroup, device: torch.device) -> dict[Name, Direct]:
    """A group of two for each of this rank's channels, where `group` carries GPU tensors by NCCL."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config(group)):
        return {}
    return _pairs(channels, group=group, backend="nccl")


def _pairs(channels: Iterable[Name], *, group: dist.ProcessGroup, backend: str) -> dict[Name, Direct]:
    rank, members = dist.get_rank(group), dist.get_process_group_ranks(group)
    found: dict[Name, Direct] = {}
    for name in sorted(channels):  # in one order on all ranks: both of a pair wait for each other
        source, target, _ = name
        if rank in (source, target):
            pair = dist.new_group([members[source], members[target]], backend=backend, use_local_synchronization=True)
            other = members[target] if rank == source else members[source]
            found[name] = Direct(pair, dist.get_group_rank(pair, other))
    return found
