"""The model to beat: the next byte predicted from the byte before it, fitted by counting pairs.

p(b | a) = (count(a, b) + 1) / (count(a) + 256)            loss = mean over pairs of -ln p(b | a)
"""

from __future__ import annotations

import numpy as np

__all__ = ["bigram_loss", "count_pairs"]


def count_pairs(text: bytes, *, before: int | None = None) -> np.ndarray:
    """How often each byte follows each: int64 [256, 256]. `before`: the byte that came before this
    text, if any."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    if before is not None:
        values = np.concatenate([[before], values])
    return np.bincount(values[:-1] * 256 + values[1:], minlength=65536).reshape(256, 256)


def bigram_loss(train: np.ndarray, evaluated: np.ndarray) -> float:
    """Nats per byte of a bigram model fitted to the pairs `train`, on the pairs `evaluated`; each
    int64 [256, 256]."""
    smoothed = train.astype(np.float64) + 1.0
    log_probability = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
    return float(-(evaluated * log_probability).sum() / max(1, evaluated.sum()))
