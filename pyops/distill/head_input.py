"""What the last layer of a language model is given, in the place of logits that are never made.

model(tokens) --> hidden states --> head      takes them away, gives a number a token instead,
                                 '------>     which the model must return untouched
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import ColumnParallelLinear, LinearLogits, Ranks
from pyops.tensor_parallel.functional.losses.vocabulary_part import VocabularyPart

__all__ = ["VocabularyLogits", "use_vocabulary_logits", "vocabulary_logits"]

Result = TypeVar("Result")


class VocabularyLogits:
    """The logits of a language model, of which this rank has its words.

    Args:
        head: the model's last layer.
        hidden: [B, T, H], what it was given, on every rank the same.
    """

    def __init__(self, head: nn.Module, hidden: Tensor) -> None:
        self.hidden = hidden
        cut = isinstance(head, ColumnParallelLinear)
        self.ranks: Ranks = head.plan.ranks if cut else Ranks.of(ALONE)  # type: ignore[union-attr,assignment]
        self.vocab_size = int(head.out_features)  # type: ignore[arg-type]
        weight, bias = head.weight, head.bias
        assert isinstance(weight, Tensor)
        self.weight: Tensor = weight
        self.bias: Tensor | None = bias if isinstance(bias, Tensor) else None

    def of(self, ranks: Ranks) -> LinearLogits:
        """The logits as `ranks` hold the words: as they are, or this rank's rows of a whole layer.

        Raises:
            ValueError: the words are cut over other ranks.
        """
        if ranks.size == self.ranks.size:
            return LinearLogits(self.hidden, self.weight, self.bias)
        if self.ranks.size != 1:
            raise ValueError(
                f"the teacher's words lie on {self.ranks.size} ranks, the student's on "
                f"{ranks.size}; give a teacher that lies on as many, or that each rank has whole"
            )
        width = -(-self.vocab_size // ranks.size)
        part = VocabularyPart.of(width, ranks, vocab_size=self.vocab_size, first_column=None)
        rows = slice(part.first_column, part.first_column + part.columns)
        return LinearLogits(
            self.hidden,
            _padded(self.weight[rows], width),
            None if self.bias is None else _padded(self.bias[rows], width),
        )


def vocabulary_logits(model: nn.Module, call: Callable[[], Any]) -> VocabularyLogits:
    """The logits of a language model, not made.

    Args:
        model: one of pyops, or of transformers, cut by tensor parallelism or not.
        call: calls the model with its tokens and returns what it returns.

    Raises:
        ValueError: a model without such a last layer, or that changes its logits after it (a soft
            cap, a scale).
    """
    return use_vocabulary_logits(model, call, lambda logits: logits)


def use_vocabulary_logits(
    model: nn.Module, call: Callable[[], Any], use: Callable[[VocabularyLogits], Result]
) -> Result:
    """What `use` makes of the logits of a language model, while its last layer is called: the
    parameters of ZeRO stage 3 are whole then.

    Args:
        model: as of `vocabulary_logits`.
        call: as of `vocabulary_logits`.
        use: is called once, in the last layer's place.

    Raises:
        ValueError: as `vocabulary_logits`.
    """
    head = _head(model)
    found: list[Result] = []
    placeholders: list[Tensor] = []

    def take(hidden: Tensor, *shape: Any, **options: Any) -> Tensor:
        given = _whole(head, hidden, *shape)
        placeholders.append(hidden.new_zeros(*given.shape[:-1], 1))
        found.append(use(VocabularyLogits(head, given)))
        return placeholders[-1]

    head.forward = take  # type: ignore[method-assign]
    try:
        returned = call()
    finally:
        del head.forward
    logits = returned if isinstance(returned, Tensor) else _logits_in(returned)
    if len(found) != 1 or logits is not placeholders[0]:
        raise ValueError(
            f"{type(model).__name__} does something to its logits after its last layer "
            f"{type(head).__name__}; compare whole logits with logits_divergence"
        )
    return found[0]


def _head(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, VocabularyHead):
            if module.layout.context is not None:
                raise ValueError(
                    f"{type(model).__name__} shares the tokens of a row over "
                    f"{module.layout.context.ranks.size} ranks; distill without cp"
                )
            return module
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if type(head) not in (nn.Linear, ColumnParallelLinear) or "forward" in vars(head):
        raise ValueError(
            f"{type(model).__name__} has no linear layer alone that gives the logits of a "
            "vocabulary; compare whole logits with logits_divergence"
        )
    assert isinstance(head, nn.Module)
    return head


def _whole(head: nn.Module, hidden: Tensor, *shape: Any) -> Tensor:
    """[B, T, H] on every rank."""
    if isinstance(head, VocabularyHead):
        return head.layout.whole(hidden, *shape)
    return hidden


def _logits_in(found: Any) -> Any:
    if isinstance(found, tuple) and not hasattr(found, "logits"):
        return found[0] if found else None
    return getattr(found, "logits", None)


def _padded(rows: Tensor, width: int) -> Tensor:
    missing = width - len(rows)
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
