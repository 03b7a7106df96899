"""GenerateOptions: how many tokens follow a prompt, how each is chosen, and how many rows there are
at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["GenerateOptions"]


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` takes by keyword. `validate` checks the values."""

    max_new: int = 128
    """How many tokens follow a prompt at most."""
    temperature: float = 0.8
    """0: the likeliest token. Otherwise one is drawn from softmax(logits / temperature)."""
    top_k: int = 0
    """Draw among the `top_k` likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """After `top_k`: draw among the likeliest tokens whose probabilities sum up to `top_p`
    (Holtzman et al., arXiv:1904.09751); 1: among all."""
    seed: int = 0
    """Of the draws, which are keyed by (seed, number of the row, place in the text)."""
    end: int | Sequence[int] | None = None
    """A token, or several, with which a text ends; None: with `max_new`."""
    rows: int = 16
    """How many texts are computed at a time; over a pipeline at least as many as stages."""
    first_row: int = 0
    """The number of the first row, where others generate the rows before it."""
    chunk: int = 512
    """How many tokens of a prompt are computed together."""
    cache_dtype: torch.dtype | None = None
    """That keys and values are kept in; None: that which they are computed in."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens with which a text ends."""
        if self.end is None:
            return ()
        return (self.end,) if isinstance(self.end, int) else tuple(self.end)

    @property
    def most(self) -> int | None:
        """How many of the likeliest tokens a choice looks at; None: all."""
        return 1 if self.temperature == 0 else self.top_k or None

    def validate(self) -> None:
        """Check every field.

        Raises:
            ValueError: Naming field, value and fix.
        """
        least = {"max_new": 1, "rows": 1, "chunk": 1, "top_k": 0, "first_row": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"generate: {name} is {value!r}; give a whole number, >= {low}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"generate: temperature is {self.temperature!r}; give 0 for the likeliest token, "
                "or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"generate: top_p is {self.top_p!r}; give a probability above 0, or 1 for all "
                "tokens"
            )
        dtype = self.cache_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"generate: cache_dtype is {dtype!r}; give a floating dtype, or None for that of "
                "the keys and values"
            )
