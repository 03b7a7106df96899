"""Rows whose texts grow: which row of the caches each one has, what is computed next, and when it
ends.

    caches   row 0   a b c d .    text 4      each turn adds a token to every text; a text that
             row 1   p q r        text 6      ends gives its row to the next prompt, or, where
             row 2   x y z w v    text 7      there is none, to the last of the texts

All of it follows from the prompts and the chosen tokens, so every rank does the same by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["GeneratedRow", "Job", "PromptQueue", "RowGroup", "Text"]


@dataclass(frozen=True)
class GeneratedRow:
    """A prompt and what follows it."""

    number: int
    """Of the row: that of the prompt, plus first_row."""
    prompt: list[int]
    """As it was given."""
    tokens: list[int]
    """That follow, the end token among them."""
    log_likelihood: float
    """The sum of ln p(token) under the model over `tokens`, whatever the temperature."""
    ended: bool
    """Whether an end token came; otherwise max_new did."""


@dataclass
class Text:
    """A row's text so far."""

    number: int
    prompt: list[int]
    begin: list[int]
    """The tokens that it had before the first that was chosen."""
    uniform: Tensor | None
    """The draws of its tokens; None where nothing is drawn."""
    tokens: list[int] = field(default_factory=list)
    log_likelihood: float = 0.0
    kept: int = 0
    """How many of its tokens' keys and values are kept."""

    @property
    def pending(self) -> list[int]:
        """Tokens whose keys and values are not kept yet."""
        begin = len(self.begin)
        return self.begin[self.kept :] + self.tokens[max(self.kept - begin, 0) :]


@dataclass(frozen=True)
class Job:
    """What one forward computes."""

    row: int
    """The first row of the caches."""
    lengths: list[int]
    """Tokens that each row has."""
    tokens: list[list[int]]
    """That are added to each, equally many."""
    chooses: bool
    """Whether a token follows the last one of each row."""


class PromptQueue:
    """The prompts that have no row yet.

    Args:
        prompts: Of all rows.
        begins: Makes the text of a prompt, and raises where it can't be continued.
    """

    def __init__(self, prompts: Iterator[object], begins: Callable[[int, object], Text]) -> None:
        self._prompts, self._begins, self._count = prompts, begins, 0

    def next(self) -> Text | None:
        """The text of the next one; None: there is none."""
        for prompt in self._prompts:
            self._count += 1
            return self._begins(self._count - 1, prompt)
        return None


class RowGroup:
    """Texts that are computed together.

    Args:
        number: Of the group.
        num_rows: How many texts there are at most at a time.
        max_new: Tokens that follow a prompt at most.
        ends: Tokens that end a text.
        chunk: How many tokens of a prompt are computed together.
    """

    def __init__(
        self, number: int, num_rows: int, *, max_new: int, ends: Sequence[int], chunk: int
    ) -> None:
        self.number, self.num_rows = number, num_rows
        self.max_new, self.ends, self.chunk = max_new, frozenset(ends), chunk
        self.texts: list[Text] = []

    def admit(self, queue: PromptQueue) -> list[int]:
        """Give free rows to the next prompts; which rows are new."""
        first = len(self.texts)
        while len(self.texts) < self.num_rows and (text := queue.next()) is not None:
            self.texts.append(text)
        return list(range(first, len(self.texts)))

    def jobs(self) -> list[Job]:
        """What is computed in this turn, after which a token is chosen for every text: one job for
        the rows at the front that go on by one token, and some for each prompt behind them."""
        found, front = [], 0
        while front < len(self.texts) and len(self.texts[front].pending) == 1:
            front += 1
        if front:
            rows = self.texts[:front]
            lengths, tokens = [t.kept for t in rows], [t.pending for t in rows]
            found.append(Job(0, lengths, tokens, chooses=True))
        for row, text in enumerate(self.texts[front:], front):
            pending = text.pending
            for at in range(0, len(pending), self.chunk):
                part = pending[at : at + self.chunk]
                last = at + len(part) == len(pending)
                found.append(Job(row, [text.kept + at], [part], chooses=last))
        return found

    def take(
        self,
        words: Sequence[int],
        log_likelihoods: Sequence[float],
        move: Callable[[int, int], None],
    ) -> list[GeneratedRow]:
        """Add the chosen tokens; the rows that end.

        Args:
            words: A token for each text.
            log_likelihoods: Of each.
            move: Called with (source, target) where a text gets another row of the caches.
        """
        ended = []
        for text, word, log_likelihood in zip(self.texts, words, log_likelihoods, strict=True):
            text.kept = len(text.begin) + len(text.tokens)
            text.tokens.append(word)
            text.log_likelihood += log_likelihood
        for row in reversed(range(len(self.texts))):
            text = self.texts[row]
            last = text.tokens[-1] in self.ends
            if not last and len(text.tokens) < self.max_new:
                continue
            ended.append(
                GeneratedRow(text.number, text.prompt, text.tokens, text.log_likelihood, last)
            )
            if row + 1 < len(self.texts):  # the last text takes its place
                move(len(self.texts) - 1, row)
                self.texts[row] = self.texts[-1]
            self.texts.pop()
        return ended
