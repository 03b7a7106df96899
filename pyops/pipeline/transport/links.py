"""All channels of one rank for a schedule, and what carries them: the group, mailboxes, groups from
device to device.

    shape, short tensors    a mailbox where both ranks are on one host, otherwise the group's CPU
    tensors on the CPU      backend (Gloo)
    tensors on a GPU        a group of the channel's two ranks by NCCL, where the group has NCCL;
                            otherwise over the host

Each channel has a group of its own for its GPU tensors, since those of one group follow one
another: an activation that a rank sends would stand before the gradient that its neighbour sends
it, and neither would come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm.collectives.communicator import Communicator
from pyops.pipeline.schedules.orders import Orders
from pyops.pipeline.transport.channel import (
    ChannelPeer,
    DeviceGroup,
    Edge,
    ReceiveChannel,
    SendChannel,
)
from pyops.pipeline.transport.mailboxes import Name, open_mailboxes
from pyops.torch_private import group_store, set_timeout

__all__ = ["open_channels"]

TAG_OFFSETS = MappingProxyType({"F": 0, "B": 2, "FS": 4, "BS": 6})  # each kind has two tags


def open_channels(
    orders: Orders, *, group: dist.ProcessGroup, tag: int, device: torch.device
) -> tuple[dict[Edge, ReceiveChannel], dict[Edge, SendChannel]]:
    """The channels of this rank. Collective.

    Args:
        orders: What travels between the ranks.
        group: The ranks of the pipeline.
        tag: The first of eight that are free.
        device: Of this rank's layers; of one type on all ranks.

    Returns:
        {edge: channel} of the values that come for this rank's stages, and of those that leave
        them.
    """
    incoming: dict[Edge, ReceiveChannel] = {}
    outgoing: dict[Edge, SendChannel] = {}
    rank = dist.get_rank(group)
    mailboxes = open_mailboxes(orders.transfers, group=group)
    device_groups = _device_groups(orders.transfers, group=group, device=device, tag=tag)
    timeout = Communicator.of(group).timeout(torch.device("cpu"))
    for name, transfers in orders.transfers.items():
        source, target, kind = name
        if rank not in (source, target):
            continue
        peer = ChannelPeer(
            group,
            source if rank == target else target,
            tag + TAG_OFFSETS[kind],
            mailboxes.get(name),
            device_groups.get(name),
        )
        if target == rank:
            channel = ReceiveChannel(
                peer,
                transfers=transfers,
                timeout=timeout,
                flush=partial(_flush_all, outgoing),
                device=device,
            )
            incoming |= {each.edge: channel for each in transfers}
        else:
            sending = SendChannel(peer, num_messages=len(transfers))
            outgoing |= {each.edge: sending for each in transfers}
    return incoming, outgoing


def _flush_all(outgoing: Mapping[Edge, SendChannel]) -> bool:
    # A list, not a generator: a channel that is behind must not keep another from being flushed.
    return all([channel.flush() for channel in outgoing.values()])


def _device_groups(
    channels: Iterable[Name], *, group: dist.ProcessGroup, device: torch.device, tag: int
) -> dict[Name, DeviceGroup]:
    """A group of two for each of this rank's channels, where `group` carries GPU tensors by
    NCCL."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config(group)):
        return {}
    return _pairs(channels, group=group, backend="nccl", tag=tag)


def _pairs(
    channels: Iterable[Name], *, group: dist.ProcessGroup, backend: str, tag: int
) -> dict[Name, DeviceGroup]:
    # Not by dist.new_group, which all ranks must call, or which names a group by the number of
    # groups its ranks are in, and the two ends of a channel may be in different numbers of groups.
    # A prefix in the group's store, under a tag that is used once, is theirs alone.
    rank, store = dist.get_rank(group), group_store(group)
    timeout = timedelta(seconds=Communicator.of(group).timeout(torch.device("cpu")))
    found: dict[Name, DeviceGroup] = {}
    for name in sorted(channels):  # in one order on all ranks: both of a pair wait for each other
        source, target, kind = name
        if rank in (source, target):
            place = int(rank == target)
            own = dist.PrefixStore(f"pyops/channel {tag} {source} {target} {kind}", store)
            found[name] = DeviceGroup(
                _pair(own, place, backend=backend, timeout=timeout), 1 - place
            )
    return found


def _pair(store: dist.Store, rank: int, *, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, 2, timeout)
    nccl = dist.distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    set_timeout(options, timeout)
    return nccl(store, rank, 2, options)
