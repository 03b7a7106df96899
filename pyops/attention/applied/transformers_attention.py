"""A sparse pattern for models of transformers, through their registry of attention functions.

    apply(model, BigBird(seed=1))             causal, or not, as each module says
    model.set_attn_implementation("sdpa")     as it was

The model's code, parameters and configuration file stay what they are. Its masks are not made: of
padding the mask of keys is kept, of packed sequences their numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.attention.applied.mask_functions import key_mask
from pyops.attention.layouts import PatternLayouts
from pyops.attention.pattern import Pattern
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, attention
from pyops.torch_private import disable_dynamo

__all__ = ["apply"]

# What other attention functions take, and this one has not.
REFUSED = {
    "s_aux": "attention sinks",
    "sliding_window": "a window of its own",
    "output_attentions": "attention weights as output",
}


def apply(model: nn.Module, pattern: Pattern, *, block: int = 64) -> str:
    """Let the self-attention of a model of transformers see the blocks of a pattern, in place; its
    forward and backward then take time by the blocks that are visited, and memory linear in length.

    Whether a query sees later keys is said by each module (`is_causal`); where it does not, a token
    sees the same keys in a sequence of any length, and tokens that follow a cache see what they see
    without one. Padding (`attention_mask` [B, S]) and packed sequences (`position_ids` that begin
    again, without a mask) are kept to. After `pyops.tensor_parallel.parallelize` a rank has the
    layout of its heads as they are numbered in the whole. Dropout of attention weights is drawn
    from torch's generator, or, in a model of `pyops.parallel.parallelize`, by counters.

    Args:
        model: A model whose attention goes through transformers' `AttentionInterface`, such as
            Llama, GPT-2, BERT, ViT.
        pattern: Of `pyops.attention`.
        block: Tokens of a block's side, a multiple of 16.

    Returns:
        The name of the attention implementation that the model has now.

    Raises:
        TypeError: When it is no model of transformers, or no pattern.
        ValueError: When the model has attention that a pattern can't be applied to, by name;
            nothing is changed then. A forward raises it for a mask, a cache or an option of a call
            that a pattern does not take.
    """
    functions = _Attention(pattern, block)
    _check(model, pattern, block)
    functions.expect(getattr(model.config, "num_attention_heads", None))
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"pyops_{hashlib.sha256(f'{pattern} {block}'.encode()).hexdigest()[:16]}"
    AttentionInterface.register(name, functions)
    AttentionMaskInterface.register(name, key_mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return name


def _check(model: nn.Module, pattern: Pattern, block: int) -> None:
    """Raise unless the pattern can be applied."""
    if importlib.util.find_spec("transformers") is None:
        raise TypeError("apply takes a model of transformers, which is not installed")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; apply takes a model of transformers, and those of "
            "pyops.models have pattern= in their configuration"
        )
    parts = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    for part in parts:
        kind = type(part).__name__
        if not part._can_set_attn_implementation() or not part._supports_attention_backend:
            raise ValueError(
                f"{kind} does not call transformers' AttentionInterface, so its attention can't be "
                "changed; choose a model that does, such as Llama, GPT-2, BERT"
            )
    if len({id(part.config) for part in parts}) > 1:
        kinds = sorted({type(part).__name__ for part in parts if part is not model})
        raise ValueError(
            f"{type(model).__name__} is made of {', '.join(kinds)} with configurations of their "
            "own; apply the pattern to the one that is meant"
        )
    config: Any = model.config
    for wrong, what in (
        (getattr(config, "is_encoder_decoder", False), "an encoder and a decoder"),
        (getattr(config, "add_cross_attention", False), "cross-attention"),
        (getattr(config, "sliding_window", None) is not None, "a sliding window of its own"),
        (len(set(getattr(config, "layer_types", None) or ())) > 1, "layers of several kinds"),
        (getattr(config, "attention_chunk_size", None) is not None, "attention in chunks"),
        (getattr(config, "output_attentions", False), "output_attentions = True"),
    ):
        if wrong:
            raise ValueError(
                f"{type(model).__name__} has {what}, with which a pattern does not go; change its "
                "configuration, or choose another model"
            )
    longest = getattr(config, "max_position_embeddings", None)
    if type(longest) is int and longest > 0:
        pattern.check(-(-longest // block))


@dataclass(frozen=True)
class _Attention:
    """An attention function of transformers: [B, H, T, K] -> ([B, T, H, K], None)."""

    pattern: Pattern
    block: int
    layouts: dict[tuple[int, int, bool], PatternLayouts] = field(default_factory=dict)
    """By heads, the first of them, and causality."""

    @disable_dynamo
    def _layouts_of(self, part: tuple[int, int, bool]) -> PatternLayouts:
        heads, first_head, causal = part
        made = PatternLayouts(self.pattern, heads, first_head, self.block, causal)
        return self.layouts.setdefault(part, made)

    def __post_init__(self) -> None:
        PatternLayouts(self.pattern, heads=1, block=self.block)  # which refuses what is none

    def expect(self, heads: Any) -> None:
        """Make room for a model of so many heads: torch.compile then traces the model as a whole,
        and needs no step before."""
        if type(heads) is int and heads > 0:
            for causal in (False, True):
                self._layouts_of((heads, 0, causal))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        T, S = q.shape[1], k.shape[1]
        causal = options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        _check_call(module, q, k, v, causal, attention_mask, options)
        first_head = _first_head(module, q) if self.pattern.differs_by_head else 0
        part = (q.shape[2], first_head, causal)
        layouts = self.layouts.get(part)
        if layouts is None:
            layouts = self._layouts_of(part)
        mask, before = _mask(layouts, T, S, q.device, attention_mask)
        bias = options.get("position_bias")
        if before:  # queries of the same block, which are left out again
            q = functional.pad(q, (0, 0, 0, 0, before, 0))
            bias = None if bias is None else functional.pad(bias, (0, 0, before, 0))
        y = attention(
            q,
            k,
            v,
            scale=options.get("scaling"),
            mask=mask,
            bias=None if bias is None else AttentionBias(scores=bias),
            soft_cap=options.get("softcap"),
            dropout=_dropout(module, q, S, options.get("dropout", 0.0)),
        )
        return y[:, before:], None


def _mask(
    layouts: PatternLayouts, T: int, S: int, device: torch.device, given: Tensor | None
) -> tuple[AttentionMask, int]:
    """Which keys are seen, and how many queries of the first one's block come before it."""
    keys = given if given is not None and given.dtype == torch.bool else None
    documents = given if given is not None and given.dtype == torch.int32 else None
    if T == S:
        mask = AttentionMask(
            causal=layouts.causal, keys=keys, documents=documents, layout=layouts.of(T, device)
        )
        return mask, 0
    if T == 1:
        return AttentionMask(keys=keys, layout=layouts.last_query(S, device)), 0
    first = (S - T) // layouts.block * layouts.block
    places = torch.arange(S, device=device)
    mask = AttentionMask(
        causal=True,
        keys=keys,
        places=(places[first:], places),
        layout=layouts.rows(first, S, device),
    )
    return mask, S - T - first


