"""Which tokens of its rows a rank has, where ranks share them out: the batch of a trainer is cut by
their order, and losses are of own tokens.

    batch of whole rows        input_ids   0 1 2 3 4 5 6 7      on every rank alike
    labels, shifted                        1 2 3 4 5 6 7 .
    zigzag, rank 0             input_ids   0 1 6 7    labels 1 2 7 .    position_ids 0 1 6 7
            rank 1             input_ids   2 3 4 5    labels 3 4 5 6    position_ids 2 3 4 5

    attention_mask of models of transformers stays that of whole rows, for attention

Rows of a length that the order can't share out are padded at their end, and have the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from pyops.context_parallel import Order, pad_tokens
from pyops.models.context import TokenContext
from pyops.parallel.losses import IGNORED, Batch, CountedLoss, LabelLoss, names_of
from pyops.parallel.rows.batches import TARGETS

__all__ = ["SharedLoss", "SharedTokens", "is_packed", "places_argument"]

PLACES = ("position_ids", "positions")
MASK = "attention_mask"
NOT_SHARED = ("past_key_values", "inputs_embeds", "decoder_input_ids")


def places_argument(accepted: Iterable[str]) -> str | None:
    """By which argument a model is told the places of its tokens; None: by none.

    Args:
        accepted: The names of the arguments of its forward.
    """
    return next((name for name in PLACES if name in set(accepted)), None)


def is_packed(position_ids: Tensor) -> bool:
    """Whether positions begin anew within a row: so transformers is told of documents that stand
    side by side."""
    return bool((position_ids.diff(dim=-1) != 1).any())


class SharedTokens:
    """Cuts batches.

    Args:
        context: How the tokens of rows are shared out.
        accepted: The names of the arguments of the model's forward.
        whole_mask: Whether attention is given the attention_mask of whole rows, as of models of
            transformers.
        documents: Whether the model takes positions that begin anew for documents, of which none
            sees another.
    """

    def __init__(
        self,
        context: TokenContext,
        accepted: Iterable[str],
        *,
        whole_mask: bool,
        documents: bool = False,
    ) -> None:
        self.context, self.accepted = context, frozenset(accepted)
        self.whole_mask, self.documents = whole_mask, documents
        self.places = places_argument(self.accepted)

    def length(self, batch: Batch) -> int:
        """Tokens of a row: of input_ids, or of the first argument of the model that has tokens.

        Raises:
            ValueError: There is none.
        """
        names = [name for name in ("input_ids", *batch) if name in self.accepted and name in batch]
        for name in names:
            value = batch[name]
            if isinstance(value, Tensor) and value.dim() >= 2:
                return int(value.shape[1])
        raise ValueError(
            f"the batch has {', '.join(batch) or 'nothing'}, none of which is of tokens [rows, T, "
            "...] that ranks of context parallelism share out; give such an argument of the model"
        )

    def check(self, batch: Batch, loss: CountedLoss) -> None:
        """Refuse a batch whose tokens can't be shared out. Local.

        Args:
            batch: Of whole rows.
            loss: Of these.

        Raises:
            ValueError: Naming the argument and the fix.
        """
        T, ranks = self.length(batch), self.context.ranks.size
        for name in NOT_SHARED:
            if batch.get(name) is not None:
                raise ValueError(
                    f"the batch has {name!r}, which ranks of context parallelism do not share out; "
                    "give input_ids of whole rows, or a plan with cp=1"
                )
        whole = Order.padded_length(self.context.order, length=T, ranks=ranks)
        labels, mask = batch.get("labels"), batch.get(MASK)
        if isinstance(loss, LabelLoss):
            if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.shape[1] != T:
                raise ValueError(
                    f"labels are {list(labels.shape) if isinstance(labels, Tensor) else labels}, "
                    f"and ranks of context parallelism share out rows of {T} tokens; give one "
                    "label for each token, [rows, T], or a plan with cp=1"
                )
        elif whole != T:
            Order.of(self.context.order, length=T, ranks=ranks)  # says to what to pad
        if self.whole_mask and isinstance(mask, Tensor) and tuple(mask.shape[1:]) != (T,):
            raise ValueError(
                f"attention_mask is {list(mask.shape)}; with context parallelism give that of "
                f"whole rows, [rows, {T}]"
            )
        places = None if self.places is None else batch.get(self.places)
        if self.whole_mask and isinstance(places, Tensor) and is_packed(places):
            if mask is not None:
                raise ValueError(
                    "position_ids begin anew within rows, for documents, and attention_mask is "
                    "given; leave the mask out, and give padding labels of -100"
                )
            if not self.documents:
                raise ValueError(
                    "position_ids begin anew within rows, and this model does not keep documents "
                    "apart by them; leave position_ids out, or give plan cp=1"
                )

    def own(self, batch: Batch, *, loss: CountedLoss | None = None) -> dict[str, Any]:
        """This rank's tokens of a batch of whole rows: arguments of the model, labels that are
        shifted already, and what else the loss takes.

        Args:
            batch: Of whole rows, the same on every rank that shares them.
            loss: Whose labels may have to be shifted.
        """
        T = self.length(batch)
        context = self.context
        whole = Order.padded_length(context.order, length=T, ranks=context.ranks.size)
        row = context.row(whole)
        context.own = whole // context.ranks.size
        context.unpadded = T if whole != T else None
        shifts = isinstance(loss, LabelLoss) and loss.shifts
        found = dict(batch)
        tokens = [
            name
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == T
        ]
        like: Tensor = batch[next(name for name in tokens if name in self.accepted)]
        if self.whole_mask:
            found[MASK] = self._of_whole_rows(batch, like, whole)
        for name in tokens:
            value = batch[name]
            if name == MASK and self.whole_mask:
                continue
            if name == "labels" and shifts:
                value = functional.pad(value[:, 1:], (0, 1), value=IGNORED)
            fill = IGNORED if name in TARGETS else 0
            found[name] = row.shard(pad_tokens(value, whole, value=fill))
        if self.places is not None and batch.get(self.places) is None:
            places = row.index(device=like.device).clamp(max=T - 1)
            found[self.places] = places.expand(len(like), -1)
        if found.get(MASK, self) is None:
            del found[MASK]
        return found

    def _of_whole_rows(self, batch: Batch, like: Tensor, whole: int) -> Tensor | None:
        """What attention needs: bool [rows, T], the keys that are seen; int32 [rows, T],
        documents; None: all tokens."""
        places, mask = batch.get(self.places or ""), batch.get(MASK)
        if isinstance(places, Tensor) and is_packed(places):
            documents = (places.diff(dim=-1, prepend=places[:, :1] - 1) != 1).cumsum(-1)
            return pad_tokens(documents.to(torch.int32), whole, value=-1)
        if mask is None and self.context.unpadded is None:
            return None
        if mask is None:
            mask = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
        return pad_tokens(mask.bool(), whole, value=False)


class SharedLoss:
    """A loss of own tokens, that is counted of whole rows.

    Args:
        inner: As of one rank.
        tokens: Cuts the batches.

    Attributes:
        of_own: Of own tokens, whose labels are shifted already.
    """

    def __init__(self, inner: CountedLoss, tokens: SharedTokens) -> None:
        self.inner, self.tokens = inner, tokens
        self.names = names_of(inner)
        self.of_own: CountedLoss = (
            LabelLoss(shifts=False) if isinstance(inner, LabelLoss) else inner
        )
        self._adds_up = isinstance(inner, LabelLoss)

    def count(self, batch: Batch) -> float:
        """Of whole rows.

        Raises:
            ValueError: Their tokens can't be shared out.
        """
        self.tokens.check(batch, self.inner)
        return self.inner.count(batch)

    def divisor(self, batch: Batch) -> float:
        """Of whole rows."""
        return self.inner.divisor(batch)

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """Further rows."""
        return self.inner.padded(batch, rows)

    def sum(self, outputs: Any, batch: Batch) -> Tensor:
        """Of own tokens.

        Args:
            outputs: Of own tokens.
            batch: What `SharedTokens.own` gave.

        Raises:
            ValueError: At the first time, where a loss of the caller's own is no sum over tokens.
        """
        total = self.of_own.sum(outputs, batch)
        if not self._adds_up:
            with torch.no_grad():
                self._check_sum(float(total), outputs, batch)
            self._adds_up = True
        return total

    def _check_sum(self, total: float, outputs: Any, batch: Batch) -> None:
        """Tokens in another order, and in two parts, must have the same sum: one that compares a
        token with the next would miss those that other ranks have."""
        own = self.tokens.context.own
        assert own is not None
        backward, middle = torch.arange(own - 1, -1, -1), max(own // 2, 1)
        cuts = [[backward], [torch.arange(middle), torch.arange(middle, own)]]

        def some(tree: Any, index: Tensor) -> Any:
            def of(x: Any) -> Any:
                if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != own:
                    return x
                return x.index_select(1, index.to(x.device))

            if isinstance(tree, Mapping):  # such as transformers' outputs
                kind: Any = type(tree)
                return kind({key: of(value) for key, value in tree.items()})
            return tree_map(of, tree)

        for parts in cuts if own > 1 else []:
            sums = [
                float(self.inner.sum(some(outputs, part), some(dict(batch), part)))
                for part in parts
            ]
            if abs(sum(sums) - total) > 1e-3 * max(1e-6, abs(total), *map(abs, sums)):
                how = "two parts" if len(sums) > 1 else "another order"
                raise ValueError(
                    f"loss: the first function gives {total:.6g} for this rank's tokens, and "
                    f"{sum(sums):.6g} for the same in {how}: "
                    "it is no sum over tokens, and can't be added up over ranks of context "
                    "parallelism; shift targets in the batch, before they are shared out, and "
                    "return a sum"
                )
