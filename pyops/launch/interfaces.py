"""The network interfaces that variables of the environment name, and whether this host has them.

GLOO_SOCKET_IFNAME=eth0,eth1       names
NCCL_SOCKET_IFNAME=eth             what names begin with; =eth0 is a name, ^lo leaves some out
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping

__all__ = ["interface_trouble"]


def interface_trouble(
    rank: int,
    *,
    nccl: bool,
    environment: Mapping[str, str] | None = None,
    there: Collection[str] | None = None,
) -> str:
    """What is wrong with the interfaces that this rank is told to use; "" for nothing.

    Args:
        rank: Of this process.
        nccl: Whether it will use NCCL as well as Gloo.
        environment: os.environ, or another mapping.
        there: The interfaces of this host; None looks.

    Returns:
        A sentence with the variable's value, the interfaces that are there, and what to do.
    """
    environment = os.environ if environment is None else environment
    there = [name for _, name in socket.if_nameindex()] if there is None else there
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 2 if nccl else 1]:
        value = environment.get(variable, "")
        missing = _missing(value, there, prefixes=variable.startswith("NCCL"))
        if missing:
            return (
                f"{variable}={value} on rank {rank}, but its host {socket.gethostname()} has no "
                f"network interface {missing}, only {', '.join(sorted(there))}; set {variable} to "
                "that of the network between the hosts, or unset it"
            )
    return ""


def _missing(value: str, there: Collection[str], *, prefixes: bool) -> str:
    """The names that Gloo would not find, or all of NCCL's where it would find none."""
    if not prefixes:
        return ", ".join(name for name in value.split(",") if name and name not in there)
    if not value or value.startswith("^"):
        return ""
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    exact = value.startswith("=")
    pairs = [(each, name) for each in there for name in names]
    found = any(each == name if exact else each.startswith(name) for each, name in pairs)
    return "" if found else ", ".join(names)
