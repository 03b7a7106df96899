"""What carries the messages of a group of ranks, and how long collectives take on it.

a message     latency of each hop + bytes / bandwidth
a group       with g ranks on a node: min(links within the node, g network links)
"""

from __future__ import annotations

import math

from pyops.plan.clusters import Cluster, Link
from pyops.plan.layout import Software

__all__ = ["exposed", "group_link", "ring"]


def group_link(cluster: Cluster, *, ranks: int, stride: int) -> Link:
    """The link that a group of `ranks` ranks sees which lie `stride` apart.

    Args:
        cluster: The devices.
        ranks: Of the group.
        stride: From one of its ranks to the next.
    """
    together = max(1, min(ranks, cluster.devices_per_node // stride))
    if ranks <= together:
        return cluster.node
    network = cluster.network
    speed = min(cluster.node.speed, together * network.speed)
    hops = (together - 1) * cluster.node.latency + network.latency
    return Link(speed, 1.0, hops / together, network.contention)


def ring(link: Link, *, nbytes: float, ranks: int, passes: int, messages: int = 1) -> float:
    """Seconds of `messages` collectives that take `nbytes` together; an all-reduce has two
    passes, a gather and a scatter one each.

    Args:
        link: Of the group.
        nbytes: Of the whole tensors.
        ranks: Of the group.
        passes: 1 or 2.
        messages: In how many the bytes are cut.
    """
    if ranks == 1:
        return 0.0
    steps = ranks - 1
    if passes == 2:  # a tree has fewer hops
        steps = min(2 * steps, 4 * math.ceil(math.log2(ranks)))
    return messages * steps * link.latency + passes * nbytes * (ranks - 1) / ranks / link.speed


def exposed(messages: float, hide: float, link: Link, software: Software) -> float:
    """Seconds of messages that the computation beside them does not hide, with those by which they
    slow it down.

    Args:
        messages: Seconds that they take.
        hide: Seconds of the computation beside them.
        link: That carries them.
        software: Whether it sends beside the computation at all.
    """
    if not software.overlaps_gradients:
        return messages
    return max(0.0, messages - hide) + link.contention * min(messages, hide)
