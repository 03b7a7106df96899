"""Continues a text with a model: one token at a time, drawn from the softmax of the last logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyops import random
from pyops.given_numbers import check_whole
from pyops.models.generation.options import check_draws

__all__ = ["sample"]


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """The prompt [T] int64, T >= 1, followed by `num_tokens` drawn tokens.

    Args:
        context: How many of the last tokens the model is shown at most, no more than its sequence
            length; when there are more, the older half is forgotten. A model that has
            `new_kv_caches`, as GPT, computes each token once but then. temperature 0 takes the
            likeliest token. The draws are keyed by `seed`: the same model continues the same way on
            any device.

    Raises:
        ValueError: For a prompt that is no int64 [T], T >= 1, and options without sense; the model
            is in the mode that it was in, whatever is raised.
    """
    _check(prompt, num_tokens, context, temperature, seed)
    was_training = model.training
    model.eval()
    try:
        return _continued(model, prompt, num_tokens, context, temperature, seed)
    finally:
        model.train(was_training)


def _check(prompt: Any, num_tokens: int, context: int, temperature: float, seed: int) -> None:
    if not isinstance(prompt, Tensor) or prompt.dtype not in (torch.int64, torch.int32):
        kind = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"the prompt is {kind}; give the numbers of its tokens, a tensor int64")
    if prompt.ndim != 1 or prompt.numel() == 0:
        raise ValueError(
            f"the prompt has shape {list(prompt.shape)}; give one sequence of at least "
            "one token, shape [T]"
        )
    check_whole("sample: num_tokens", num_tokens)
    check_whole("sample: context", context, least=1)
    check_draws("sample", temperature=temperature, top_p=1.0, seed=seed)


def _continued(
    model: nn.Module, prompt: Tensor, num_tokens: int, context: int, temperature: float, seed: int
) -> Tensor:
    """The prompt and what follows it."""
    uniform = random.uniform(seed, "sample", (num_tokens,), device="cpu").double()
    tokens, shown = prompt, min(len(prompt), context)
    new_kv_caches: Callable[[], Any] | None = getattr(model, "new_kv_caches", None)
    past = None
    for i in range(num_tokens):
        if shown > context:
            shown, past = (context + 1) // 2, None
        if new_kv_caches is None:
            logits_BTV = model(tokens[None, -shown:])
        elif past is None:
            logits_BTV = model(tokens[None, -shown:], past=(past := new_kv_caches()))
        else:
            logits_BTV = model(tokens[None, -1:], past=past)
        logits_V = logits_BTV[0, -1].double().cpu()  # where a running sum has one order
        if temperature > 0:
            cumulative_V = torch.softmax(logits_V / temperature, dim=0).cumsum(0)
            # The last entry is 1 but for rounding; scaling by it keeps the index inside the
            # vocabulary.
            chosen = torch.searchsorted(cumulative_V, uniform[i] * cumulative_V[-1], right=True)
            chosen = chosen.clamp(max=logits_V.numel() - 1)
        else:
            chosen = logits_V.argmax()
        tokens, shown = torch.cat([tokens, chosen.reshape(1).to(tokens.device)]), shown + 1
    return tokens
