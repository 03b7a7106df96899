"""What goes wrong in the collectives of this room; what ranks tell one another about it stands in
`pyops.failure`, so that rooms below this one can name lost ranks too."""

from __future__ import annotations

from pyops.failure import CommunicationError, lost_peer, ranks_without_note, wake_neighbours

__all__ = [
    "CommunicationError",
    "DisagreementError",
    "PeerError",
    "lost_peer",
    "ranks_without_note",
    "wake_neighbours",
]


class DisagreementError(CommunicationError, ValueError):
    """The ranks called different collectives, or one collective with different shapes, dtypes or
    options."""


class PeerError(Exception):
    """Within a transport: an exchange with this group rank failed."""

    def __init__(self, peer: int, cause: object) -> None:
        super().__init__(f"exchange with rank {peer} failed: {cause}")
        self.peer = peer
