"""on_policy: batches of which a part is what the student itself says, so that it learns where its
own words lead it (generalized knowledge distillation; Agarwal et al., 2024, algorithm 1).

    text     a b c d e f g h     of a part of the batches the student goes on behind a prompt
             a b c X Y Z W V     targets: X Y Z W V; those of the prompt do not count
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.models.generation import generate
from pyops.random import uniform

__all__ = ["OnPolicyBatch", "on_policy"]


@dataclass(frozen=True)
class OnPolicyBatch:
    """A batch of the text, or of what the student says."""

    tokens: Tensor
    """int64 [B, T], what both models are called with."""
    targets: Tensor
    """int64 [B, T], the tokens that follow; -100 does not count."""
    of_student: bool
    """Whether the student has said it: its own words are no labels, so that the loss is to be of
    the teacher alone (`DistillationConfig(hard=0.0)`)."""


def on_policy(
    student: nn.Module,
    texts: Iterable[Tensor],
    *,
    part: float,
    prompt_tokens: int,
    seed: int = 0,
    first: int = 0,
    temperature: float = 1.0,
) -> Iterator[OnPolicyBatch]:
    """Batches of texts, a part of which the student goes on with. A collective of the ranks that
    share the student.

    Which batches they are is drawn by (seed, number of the batch), and their tokens by (seed, row,
    place), with the student as it is when the batch is asked for: on any layout alike.

    Args:
        student: GPT.
        texts: int64 [B, T + 1] each, with T of the student's sequence_length or less.
        part: lambda, the probability with which a batch is the student's, 0 to 1.
        prompt_tokens: how many tokens of a text stay, 1 to T.
        seed: of the draws.
        first: number of the first batch, where a run goes on.
        temperature: of the student's words; 0: the likeliest ones.

    Raises:
        ValueError: an option out of its range; texts that are shorter than the prompt.
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part is {part}; it is the probability of a batch of the student, 0 to 1")
    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens is {prompt_tokens}; a student goes on behind 1 or more")
    return _batches(student, texts, part, prompt_tokens, (seed, first, temperature))


def _batches(
    student: nn.Module,
    texts: Iterable[Tensor],
    part: float,
    prompt_tokens: int,
    draws: tuple[int, int, float],
) -> Iterator[OnPolicyBatch]:
    seed, first, temperature = draws
    for number, text in enumerate(texts, first):
        if text.shape[1] <= prompt_tokens:
            raise ValueError(
                f"prompt_tokens is {prompt_tokens}, but batch {number} has texts of "
                f"{text.shape[1]} tokens; give longer ones, or fewer"
            )
        own = bool(uniform(seed, f"on_policy.{number}", (1,)) < part)
        if own:
            said = generate(
                student,
                list(text[:, :prompt_tokens].cpu()),
                max_new=text.shape[1] - prompt_tokens,
                temperature=temperature,
                seed=seed,
                rows=len(text),
                first_row=number * len(text),
            )
            words = [row.prompt + row.tokens for row in said]
            text = torch.tensor(words, dtype=text.dtype, device=text.device)
        targets = text[:, 1:].clone()
        if own:
            targets[:, : prompt_tokens - 1] = -100
        yield OnPolicyBatch(text[:, :-1], targets, own)
