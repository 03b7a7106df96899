"""Which token follows: the likeliest, or one that is drawn, of logits whose vocabulary ranks share.

    logits [R, own words] -> the words that can be chosen, in ascending order, of all ranks
                          -> temperature -> top_k -> top_p -> softmax -> running sum -> a draw

Choosing is in float64 on the CPU, where a running sum has one order. Of equal logits the lower word
counts as the likelier one. A greedy choice takes two numbers of each rank, top_k k pairs of them,
anything else all logits, in one message.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyops import random
from pyops.models.generation.options import ROWS, GenerateOptions
from pyops.tensor_parallel import Ranks

__all__ = ["Candidates", "Chosen", "candidates_of", "choose", "draws", "nucleus"]

PLACES = (1 << 63) // ROWS  # numbers of the stream of draws that each row has


class Candidates(NamedTuple):
    """The words that can be chosen, on the CPU, the same on every rank."""

    values_RN: Tensor
    """float64, their logits; -inf where there is none."""
    words_RN: Tensor
    """int64, ascending in each row."""
    log_sum_R: Tensor
    """float64, the logarithm of the sum of the exponentials of all logits."""


class Chosen(NamedTuple):
    """A token for each row."""

    words_R: Tensor
    """int64."""
    log_likelihood_R: Tensor
    """float64, its ln p under the model, whatever the temperature."""


def draws(seed: int, row: int, first: int, count: int) -> Tensor:
    """The uniform numbers, float64, that choose the tokens at places [first, first + count) of a
    row's text: keyed by these alone.

    Args:
        seed: Of all rows.
        row: Its number.
        first: A place.
        count: How many places.
    """
    offset = row * PLACES + first
    return random.uniform(seed, "generate", (count,), offset=offset, device="cpu").double()


def candidates_of(
    logits_RC: Tensor, ranks: Ranks, *, vocab_size: int, first_word: int, most: int | None
) -> Candidates:
    """The words that can be chosen. A collective of the ranks that share the vocabulary.

    Args:
        logits_RC: Of this rank's words; columns beyond the vocabulary don't count.
        ranks: That share it.
        vocab_size: Words of all ranks.
        first_word: This rank's first one.
        most: How many of the likeliest ones can be chosen; None: all.
    """
    (rows, width), device = logits_RC.shape, logits_RC.device
    own = max(0, min(width, vocab_size - first_word))
    logits_RC = logits_RC[:, :own].detach().double().cpu()
    log_sum_R = logits_RC.logsumexp(1) if own else torch.full((rows,), -math.inf).double()
    if most == 1 and ranks.size == 1:
        at_R1 = logits_RC.argmax(dim=1, keepdim=True)  # the first of equal ones
        return Candidates(logits_RC.gather(1, at_R1), at_R1, log_sum_R)
    logits_RC = logits_RC.nan_to_num(-math.inf, math.inf, -math.inf)  # the sum stays nan
    most = vocab_size if most is None else min(most, vocab_size)
    values_RN, words_RN = _likeliest(logits_RC, torch.arange(own).expand(rows, own), most)
    if ranks.size == 1:
        return Candidates(values_RN, words_RN, log_sum_R)
    count = min(most, width)  # the same on every rank
    missing = count - values_RN.shape[1]
    parts = [
        torch.nn.functional.pad(values_RN, (0, missing), value=-math.inf),
        torch.nn.functional.pad(words_RN.double() + first_word, (0, missing), value=vocab_size),
        log_sum_R[:, None],
    ]
    message = torch.cat(parts, dim=1).to(device)
    found = ranks.gather(message).wait().cpu().unflatten(0, (ranks.size, rows)).transpose(0, 1)
    values_RN = found[:, :, :count].flatten(1)
    words_RN = found[:, :, count:-1].flatten(1).long()
    values_RN, words_RN = _likeliest(values_RN, words_RN, most)
    return Candidates(values_RN, words_RN, found[:, :, -1].logsumexp(1))


def _likeliest(values_RN: Tensor, words_RN: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` largest values of each row, of equal ones those that come first, in their
    order."""
    if values_RN.shape[1] <= most:
        return values_RN, words_RN
    if most == 1:
        at_R1 = values_RN.argmax(dim=1, keepdim=True)  # the first of equal ones
        return values_RN.gather(1, at_R1), words_RN.gather(1, at_R1)
    least_R1 = values_RN.topk(most, dim=1).values[:, -1:]
    above_RN, equal_RN = values_RN > least_R1, values_RN == least_R1
    room_R1 = most - above_RN.sum(1, keepdim=True)
    kept_RN = above_RN | (equal_RN & (equal_RN.cumsum(1) <= room_R1))
    at_RN = kept_RN.nonzero()[:, 1].view(-1, most)
    return values_RN.gather(1, at_RN), words_RN.gather(1, at_RN)


def choose(found: Candidates, options: GenerateOptions, uniform_R: Tensor) -> Chosen:
    """A token for each row.

    Args:
        found: What can be chosen.
        options: How.
        uniform_R: float64, on [0, 1), by which each row's token is drawn.
    """
    if options.temperature == 0:
        at_R1 = found.values_RN.argmax(dim=1, keepdim=True)
    else:
        # Below the largest, so that no temperature is too small to divide by.
        below_RN = found.values_RN - found.values_RN.amax(dim=1, keepdim=True)
        p_RN = (below_RN / options.temperature).softmax(dim=1)
        if options.top_p < 1:
            p_RN = p_RN.masked_fill(~nucleus(p_RN, options.top_p), 0.0)
        sums_RN = p_RN.cumsum(dim=1)
        at_R1 = torch.searchsorted(sums_RN, uniform_R[:, None] * sums_RN[:, -1:], right=True)
        at_R1 = at_R1.clamp(max=p_RN.shape[1] - 1)
    values_R = found.values_RN.gather(1, at_R1)[:, 0]
    return Chosen(found.words_RN.gather(1, at_R1)[:, 0], values_R - found.log_sum_R)


def nucleus(p_RN: Tensor, top_p: float) -> Tensor:
    """bool [R, N]: the likeliest words whose probabilities sum up to top_p, that which reaches it
    among them; of equal ones the first.

    Args:
        p_RN: Probabilities.
        top_p: Above 0.
    """
    sorted_RN, order_RN = p_RN.sort(dim=1, descending=True, stable=True)
    before_RN = sorted_RN.cumsum(dim=1) - sorted_RN
    return torch.zeros_like(p_RN, dtype=torch.bool).scatter(1, order_RN, before_RN < top_p)
