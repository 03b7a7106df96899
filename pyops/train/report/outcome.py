"""Outcome: how a run ended."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Losses in nats per byte of text, per token of a Hugging Face folder, or per term of a task's
    loss.

    Attributes:
        accuracy: Of held-out samples, where that is the score.
        stopped_by: The signal, 0 when all steps were done.
    """

    steps: int
    validation_loss: float | None
    bigram_loss: float | None
    skipped: int
    stopped_by: int = 0
    accuracy: float | None = None
