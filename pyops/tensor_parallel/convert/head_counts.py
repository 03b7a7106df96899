"""How many heads an attention module of anybody's has, read from its attributes, and what each rank
has of them.

                    what is read                                       what is set
LlamaAttention      config.num_attention_heads,                        num_key_value_groups
                    config.num_key_value_heads, head_dim
GPT2Attention       num_heads, head_dim                                num_heads, split_size
BertSelfAttention   num_attention_heads, attention_head_size           num_attention_heads,
                                                                       all_head_size
T5Attention         n_heads, key_value_proj_dim                        n_heads, inner_dim
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.layers.head_groups import check_heads

__all__ = ["HeadCounts", "heads_of", "set_heads"]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_EACH = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "head_size")
_PER_GROUP = ("num_key_value_groups",)
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim")


@dataclass(frozen=True)
class HeadCounts:
    """The heads of an attention module, and how the ranks share them."""

    num_heads: int
    """Number of heads of queries."""
    num_kv_heads: int
    """Number of heads of keys and values, each shared by a group of heads of queries."""
    head_dim: int
    """Width of a head."""
    num_ranks: int
    """Number of ranks that share the heads."""

    @property
    def copies(self) -> int:
        """Number of ranks that hold the key and value of a group."""
        return max(1, self.num_ranks // self.num_kv_heads)

    @property
    def unit(self) -> int:
        """Number of a query's columns that stay together on one rank."""
        return (
            self.head_dim
            if self.copies > 1
            else self.num_heads // self.num_kv_heads * self.head_dim
        )

    @property
    def local(self) -> int:
        """Number of heads of queries on each rank, padding included."""
        return (
            -(-self.num_heads * self.head_dim // self.unit // self.num_ranks)
            * self.unit
            // self.head_dim
        )

    @property
    def local_groups(self) -> int:
        """Number of heads of keys and values on each rank, padding included."""
        return -(-self.num_kv_heads * self.copies // self.num_ranks)


def heads_of(module: nn.Module, name: str, ranks: Ranks) -> HeadCounts:
    """The heads of an attention module.

    Raises:
        ValueError: Where its attributes do not say them, or the ranks can't share them.
    """
    H = _number(module, _HEADS)
    if H is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) does not say how many heads it has; it "
            "needs an attribute, or one of its "
            f"config, of {', '.join(_HEADS)}"
        )
    per_group = _number(module, _PER_GROUP)
    G = _number(module, _GROUPS) or (H // per_group if per_group else H)
    K = _number(module, _EACH)
    if K is None:
        width = _number(module, ("embed_dim", "hidden_size", "n_embd", "d_model"))
        if width is None or width % H:
            raise ValueError(
                f"{name} ({type(module).__name__}) does not say how wide a head is; it "
                f"needs {', '.join(_EACH)}"
            )
        K = width // H
    try:
        check_heads(H, G, ranks.size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return HeadCounts(H, G, K, ranks.size)


def set_heads(
    module: nn.Module, heads: HeadCounts, *, configured: bool = False
) -> dict[str, tuple[int, int]]:
    """Set the module's own numbers of heads to this rank's; {attribute: (before, after)}.

    Its config is left alone.

    Args:
        configured: The module gets a copy of it, with these numbers.
    """
    changed = _set(module, heads)
    config = getattr(module, "config", None)
    if configured and config is not None:
        module.config = copy.copy(config)
        found = _set(module.config, heads)
        changed.update({f"config.{name}": numbers for name, numbers in found.items()})
    return changed


def _set(holder: Any, heads: HeadCounts) -> dict[str, tuple[int, int]]:
    changed = {}
    for names, whole, local in (
        (_HEADS, heads.num_heads, heads.local),
        (_GROUPS, heads.num_kv_heads, heads.local_groups),
        (_PER_GROUP, heads.num_heads // heads.num_kv_heads, heads.local // heads.local_groups),
        (_WIDTHS, heads.num_heads * heads.head_dim, heads.local * heads.head_dim),
    ):
        for name in names:
            if holder.__dict__.get(name) == whole and whole != local:
                setattr(holder, name, local)
                changed[name] = (whole, local)
    return changed


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            try:
                found = getattr(holder, name, None)
            except Exception as error:  # transformers', where each layer has a number of its own
                raise ValueError(
                    f"{type(module).__name__}: its config does not tell one {name}: {error}"
                ) from error
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None
