"""StateLostError: what no replica can mend."""

from __future__ import annotations

from pyops.failure import CommunicationError

__all__ = ["StateLostError"]


class StateLostError(CommunicationError):
    """The replicas that live do not have the state of the run: only a checkpoint has it."""
