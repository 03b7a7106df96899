"""GenerateOptions: how many tokens follow a prompt, how each is chosen, and how many rows there are
at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch

from pyops.given_numbers import check_number, check_whole, is_whole

__all__ = ["ROWS", "GenerateOptions", "check_draws", "check_ends"]

ROWS = 1 << 23
"""How many rows have draws of their own: the draws of each lie 2^40 places behind those of the row
before, and places are counted in 64 bits."""
CACHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        several = self.end if isinstance(self.end, Iterable) else (self.end,)
        return tuple(map(int, several))

    @property
    def most(self) -> int | None:
        """How many of the likeliest tokens a choice looks at; None: all."""
        return 1 if self.temperature == 0 else self.top_k or None

    def validate(self) -> None:
        """Check every field.

        Raises:
            ValueError: Naming field, value and fix.
        """
        for name, low in (("max_new", 1), ("rows", 1), ("chunk", 1), ("top_k", 0)):
            check_whole(f"generate: {name}", getattr(self, name), least=low)
        check_whole("generate: first_row", self.first_row, most=ROWS - 1)
        check_draws("generate", temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        check_ends("generate: end", self.end)
        if self.cache_dtype is not None and self.cache_dtype not in CACHED:
            raise ValueError(
                f"generate: cache_dtype is {self.cache_dtype!r}; give one of "
                f"{', '.join(map(str, CACHED))}, or None for that of the keys and values"
            )


def check_draws(who: str, *, temperature: object, top_p: object, seed: object) -> None:
    """Refuse what tokens can't be drawn by.

    Args:
        who: The caller, for the message.
        temperature: 0 or more, finite.
        top_p: A probability above 0.
        seed: A whole number.

    Raises:
        ValueError: Naming option, value and fix.
    """
    check_number(
        f"{who}: temperature",
        temperature,
        lambda v: 0 <= v < math.inf,
        "give 0 for the likeliest token, or a positive number",
    )
    check_number(
        f"{who}: top_p",
        top_p,
        lambda v: 0 < v <= 1,
        "give a probability above 0, or 1 for all tokens",
    )
    if not is_whole(seed):
        raise ValueError(f"{who}: seed is {seed!r}; give a whole number")


def check_ends(name: str, end: object) -> None:
    """Refuse what is no token that ends a text, nor several.

    Args:
        name: What it is, for the message.
        end: A token, several, or None.

    Raises:
        ValueError: Naming option, value and fix.
    """
    many = isinstance(end, Sequence | Set) and not isinstance(end, str)
    tokens = () if end is None else tuple(end) if many else (end,)  # type: ignore[arg-type]
    if not all(is_whole(token) and token >= 0 for token in tokens):  # type: ignore[operator]
        raise ValueError(
            f"{name} is {end!r}; give a token, a whole number, 0 or more, or a list of tokens"
        )
