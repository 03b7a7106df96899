"""What callers within pyops tell a collective beside its public arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from pyops.comm.collectives.communicator import Communicator
from pyops.renamed import refuse_renamed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CallDetails", "CallOptions", "SliceDetails"]


class CallDetails(TypedDict, total=False):
    """The keyword arguments `**details` of a collective; `CallOptions` says what each means."""

    label: str
    segment_bytes: int | None
    communicator: Communicator | None


class SliceDetails(CallDetails, total=False):
    """`CallDetails`, and those of a tensor that is a slice of a buffer."""

    offset: int


@dataclass(frozen=True)
class CallOptions:
    """The keyword arguments `**details` of a collective, with their defaults."""

    label: str = ""
    """What the tensor is, for error messages: "bucket 3 of 7"."""

    segment_bytes: int | None = None
    """Bytes of the numbers behind one message, at least 1024; None: the collective's own choice."""

    communicator: Communicator | None = None
    """That of `group`, which then need not be looked up, nor given."""

    offset: int = 0
    """The tensor's first position in the buffer of which it is a slice, in elements, 0 or more. A
    ring sums in an order that depends on it."""

    @staticmethod
    def of(who: str, **details: Unpack[SliceDetails]) -> CallOptions:
        """The options that a caller of `who` gave; TypeError, naming it, for an unknown one."""
        if not details:
            return _DEFAULT
        unknown = {key: value for key, value in details.items() if key not in _NAMES}
        refuse_renamed(who, unknown, {"reduction": "op"})
        return CallOptions(**details)

    @property
    def of_label(self) -> str:
        """ " of bucket 3 of 7", or nothing without a label."""
        return f" of {self.label}" if self.label else ""


_NAMES = frozenset(CallOptions.__dataclass_fields__)
_DEFAULT = CallOptions()
