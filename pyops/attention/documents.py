"""Documents side by side in a row of tokens: their starts, the number of each token's document, and
places that begin again with each.

    row           a a a b b c c c c -         - is padding
    starts        0     3   5       9         int64 [n + 1], as cu_seqlens of FlashAttention
    ids           0 0 0 1 1 2 2 2 2 -1        int32 [T], what the operation takes
    positions     0 1 2 0 1 0 1 2 3 0         int64 [T], what embeddings and rotary positions take
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["PADDING", "document_ids", "document_positions", "document_starts"]

PADDING = -1  # the number of no document: sees nothing and is seen by nothing


def document_ids(starts: Tensor, *, length: int | None = None) -> Tensor:
    """The number of each token's document.

    Args:
        starts: int32 or int64 [n + 1], ascending: where each document begins, and where the last
            one ends; the first is 0.
        length: Tokens of the row, which are padding behind the last document; None: its end.

    Returns:
        int32 [length], -1 where there is padding.

    Raises:
        ValueError: When the starts do not ascend from 0, or end behind `length`; TypeError when
            they are no whole numbers.
    """
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"starts must be torch.int64 or torch.int32, got {starts.dtype}")
    if starts.dim() != 1 or not starts.numel():
        raise ValueError(
            f"starts have the shape {list(starts.shape)}; give [n + 1] numbers, of which the last "
            "is the end"
        )
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"starts begin with {values[0]}; the first document begins at 0")
    for one, other in itertools.pairwise(values):
        if other <= one:
            raise ValueError(
                f"starts have {other} behind {one}; they must ascend, and a document has 1 token "
                "or more"
            )
    length = values[-1] if length is None else length
    if length < values[-1]:
        raise ValueError(
            f"the last document ends at {values[-1]}, behind a row of {length} tokens; give a "
            f"length of {values[-1]} or more"
        )
    places = torch.arange(length, device=starts.device)
    ids = torch.searchsorted(starts.long(), places, right=True) - 1
    return torch.where(places < values[-1], ids, PADDING).int()


def document_starts(ids: Tensor) -> Tensor:
    """Where the documents of a row begin, and where the last one ends.

    Args:
        ids: int32 or int64 [T]: tokens with one number are one document; -1, at the end alone, is
            padding.

    Returns:
        int64 [n + 1], from 0 to the end of the last document.

    Raises:
        ValueError: When a document is not in one piece, there is padding before one, or a number is
            below -1; TypeError when they are no whole numbers.
    """
    check_ids(ids)
    if ids.dim() != 1:
        raise ValueError(f"ids have the shape {list(ids.shape)}; give those of one row, [T]")
    numbers, counts = torch.unique_consecutive(ids, return_counts=True)
    found = numbers.tolist()
    if PADDING in found[:-1]:
        raise ValueError("padding (-1) stands before a document; put it at the end of the row")
    if len(set(found)) < len(found):
        twice = next(number for number in found if found.count(number) > 1)
        raise ValueError(
            f"document {twice} is in several pieces; give each piece a number of its own"
        )
    if found and found[-1] == PADDING:
        counts = counts[:-1]
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def document_positions(ids: Tensor) -> Tensor:
    """The place of each token in its document.

    Args:
        ids: int32 or int64 [..., T]: neighbours with one number are one document; -1 is padding.

    Returns:
        int64 [..., T], from 0 in each document; 0 for padding.

    Raises:
        ValueError: When a number is below -1; TypeError when they are no whole numbers.
    """
    check_ids(ids)
    places = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    begins = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    first = torch.where(begins, places, 0).cummax(dim=-1).values if ids.numel() else places
    return torch.where(ids == PADDING, 0, places - first)


def check_ids(ids: Tensor) -> None:
    """Refuse numbers of documents that can be none.

    Raises:
        ValueError: When one is below -1, or there is no dimension of tokens; TypeError when they
            are no whole numbers.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids of documents must be torch.int32 or torch.int64, got {ids.dtype}")
    if not ids.dim():
        raise ValueError("ids of documents are one number; give [..., T]")
    if ids.numel() and (lowest := int(ids.min())) < PADDING:
        raise ValueError(f"a document has the number {lowest}; give 0 or more, or -1 for padding")
