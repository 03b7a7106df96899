"""Tokens that follow a prompt, the same on every layout of the ranks.

    prompt [rows, T] -> forward -> logits of the last position -> the same choice on every rank
                          ^                                          |
                          '------- the new token, keys and values ---'
                                   of the others are kept

Every rank of a copy of the model takes the same steps, so none waits for another. Keys and values
lie where their blocks are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops import random
from pyops.given_numbers import check_whole
from pyops.models.generation.choosing import nucleus
from pyops.models.generation.options import check_draws, check_ends
from pyops.parallel.losses import predicts_tokens
from pyops.parallel.stages.model_stage import CachePerStage

__all__ = [
    "CACHE_NAMES",
    "GenerationOptions",
    "KeptKeys",
    "checked_prompt",
    "decoder_start",
    "generate_tokens",
]

# By which a forward of transformers takes the keys and values so far; "cache" since 5.24.
CACHE_NAMES = ("past_key_values", "cache")
Forward = Callable[[dict[str, Any]], Tensor]  # arguments of the model -> logits [rows, T, V]


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are chosen. `validate` checks the values."""

    max_new_tokens: int = 20
    """How many tokens follow the prompt at most."""

    temperature: float = 0.0
    """0: the likeliest token. Otherwise a token is drawn from softmax(logits / temperature)."""

    top_k: int = 0
    """Draw among the `top_k` likeliest tokens; 0: among all."""

    top_p: float = 1.0
    """Then among the likeliest whose probabilities sum up to `top_p` (Holtzman et al.,
    arXiv:1904.09751); 1: among all."""

    seed: int = 0
    """Of the draws, which are keyed by (seed, number of the row, position), so that a row gets the
    same tokens in any batch."""

    eos_token_id: int | Sequence[int] | None = None
    """A row ends with this token, or with any of several; None: with `max_new_tokens`."""

    pad_token_id: int = 0
    """What follows the end of a row that ends before others."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        given = self.eos_token_id
        if given is None:
            return ()
        return tuple(given) if isinstance(given, Iterable) else (given,)

    def validate(self) -> None:
        """Check every field.

        Raises:
            ValueError: Naming field, value and fix.
        """
        for name, least in (("max_new_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            check_whole(f"generate: {name}", value, least=least)
        check_draws("generate", temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        check_ends("generate: eos_token_id", self.eos_token_id)


def decoder_start(model: nn.Module) -> int | None:
    """The token with which the text of a decoder begins that follows an encoder; None for a model
    without an encoder.

    Args:
        model: Of transformers, or any.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    found: int | None = getattr(config, "decoder_start_token_id", None)
    return found


def checked_prompt(prompt: Any, model: nn.Module) -> dict[str, Tensor]:
    """The prompt by name.

    Args:
        prompt: As `Trainer.generate` takes it.
        model: Which is to continue it.

    Raises:
        ValueError: It can't be continued.
    """
    given = {"input_ids": prompt} if isinstance(prompt, Tensor) else dict(prompt)
    if unknown := set(given) - {"input_ids", "attention_mask"}:
        raise ValueError(
            f"generate: the prompt has {sorted(unknown)[0]!r}; give input_ids, and attention_mask "
            "where rows are padded"
        )
    tokens = given.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        shape = list(tokens.shape) if isinstance(tokens, Tensor) else tokens
        raise ValueError(f"generate: the prompt is {shape}; give tokens [rows, T], T >= 1")
    if not predicts_tokens(model):
        raise ValueError(
            f"generate: {type(model).__name__} does not predict the token that follows; causal "
            "language models do, and models of an encoder and a decoder for conditional generation"
        )
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if encodes and decoder_start(model) is None:
        raise ValueError(
            f"generate: the config of {type(model).__name__} has no decoder_start_token_id; set it "
            "to the token with which its texts begin"
        )
    mask = given.get("attention_mask")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            f"generate: attention_mask is {list(mask.shape)}, but input_ids {list(tokens.shape)}; "
            "give both the same shape"
        )
    if mask is not None and not encodes and not bool((mask[:, -1] == 1).all()):
        raise ValueError("generate: attention_mask must end with 1 in each row: pad on the left")
    return given


