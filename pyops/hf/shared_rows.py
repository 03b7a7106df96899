"""Models of transformers whose rows of tokens ranks share out: attention over ranks in the place of
the implementation that the model was made with.

    input_ids of whole rows --> own tokens, position_ids = their places --> model --> own logits
                                              attention: q of own tokens, k and v of all
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.models.context import TokenContext
from pyops.ops.attention import AttentionMask

__all__ = ["share_rows"]

NAME = "pyops_context_parallel"
KNOWN = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "use_cache"}
    | {"output_attentions", "output_hidden_states", "is_causal", "sliding_window", "softcap"}
    | {"position_embeddings", "cache_position", "past_key_values", "output_router_logits"}
)


def share_rows(model: nn.Module, ranks: ContextRanks, *, order: str = "zigzag") -> TokenContext:
    """Let a causal language model of transformers share out the tokens of its rows, in place.

    Its forward is given the same whole rows on every rank, as input_ids [B, T] without a padding
    mask, and returns the logits of the own tokens. The loss is the caller's: a sum over the own
    targets, `token_mean`, and gradients summed over the ranks. Models are those whose attention
    goes by transformers' registry and whose positions by position_ids; that every layer came to it
    is looked at in each forward.

    Args:
        model: With attention_dropout 0, for the model's own dropout does not know of other ranks.
        ranks: That share rows, and the method.
        order: "zigzag", "contiguous" or "striped".

    Returns:
        How tokens are shared out: `.row(T).shard(targets)` are the own ones, of targets that are
        shifted before.

    Raises:
        ValueError: For a model that takes no position_ids, has no registry, or drops weights of
            attention; in forward for labels, masks of padding, caches, and rows that the order
            can't share out.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, config = type(model).__name__, getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    if config is None or not {"input_ids", "position_ids"} <= set(takes):
        raise ValueError(
            f"share_rows: {name} takes no input_ids and position_ids, so its tokens can't be told "
            "their places; share out rows of a model that does"
        )
    dropped = [key for key in ("attention_dropout", "attn_pdrop") if getattr(config, key, 0.0)]
    if dropped:
        raise ValueError(
            f"share_rows: {dropped[0]} of {name} is {getattr(config, dropped[0])}, which would "
            "fall by rank; set it to 0"
        )
    context = TokenContext(ranks, order)
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"share_rows: the attention of {name} does not go by transformers' registry ({error})"
        ) from None
    calls = _Calls(context)
    for module in model.modules():
        module.shared_rows = calls  # type: ignore[assignment]
    model.register_forward_pre_hook(calls.enter, with_kwargs=True)
    model.register_forward_hook(calls.leave, with_kwargs=True)
    return context


class _Calls:
    """What happens before and after the forward of a model."""

    def __init__(self, context: TokenContext) -> None:
        self.context, self.number = context, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return self  # of modules that communicate with the same ranks

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Own tokens and their places."""
        names = list(inspect.signature(model.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(tokens, Tensor):
            raise ValueError("share_rows: give input_ids of whole rows, [B, T]")
        for key in ("labels", "past_key_values", "position_ids", "inputs_embeds"):
            if given.get(key) is not None:
                raise ValueError(
                    f"share_rows: {key} is given; the ranks share whole rows of input_ids out, and "
                    "a loss is made of the own logits and row.shard(targets)"
                )
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                "share_rows: attention_mask leaves tokens out; pad rows at their end and give "
                "their targets -100, which changes no loss of a causal model"
            )
        row = self.context.row(tokens.shape[1])
        places = row.index(device=tokens.device)
        self.number = 0
        own = {
            **given,
            "input_ids": row.shard(tokens),
            "attention_mask": None,
            "position_ids": places.expand(len(tokens), -1),
        }
        if "use_cache" in names:
            own["use_cache"] = False
        return (), own

    def leave(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """RuntimeError unless every layer came to attention over ranks."""
        layers = getattr(model.config, "num_hidden_layers", 1)
        if self.number < layers:
            raise RuntimeError(
                f"share_rows: {self.number} of {layers} layers of {type(model).__name__} came to "
                "attention over ranks, and the others saw the own tokens alone; this model does "
                "not go by transformers' registry of attention: share out no rows of it"
            )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Attention over ranks goes by the places of tokens."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An entry of transformers' registry: [B, H, n, K] -> [B, n, H, K]."""
    calls, window = module.shared_rows, options.get("sliding_window")
    dropout = options.pop("dropout", 0.0)
    unknown = sorted(key for key in options if key not in KNOWN and options[key] is not None)
    if attention_mask is not None or dropout or unknown:
        what = "a mask" if attention_mask is not None else f"dropout {dropout}, {unknown}"
        raise ValueError(
            f"share_rows: {type(module).__name__} asks for {what}, which attention over ranks does "
            "not take; share out no rows of this model"
        )
    assert isinstance(calls, _Calls)
    calls.number += 1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True))
    seen = AttentionMask(causal=causal, window=None if window is None else (window - 1, None))
    row = calls.context.row_of(q.shape[1])
    y = row.attention(q, k, v, scale=scaling, mask=seen, soft_cap=options.get("softcap"))
    return y, None
