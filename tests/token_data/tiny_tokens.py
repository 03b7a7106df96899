"""Small folders of token shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyops.token_data import ShardWriter, TokenKind


def write(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    vocab_size: int = 1000,
    shard_tokens: int = 50,
    end: int | None = None,
) -> Path:
    """These documents as shards."""
    kind = TokenKind(vocab_size=vocab_size, end_of_document=end)
    with ShardWriter(folder, kind, shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))
    return folder


def numbered(folder: Path, count: int, *, vocab_size: int = 60_000) -> Path:
    """The tokens 0 to count - 1 in documents of 7."""
    documents = [range(i, min(count, i + 7)) for i in range(0, count, 7)]
    return write(folder, documents, vocab_size=vocab_size)
