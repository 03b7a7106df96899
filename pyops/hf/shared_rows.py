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
from pyops.parallel.rows.registry import RegistryCalls, go_by_registry, tells_places

__all__ = ["share_rows"]


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
    name, config = type(model).__name__, getattr(model, "config", None)
    if not tells_places(model):
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
    calls = _Calls(context)
    try:
        go_by_registry(model, calls)
    except ValueError as error:
        raise ValueError(f"share_rows: {error}") from None
    model.register_forward_pre_hook(calls.enter, with_kwargs=True)
    model.register_forward_hook(calls.leave, with_kwargs=True)
    return context


class _Calls(RegistryCalls):
    """What happens before and after the forward of a model that is given whole rows."""

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Own tokens and their places."""
        if self.context.paused:
            self.begin(None)
            return args, kwargs
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
        self.begin(None)
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
        if self.number < layers and not self.context.paused:
            raise RuntimeError(
                f"share_rows: {self.number} of {layers} layers of {type(model).__name__} came to "
                "attention over ranks, and the others saw the own tokens alone; this model does "
                "not go by transformers' registry of attention: share out no rows of it"
            )
