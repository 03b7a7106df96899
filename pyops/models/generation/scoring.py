"""score: how likely texts are under a model, without logits of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.models.generation.generating import computing
from pyops.models.gpt import GPT
from pyops.models.t5 import T5
from pyops.models.vocabulary_head import IGNORED

__all__ = ["score"]


def score(
    model: nn.Module,
    tokens: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    first: Tensor | Sequence[int] | int = 1,
    prompts: tuple[Tensor, Tensor | Sequence[int]] | None = None,
    reduction: str = "sum",
) -> Tensor:
    """ln p of the tokens of each row, each given those before it. A collective of the ranks that
    share the model; the same on every one.

    Args:
        model: GPT or T5.
        tokens: int64 [B, T], rows at the left, with anything behind their ends.
        lengths: [B], how many tokens each row has; None: T.
        first: The place of the first token that counts, or [B] of each row's: the length of a
            prompt, where only what follows it counts. A GPT has no p for the first token of a row.
        prompts: Of T5: what the encoder reads, tokens [B, S] and their lengths [B]; `first` is then
            0 where all tokens of the decoder are to count.
        reduction: "sum", or "mean" over the tokens that count.

    Returns:
        float64 [B] in nats, 0 or less; a row of which no token counts gives 0, or NaN as its mean.

    Raises:
        ValueError: For lengths that do not fit, T5 without prompts, or an unknown reduction.
        TypeError: For a model that predicts no next token.
    """
    if not isinstance(model, GPT | T5):
        raise TypeError(
            f"score: the model is {type(model).__name__}; pyops.models.GPT and T5 predict the "
            "token that follows"
        )
    if reduction not in ("sum", "mean"):
        raise ValueError(f"score: reduction is {reduction!r}; choose sum or mean")
    _check_tokens("tokens", tokens)
    if isinstance(model, T5) != (prompts is not None):
        raise ValueError(
            "score: prompts is what the encoder of a T5 reads; give it for T5, and leave it out "
            "for GPT"
        )
    if prompts is not None:
        _check_prompts(prompts, len(tokens))
    B, T = tokens.shape
    place_T = torch.arange(T, device=tokens.device)
    lengths_B = _per_row("lengths", T if lengths is None else lengths, tokens)
    first_B = _per_row("first", first if T else 0, tokens)
    first_B = first_B if prompts is not None else first_B.clamp(min=1)
    counts_BT = (place_T < lengths_B[:, None]) & (place_T >= first_B[:, None])
    targets_BT = tokens.masked_fill(~counts_BT, IGNORED)
    seen_BT = tokens.masked_fill(place_T >= lengths_B[:, None], 0)
    with computing(model):
        if B == 0 or T == 0 or (isinstance(model, GPT) and T == 1):
            losses = torch.zeros(B, 0, device=tokens.device)  # no token has one before it
        elif isinstance(model, GPT):
            losses = model(seen_BT[:, :-1], targets_BT[:, 1:], reduction="none")
        else:
            losses = _with_prompts(model, seen_BT, targets_BT, prompts)
    total_B = -losses.double().sum(1)
    return total_B if reduction == "sum" else total_B / counts_BT.sum(1)


def _check_tokens(what: str, tokens: Any) -> None:
    kind = type(tokens).__name__
    if isinstance(tokens, Tensor):
        if tokens.dim() == 2 and tokens.dtype == torch.int64:
            return
        kind = f"{tokens.dtype} {list(tokens.shape)}"
    raise ValueError(f"score: {what} is {kind}; give a tensor int64 [B, T]")


def _check_prompts(prompts: Any, num_rows: int) -> None:
    """Refuse what the encoder can't read."""
    if not isinstance(prompts, tuple | list) or len(prompts) != 2:
        raise ValueError(
            f"score: prompts is a {type(prompts).__name__}; give (tokens [B, S], lengths [B])"
        )
    _check_tokens("the prompts' tokens", prompts[0])
    if len(prompts[0]) != num_rows:
        raise ValueError(
            f"score: there are prompts of {len(prompts[0])} rows, but tokens of {num_rows}; give "
            "as many"
        )
    if num_rows and int(_per_row("the prompts' lengths", prompts[1], prompts[0]).min()) < 1:
        raise ValueError(
            f"score: the prompts' lengths is {prompts[1]!r}; give each prompt a token or more"
        )


def _with_prompts(
    model: T5,
    seen_BT: Tensor,
    targets_BT: Tensor,
    prompts: tuple[Tensor, Tensor | Sequence[int]] | None,
) -> Tensor:
    assert prompts is not None
    prompt_BS, lengths_B = prompts[0], _per_row("the prompts' lengths", prompts[1], prompts[0])
    mask_BS = torch.arange(prompt_BS.shape[1], device=prompt_BS.device) < lengths_B[:, None]
    prompt_BS = prompt_BS.masked_fill(~mask_BS, 0)
    losses: Tensor = model(
        prompt_BS, model.shifted(seen_BT), targets_BT, mask=mask_BS, reduction="none"
    )
    return losses


def _per_row(what: str, given: Tensor | Sequence[int] | int, tokens: Tensor) -> Tensor:
    """[B] of a number for each row, or one for all."""
    B, T = tokens.shape
    try:
        found = torch.as_tensor(given, device=tokens.device)
    except (TypeError, ValueError, RuntimeError):  # of no numbers
        found = torch.zeros(0, 0)
    if found.dim() == 0:
        found = found.expand(B)
    low, high = (found.min(), found.max()) if found.numel() else (0, 0)
    if found.shape != (B,) or not _whole(found) or low < 0 or high > T:
        raise ValueError(
            f"score: {what} is {given!r}; give a whole number from 0 to {T} for each of the {B} "
            "rows"
        )
    return found


def _whole(found: Tensor) -> bool:
    return not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
