"""The fingerprint of a collective: what ranks compare before they run it, so that ranks that call
different things raise an error in place of a hang.

rank 0   all_reduce of 8 elements   -- fingerprint --.
rank 1   all_reduce of 9 elements   -- fingerprint --+-- DisagreementError on all ranks
rank 2   a mistake of its caller    -- refused ------'   that names rank 2, and its text
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from pyops.comm.failure import DisagreementError

__all__ = [
    "FINGERPRINT_WIDTH",
    "REFUSAL_WIDTH",
    "check_equal",
    "check_refused",
    "fingerprint_of",
    "refusal_text",
    "refusing_ranks",
]

_FINGERPRINT = struct.Struct("<16s3q")  # dtype, elements, number of the call, a sum of the options
FINGERPRINT_WIDTH = _FINGERPRINT.size  # bytes
REFUSAL_WIDTH = 1024  # bytes of a text
_REFUSED = b"refused"  # in the place of a dtype's name


def fingerprint_of(
    kind: str,
    *,
    numel: int,
    dtype: torch.dtype,
    number: int,
    details: tuple[Any, ...],
    refused: bool,
) -> bytes:
    """The fingerprint of a call.

    Args:
        kind: The collective's name.
        numel: Elements of the tensor.
        dtype: Of the tensor.
        number: How many collectives this rank has called, with this one.
        details: The options that ranks must agree on.
        refused: Whether this rank can't take part.
    """
    name = _REFUSED if refused else str(dtype).removeprefix("torch.").encode()[:16]
    return _FINGERPRINT.pack(name, numel, number, zlib.crc32(repr((kind, details)).encode()))


def refusing_ranks(fingerprints: Sequence[bytes]) -> list[int]:
    """The ranks that can't take part, of all ranks' fingerprints."""
    return [
        rank
        for rank, each in enumerate(fingerprints)
        if _FINGERPRINT.unpack(each)[0].rstrip(b"\0") == _REFUSED
    ]


def refusal_text(refusal: Exception | None) -> bytes:
    """What a rank tells the others when one of them refuses: its own refusal, if it has any."""
    if refusal is None:
        return b""
    return f"{type(refusal).__name__}: {refusal}".encode()[:REFUSAL_WIDTH]


def check_refused(refused: Sequence[int], texts: Sequence[bytes]) -> None:
    """DisagreementError that names the ranks that refused, if there are any.

    Args:
        refused: The ranks.
        texts: Every rank's `refusal_text`.
    """
    if refused:
        why = "; ".join(
            f"rank {r} refused: {texts[r].rstrip(bytes(1)).decode(errors='ignore')}"
            for r in refused
        )
        raise DisagreementError(f"{why}; no rank has changed anything", ranks=refused)


def check_equal(
    fingerprints: Sequence[bytes], *, rank: int, kind: str, details: tuple[Any, ...]
) -> None:
    """DisagreementError unless all ranks have the fingerprint of this one.

    Args:
        fingerprints: Those of all ranks.
        rank: This rank.
        kind: The collective's name.
        details: Its options, for the error.
    """
    own = fingerprints[rank]
    for peer, theirs in enumerate(fingerprints):
        if theirs != own:
            dtype, numel, number, _ = _FINGERPRINT.unpack(own)
            their_dtype, their_numel, their_number, _ = _FINGERPRINT.unpack(theirs)
            raise DisagreementError(
                f"rank {rank} called its collective {number}, {kind} of "
                f"{numel} elements of "
                f"{dtype.rstrip(bytes(1)).decode()} {details}; rank {peer} called its collective "
                f"{their_number}, with {their_numel} elements "
                f"of {their_dtype.rstrip(bytes(1)).decode()} or other options; ranks "
                "must call the same collectives in the "
                "same order, with equal shapes, dtypes and options",
                ranks=[peer],
            )
