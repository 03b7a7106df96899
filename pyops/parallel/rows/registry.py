"""Models of transformers whose rows of tokens ranks share out: an entry of their registry of
attention, which goes over ranks, and one of their registry of masks.

    attention_mask [B, T] of whole rows --> (the model's code around its blocks) --> each layer
    q of own tokens, k and v of own tokens --> attention to the keys of all ranks --> own tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from pyops.models.context import TokenContext
from pyops.ops.attention import AttentionDropout, AttentionMask
from pyops.torch_private import disable_dynamo

__all__ = ["RegistryCalls", "go_by_registry", "tells_places"]

NAME = "pyops_context_parallel"
KNOWN = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "use_cache"}
    | {"output_attentions", "output_hidden_states", "is_causal", "sliding_window", "softcap"}
    | {"position_embeddings", "cache_position", "past_key_values", "output_router_logits"}
)


class RegistryCalls:
    """What the layers of one model ask for in a forward.

    Args:
        context: How the tokens of rows are shared out.

    Attributes:
        number: How many layers came to attention over ranks in the forward at hand.
        whole: Of whole rows, for attention: bool [B, T], the keys that are seen; int32 [B, T],
            documents; or None.
    """

    def __init__(self, context: TokenContext) -> None:
        self.context, self.number = context, 0
        self.whole: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RegistryCalls:
        return self  # of modules that communicate with the same ranks

    def begin(self, whole: Tensor | None) -> None:
        """Before a forward of the model.

        Args:
            whole: See the attributes.
        """
        self.number, self.whole = 0, whole
        _CURRENT.set(self)

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of a model that is given own tokens, and the mask of whole rows: the
        mask goes to attention, not to the model."""
        mask = kwargs.get("attention_mask")
        if self.context.paused or mask is None:
            self.begin(None)
            return args, kwargs
        if mask.dtype != torch.int32:
            mask = None if bool(mask.all()) else mask.bool()
        self.begin(mask)
        return args, {**kwargs, "attention_mask": None}


_CURRENT: ContextVar[RegistryCalls | None] = ContextVar("registry_calls", default=None)


def tells_places(model: nn.Module) -> bool:
    """Whether the forward of a model of transformers can be told tokens and their places."""
    takes = inspect.signature(model.forward).parameters
    return getattr(model, "config", None) is not None and {"input_ids", "position_ids"} <= set(
        takes
    )


def go_by_registry(model: nn.Module, calls: RegistryCalls) -> Callable[[], None]:
    """Let the layers of a model come to attention over ranks, in place.

    Args:
        model: Of transformers.
        calls: Of this model.

    Returns:
        Puts the implementation of attention back that the model had.

    Raises:
        ValueError: Its attention does not go by transformers' registry.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    what: Any = model
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        what.set_attn_implementation(NAME)
        taken = what.config._attn_implementation == NAME
        reason = "its class does not let it be set"
    except (ValueError, AttributeError) as error:
        taken, reason = False, str(error)
    if not taken:
        raise ValueError(
            f"the attention of {type(model).__name__} does not go by transformers' registry "
            f"({reason})"
        )
    for module in model.modules():
        module.shared_rows = calls  # type: ignore[assignment]
    return lambda: what.set_attn_implementation(before)


def _mask(**options: Any) -> Any:
    """An entry of transformers' registry of masks: what attention over ranks needs beside the
    places of tokens."""
    calls = _CURRENT.get()
    if calls is not None and not calls.context.paused:
        return calls.whole
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**options)


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
    calls = module.shared_rows
    assert isinstance(calls, RegistryCalls)
    if calls.context.paused:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found
    return _over_ranks(module, calls, (query, key, value), attention_mask, scaling, options), None


@disable_dynamo
def _over_ranks(
    module: nn.Module,
    calls: RegistryCalls,
    qkv: tuple[Tensor, Tensor, Tensor],
    whole: Tensor | None,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    p, window = options.pop("dropout", 0.0), options.get("sliding_window")
    unknown = sorted(key for key in options if key not in KNOWN and options[key] is not None)
    stream: Any = getattr(module, "keyed_dropout", None)
    if (whole is not None and whole.dim() != 2) or unknown or (p and stream is None):
        what = "a mask of pairs of tokens" if whole is not None else f"dropout {p}, {unknown}"
        raise ValueError(
            f"share_rows: {type(module).__name__} asks for {what}, which attention over ranks does "
            "not take; share out no rows of this model"
        )
    calls.number += 1
    q, k, v = (x.transpose(1, 2) for x in qkv)
    causal = options.get("is_causal")
    documents = whole if whole is not None and whole.dtype == torch.int32 else None
    if documents is None:
        documents = calls.context.added(q.shape[1], len(q), q.device)
    seen = AttentionMask(
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        window=None if window is None else (window - 1, None),
        keys=whole if whole is not None and whole.dtype == torch.bool else None,
        documents=documents,
    )
    row = calls.context.row_of(q.shape[1])
    drops: AttentionDropout | None = None
    if p:
        drops = stream.of_own_weights(q, p)
    return row.attention(
        q, k, v, scale=scale, mask=seen, soft_cap=options.get("softcap"), dropout=drops
    )
