"""What transformers' attention masks say beside causality, without a mask of queries x keys: which
keys are padding, or which documents are packed in a row.

transformers describes a mask by a function of (batch, head, query, key) that is put together from
known ones; from these the tensors are taken back. A function of another kind is refused. While
torch.compile traces, what a function is put together from can not be seen: it is asked which tokens
see the one before them, and the program checks a few other pairs against that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.torch_private import assert_async

__all__ = ["key_mask"]

PLAIN = ("causal_mask_function", "bidirectional_mask_function")
AND = "and_masks.<locals>.and_mask"
PLACES = "remap_positions_for_packed_sequence.<locals>.inner_mask"
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


def key_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **given: Any,
) -> Tensor | None:
    """A mask function of transformers' `AttentionMaskInterface`.

    Args:
        q_length: Queries.
        kv_length: Keys.
        q_offset: The place of the first query.
        kv_offset: The place of the first key.
        mask_function: What a query sees beside padding.
        attention_mask: bool [B, S], False for padding.
        given: Of these, `batch_size` and `device` are looked at.

    Returns:
        bool [B, kv_length], False for keys that no query sees; or, of packed sequences, int32
        [B, kv_length], the number of each token's document; or None, where all are seen.

    Raises:
        ValueError: For a cache of fixed length or of a window, or a mask of another rule.
    """
    if isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length:
        raise ValueError(
            f"{q_length} queries and {kv_length} keys, from places {q_offset} and {kv_offset} on: "
            "attention with a pattern takes a cache that grows; use DynamicCache, not a static or "
            "a sliding one, and no prefix"
        )
    documents = None
    if mask_function is not None and torch.compiler.is_compiling():
        documents = _traced_documents(
            mask_function, (given["batch_size"], q_length, kv_length), given["device"]
        )
    elif mask_function is not None:
        documents = _documents(mask_function)
    if documents is not None:
        return documents.int()
    if attention_mask is None:
        return None
    missing = kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = functional.pad(attention_mask, (0, missing))
    return attention_mask[:, :kv_length].bool()


def _documents(function: Callable[..., Any]) -> Tensor | None:
    """The numbers of the packed sequences that the function tells apart; None where a query sees
    all, or all up to itself."""
    name = function.__qualname__
    if name in PLAIN:
        return None
    held = inspect.getclosurevars(function).nonlocals
    if name == AND:
        found = [each for part in held["mask_functions"] if (each := _documents(part)) is not None]
        if len(found) <= 1:
            return found[0] if found else None
    elif name == PLACES:
        return _documents(held["mask_function"])
    elif name == PACKED:
        ids: Tensor = held["packed_sequence_mask"]
        return ids
    raise _unknown(name)


def _traced_documents(
    function: Callable[..., Any], sizes: tuple[int, int, int], device: Any
) -> Tensor | None:
    """As `_documents`, in a program that is traced, of (B, queries, keys)."""
    rows, queries, keys = sizes
    name = function.__qualname__
    if name in PLAIN:
        return None
    if name != AND or queries != keys:
        raise _unknown(name)
    row = torch.arange(rows, device=device)[:, None]
    place = torch.arange(keys, device=device)

    def sees(other: Tensor) -> Tensor:
        found: Tensor = function(row, 0, place, other)
        return found.expand(rows, keys)

    ids = (~sees((place - 1).clamp(min=0))).cumsum(-1)
    for other in (torch.zeros_like(place), place // 2):
        as_documents = (sees(other) == (ids == ids[:, other])).all()
        assert_async(as_documents, "the model's mask is not that of packed sequences alone")
    return ids


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"the model masks by {name.partition('.')[0]}, which attention with a pattern does not "
        "know; it knows causality, padding and packed sequences: choose another model, or "
        'model.set_attn_implementation("sdpa")'
    )
