"""Mailboxes: shared memory between two ranks of one host, for the short messages of their channels
(csrc/native/mailbox.cpp).

    writers create them -- gather names -- readers open them -- gather -- writers remove the names

From then on no file is left behind, whatever dies. Ranks on different hosts, or without kernels,
have none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.comm.collectives.shared_memory import host
from pyops.ops.library import native

__all__ = ["Name", "open_mailboxes"]

Name = tuple[int, int, str]  # source rank, target rank, kind


def open_mailboxes(channels: Iterable[Name], *, group: dist.ProcessGroup) -> dict[Name, Any]:
    """This rank's ends of the mailboxes of `channels`, of those that could be made. Collective:
    every rank gives the same channels."""
    rank, module = dist.get_rank(group), native()
    created: dict[Name, Any] = {}
    names: dict[Name, str] = {}
    if module is not None:
        for channel in channels:
            if channel[0] == rank:
                name = f"/pyops-{secrets.token_hex(8)}"
                try:
                    created[channel] = module.Mailbox(name, True)
                except RuntimeError:  # no shared memory, or none left: messages go by the group
                    continue
                names[channel] = name
    opened: dict[Name, Any] = {}
    try:
        for peer_host, peer_names in gather((host(), names), group=group):
            for channel, name in peer_names.items():
                if channel[1] == rank and peer_host == host() and module is not None:
                    try:
                        opened[channel] = module.Mailbox(name, False)
                    except RuntimeError:
                        continue
        usable = {channel for several in gather(list(opened), group=group) for channel in several}
    finally:
        for mailbox in created.values():
            mailbox.unlink()
    return {
        channel: mailbox for channel, mailbox in (created | opened).items() if channel in usable
    }