def _check_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise for what transformers' attention functions may be asked for and this one can't do."""
    kind = type(module).__name__
    for name, what in REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"{kind} asks for {what} ({name}), which attention with a pattern does not have; "
                'choose another model, or model.set_attn_implementation("sdpa")'
            )
    if mask is not None and (mask.dim() != 2 or mask.dtype not in (torch.bool, torch.int32)):
        raise ValueError(
            f"{kind} was given a mask {list(mask.shape)} {mask.dtype}; attention with a pattern "
            "takes attention_mask [B, S], of padding"
        )
    if q.shape[1] != k.shape[1] and (not causal or q.shape[1] > k.shape[1]):
        raise ValueError(
            f"{kind} has {q.shape[1]} queries and {k.shape[1]} keys; a pattern is of self-attention"
        )
    if v.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{kind} has keys of width {k.shape[-1]} and values of width {v.shape[-1]}; they must "
            "be equal"
        )


def _dropout(module: nn.Module, q: Tensor, num_keys: int, p: float) -> AttentionDropout | None:
    """By the module's counters, if it has any; else by a key from torch's generator."""
    if not p:
        return None
    B, T, H, _ = q.shape
    stream: Any = getattr(module, "keyed_dropout", None)
    if stream is not None:
        found: AttentionDropout = stream.of_weights((B, H, T, num_keys), p, q.device)
        return found
    key = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=q.device)
    state = torch.cat([key, key.new_zeros(1)])
    return AttentionDropout(p, state, num_queries=num_keys, num_keys=num_keys)


def _first_head(module: nn.Module, q: Tensor) -> int:
    """Where this rank's heads begin in the whole: of the layer that makes the queries, or that
    takes the values, which is cut by heads."""
    heads, width = q.shape[2], q.shape[3]
    for child in module.children():
        placements = getattr(child, "placements", None) or {}
        place = placements.get("weight")
        if place is None or place.dim is None:
            continue
        if place.local_shape[place.dim] == heads * width:
            return int(place.start) // width
    return 0