class KeptKeys(CachePerStage):
    """Keys and values of the tokens so far, of the blocks of this rank.

    Args:
        model: Of transformers.
        argument: The name by which its forward takes a cache, one of CACHE_NAMES.
        stages: (first block, block behind the last one) of each stage of this rank; None: this rank
            has all blocks.
        num_blocks: Of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        argument: str,
        stages: Sequence[tuple[int, int]] | None,
        num_blocks: int,
    ) -> None:
        self._argument = argument
        make = importlib.import_module("transformers").DynamicCache
        self._whole = stages is None
        self._num_blocks = num_blocks
        self._caches = {
            begin: (make(config=model.config), end) for begin, end in stages or [(0, num_blocks)]
        }

    def of_stage(self, begin: int) -> Any:
        """The cache of the stage that begins with this block. Stages of one rank have caches of
        their own, for a model asks its cache how many tokens there were."""
        return self._caches[begin][0]

    def arguments(self) -> dict[str, Any]:
        """What the model is called with beside the new tokens."""
        return {self._argument: self.of_stage(0) if self._whole else self, "use_cache": True}

    def advance(self, num_tokens: int) -> None:
        """After a forward of so many tokens. A model asks the first layer of its cache how many
        tokens there were, so those of other stages count them, with a number for each."""
        counted = torch.zeros(1, 1, num_tokens, 1)
        for begin, (cache, end) in self._caches.items():
            for index in range(self._num_blocks):
                if not begin <= index < end:
                    cache.update(counted, counted, index)


def generate_tokens(
    forward: Forward,
    prompt: Mapping[str, Tensor],
    options: GenerationOptions,
    *,
    kept: KeptKeys | None,
    first_row: int = 0,
    start: int | None = None,
) -> Tensor:
    """The prompt with the tokens that follow it.

    Args:
        forward: Gives the logits of all positions it is called with, the same on every rank.
        prompt: "input_ids" [rows, T] and, where rows are padded on the left, "attention_mask".
        options: How tokens are chosen.
        kept: Of a model that keeps keys and values; None: every token is computed from the whole
            text before it.
        first_row: The number of the first row, by which draws are keyed.
        start: Of a model of an encoder, which reads the prompt, and a decoder: the token
            with which the decoder's text begins.

    Returns:
        [rows, T + n], n <= max_new_tokens; of an encoder and a decoder the decoder's text
        [rows, 1 + n].
    """
    tokens, mask = prompt["input_ids"], prompt.get("attention_mask")
    if start is not None:
        tokens, mask = torch.full_like(tokens[:, :1], start), None
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    shown = tokens
    for number in range(options.max_new_tokens):
        arguments: dict[str, Any] = {"input_ids": shown}
        if start is not None:
            arguments = {**prompt, "decoder_input_ids": tokens, "use_cache": False}
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            arguments |= {"attention_mask": mask, "position_ids": positions[:, -shown.shape[1] :]}
        if kept is not None:
            arguments |= kept.arguments()
        logits_BV = forward(arguments)[:, -1]
        if kept is not None:
            kept.advance(shown.shape[1])
        chosen_B = _choose(logits_BV, options, position=number, first_row=first_row)
        chosen_B = torch.where(ended, options.pad_token_id, chosen_B)
        tokens = torch.cat([tokens, chosen_B[:, None]], dim=1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if options.ends:
            ended |= torch.isin(chosen_B, torch.tensor(options.ends, device=chosen_B.device))
            if bool(ended.all()):
                break
        shown = tokens if kept is None else chosen_B[:, None]
    return tokens


def _choose(
    logits_BV: Tensor, options: GenerationOptions, *, position: int, first_row: int
) -> Tensor:
    """The next token of each row."""
    scores_BV = logits_BV.double()
    if not options.temperature:
        return scores_BV.argmax(dim=1)
    # Below the largest, so that no temperature is too small to divide by.
    scores_BV = (scores_BV - scores_BV.amax(dim=1, keepdim=True)) / options.temperature
    if options.top_k:
        kth = scores_BV.topk(min(options.top_k, scores_BV.shape[1]), dim=1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, -torch.inf)
    if options.top_p < 1:
        kept_BV = nucleus(scores_BV.softmax(dim=1), options.top_p)
        scores_BV = scores_BV.masked_fill(~kept_BV, -torch.inf)
    rows, size = scores_BV.shape
    uniform = random.uniform(
        options.seed,
        f"generate@{position}",
        (rows * size,),
        offset=first_row * size,
        device=scores_BV.device,
    ).double()
    # The largest of scores plus Gumbel noise is a draw from their softmax.
    noise_BV = -(-(uniform + 2.0**-25).log()).log().view(rows, size)
    return (scores_BV + noise_BV).argmax(dim=1)
