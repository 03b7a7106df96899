"""Hooks that put autograd's edges around modules that know nothing of ranks: where attention, and
where blocks, begin and end.

    blocks.0 ... blocks.n  tokens whole --> SplitTokens --> own rows [n, D] --> JoinTokens --> whole
    attention within them  shared input --> Enter       --> the input of this rank's heads

Without sequence parallelism `Enter` is the region operator `copy`: one sum of the input's gradients
for all the columns within. With it, it gathers the tokens, and its backward scatters that sum.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from pyops.tensor_parallel.convert.head_counts import HeadCounts
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.regions import copy, gather_tokens, scatter_tokens
from pyops.torch_private import forward_pre_hooks

__all__ = ["Enter", "JoinTokens", "SplitTokens", "Tokens"]

# Inputs of which columns are made, beside the first: of self-attention (query, key, value) and of
# cross-attention.
_ALSO = ("key_value_states", "encoder_hidden_states", "memory", "context", "query", "key", "value")
# Inputs that have a part for each head, [B H, .., ..] or [.., H, .., ..], and are made for all
# heads outside of attention.
_BY_HEAD = ("alibi", "position_bias")


class Tokens:
    """The leading dims of the whole tokens, [B, T] or [T, B], of the forward that is under way. For
    the hooks of one stack."""

    shape: tuple[int, ...] = ()

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def count(self) -> int:
        """How many there are, without padding."""
        return math.prod(self.shape)

    def first_of(self, rows: int) -> int:
        """The number of the token that is the first of so many rows: of this rank's, or of all.

        Args:
            rows: As many as a rank has, or all ranks with padding.

        Raises:
            ValueError: They are neither.
        """
        own = self.ranks.rows_per_rank(self.count)
        if rows not in (own, own * self.ranks.size):
            raise ValueError(
                f"{rows} rows are neither the {own} that a rank has of {self.count} tokens nor "
                f"the {own * self.ranks.size} of all {self.ranks.size} ranks"
            )
        return self.ranks.start(self.count) if rows == own else 0


class SplitTokens:
    """Before the first block: [B, T, D], the same on every rank -> this rank's rows [n, D]."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    @classmethod
    def of(cls, block: nn.Module) -> SplitTokens | None:
        """The one before this block; None where there is none."""
        return next((hook for hook in forward_pre_hooks(block) if isinstance(hook, cls)), None)

    def note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int | str, Tensor]:
        """Remember the tokens' shape: where a pipeline passes the block over, too.

        Args:
            module: The block.
            args: Of its call.
            kwargs: The same.

        Returns:
            Where the hidden states are among the arguments, and what they are.
        """
        where, x = _first(module, args, kwargs)
        self.tokens.shape = tuple(x.shape[:-1])
        return where, x

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = self.note(module, args, kwargs)
        return _replaced(
            args, kwargs, where, scatter_tokens(x.flatten(0, -2), group=self.tokens.ranks)
        )


class JoinTokens:
    """After the last block: rows [n, D] -> [B, T, D] on every rank, where every rank goes on in the
    same way."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        rows = output[0] if isinstance(output, tuple | list) else output
        whole = _whole(rows, self.tokens, duplicated=True)
        return whole if rows is output else type(output)([whole, *output[1:]])


class Enter:
    """Before a module whose columns are cut. tokens: what comes in is rows of them; None: it is
    whole.

    Args:
        flat: Give all rows, padding included, instead of [B, T, D].
        heads: Of an attention module, for inputs that have a part for each.
    """

    def __init__(
        self,
        ranks: Ranks,
        tokens: Tokens | None = None,
        *,
        flat: bool = False,
        heads: HeadCounts | None = None,
    ) -> None:
        self.ranks, self.tokens, self.flat, self.heads = ranks, tokens, flat, heads

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = _first(module, args, kwargs)
        if self.tokens is None:
            y = copy(x, group=self.ranks)
        else:
            y = (
                gather_tokens(x, group=self.ranks)
                if self.flat
                else _whole(x, self.tokens, duplicated=False)
            )
        entered = {id(x): y}
        args, kwargs = _replaced(args, kwargs, where, y)
        for other in _named(module, args, kwargs):
            value = args[other] if isinstance(other, int) else kwargs[other]
            if other != where and isinstance(value, Tensor) and value is not y:
                if id(value) not in entered:
                    entered[id(value)] = copy(value, group=self.ranks)
                args, kwargs = _replaced(args, kwargs, other, entered[id(value)])
        return (
            (args, kwargs)
            if self.heads is None
            else self._by_head(module, args, kwargs, self.heads)
        )

    def _by_head(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], heads: HeadCounts
    ) -> Any:
        for where in _named(module, args, kwargs, _BY_HEAD):
            value = args[where] if isinstance(where, int) else kwargs[where]
            if (
                isinstance(value, Tensor)
                and (dim := _dim_of_heads(value, heads.num_heads)) is not None
            ):
                args, kwargs = _replaced(args, kwargs, where, self._own_heads(value, dim, heads))
        return args, kwargs

    def _own_heads(self, value: Tensor, dim: int, heads: HeadCounts) -> Tensor:
        """Those of this rank, with zeros for heads that are padding."""
        value = copy(value, group=self.ranks)
        packed = dim == 0 and value.shape[0] != heads.num_heads
        if packed:
            value, dim = value.unflatten(0, (-1, heads.num_heads)), 1
        first = min(self.ranks.rank * heads.local, heads.num_heads)
        own = value.narrow(dim, first, min(heads.local, heads.num_heads - first))
        if missing := heads.local - own.shape[dim]:
            own = torch.cat(
                [own, own.new_zeros(*own.shape[:dim], missing, *own.shape[dim + 1 :])], dim
            )
        return own.flatten(0, 1) if packed else own


def _dim_of_heads(value: Tensor, H: int) -> int | None:
    """Along which a tensor has a part for each head: of three dims the first, [B H, .., ..], of
    four the second."""
    if value.dim() == 3 and value.shape[0] % H == 0:
        return 0
    return 1 if value.dim() == 4 and value.shape[1] == H else None


def _whole(rows: Tensor, tokens: Tokens, *, duplicated: bool) -> Tensor:
    whole = gather_tokens(rows, tokens=tokens.count, duplicated=duplicated, group=tokens.ranks)
    return whole.view(*tokens.shape, -1)


def _first(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | str, Tensor]:
    """Where the hidden states are among the arguments, and what they are: the first tensor."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in arguments:
        if isinstance(value, Tensor):
            return where, value
    raise TypeError(
        f"{type(module).__name__} was called without a tensor, so there is nothing to "
        "share out between ranks"
    )


def _named(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: tuple[str, ...] = _ALSO,
) -> list[int | str]:
    """Where the arguments of these names are."""
    names = list(inspect.signature(module.forward).parameters) if args else []
    return [i for i, name in enumerate(names[: len(args)]) if name in wanted] + [
        name for name in kwargs if name in wanted
    ]


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], where: int | str, value: Tensor
) -> Any:
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}
