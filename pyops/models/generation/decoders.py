"""What generation asks of a model: the logits that follow some tokens of some rows, whose keys and
values are kept.

    GPTDecoder   a row's text begins with its prompt, which is computed in chunks
    T5Decoder    the encoder reads the prompt, once; the text begins with start_token
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.models.generation.token_step import TokenStep, token_step
from pyops.models.gpt import GPT
from pyops.models.t5 import T5
from pyops.tensor_parallel import MemoryRows, RowCache, RowSpan

__all__ = ["Decoder", "GPTDecoder", "T5Decoder", "decoder_of"]


class Decoder(ABC):
    """A model, and the keys and values of groups of rows.

    Args:
        model: GPT or T5.
        num_rows: How many rows each group has.
        dtype: Of keys and values; None: that which they are computed in.
    """

    most_places: int | None = None
    """How many tokens a row can have."""
    cut = False
    """Whether this rank has only some of the blocks."""
    own_blocks: Sequence[int] = ()
    """The numbers of those that it has."""
    num_blocks = 0
    """Of the whole model; 0 for one that is not cut."""

    def __init__(
        self, model: Any, num_rows: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.ranks = model, model.layout.ranks
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        blocks = self._blocks()
        self.caches = [[RowCache(rows, dtype=dtype) for _ in blocks] for rows in num_rows]

    @abstractmethod
    def _blocks(self) -> list[nn.Module]:
        """Those of this rank that attend to what was generated."""

    @abstractmethod
    def begins_with(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of which a row's text is made at first."""

    def read(self, group: int, row: int, prompt: Sequence[int]) -> None:  # noqa: B027  # nothing, but of an encoder
        """What is done with a prompt before its row's first token."""

    def prepare(self) -> None:  # noqa: B027  # nothing, but of a decoder that keeps something
        """Forget what was made of the model's parameters, which may have changed."""

    @abstractmethod
    def hidden(self, group: int, span: RowSpan, tokens_RT: Tensor, x: Tensor | None) -> Tensor:
        """What this rank's blocks make of the tokens, as a rank holds them.

        Args:
            group: Of rows.
            span: Where the tokens stand.
            tokens_RT: On the device of the model.
            x: What the blocks of the stage before made of them; None on the first stage.
        """

    def empty(self, shape: tuple[int, int]) -> Tensor:
        """As `hidden` gives it for (R, T) tokens, without values."""
        layout, dim = self.model.layout, self.model.config.dim
        size: tuple[int, ...] = (*shape, dim)
        if layout.shared:
            size = (layout.ranks.rows_per_rank(shape[0] * shape[1]), dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def logits(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """[R, own words] of the last tokens.

        Args:
            x: Of `hidden`.
            shape: (R, T).
        """
        if not self.model.layout.shared:
            x = x[:, -1:]
            shape = (shape[0], 1)
        whole: Tensor = self.model.head(x, shape, gather=False)
        return whole[:, -1]

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(words of all ranks, this rank's first one)"""
        place = self.model.head.output.placements["weight"]
        return self.model.config.vocab_size, place.start

    def move(self, group: int, source: int, target: int) -> None:
        """Give a row's keys and values to another row of the group."""
        for cache in self.caches[group]:
            cache.move(source, target)


class GPTDecoder(Decoder):
    """Of a GPT, whole or a stage of it. See `Decoder`."""

    def __init__(
        self, model: GPT, num_rows: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, num_rows, dtype)
        self.most_places = model.config.sequence_length
        self.own_blocks = [int(number) for number in model.blocks._modules]
        self.num_blocks = model.config.num_layers
        self.cut = len(self.own_blocks) < self.num_blocks
        self._step: TokenStep | None = None
        self._prepared = False

    def prepare(self) -> None:
        """See `Decoder.prepare`."""
        self._prepared = False

    def leave_to_modules(self) -> None:
        """Compute by the model's modules until `prepare`."""
        self._step, self._prepared = None, True

    @property
    def step(self) -> TokenStep | None:
        """The model for one token a row; None where its modules compute that, too."""
        if torch.is_grad_enabled():
            return None
        if not self._prepared:
            self._step, self._prepared = token_step(self.model, self.caches[0][0].dtype), True
        return self._step

    def _blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def begins_with(self, prompt: Sequence[int]) -> list[int]:
        """The prompt."""
        return list(prompt)

    def hidden(self, group: int, span: RowSpan, tokens_RT: Tensor, x: Tensor | None) -> Tensor:
        """See `Decoder.hidden`."""
        model, shape = self.model, (tokens_RT.shape[0], tokens_RT.shape[1])
        if shape[1] == 1 and (step := self.step) is not None:
            return step.hidden(span, tokens_RT, self.caches[group])
        if x is None:
            x = model.embedding(tokens_RT, positions_BT=span.places_RT)
        for block, cache in zip(model.blocks, self.caches[group], strict=True):
            cache.span = span
            x = block(x, shape, past=cache, positions_BT=span.places_RT)
        return x

    def logits(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """See `Decoder.logits`."""
        if (step := self.step) is not None:
            return step.logits(x[:, -1:])
        return super().logits(x, shape)


class T5Decoder(Decoder):
    """Of a T5. See `Decoder`."""

    def __init__(
        self, model: T5, num_rows: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, num_rows, dtype)
        self.memories = [[MemoryRows(n, dtype=dtype) for _ in self._blocks()] for n in num_rows]

    def _blocks(self) -> list[nn.Module]:
        return list(self.model.decoder.blocks)

    def begins_with(self, prompt: Sequence[int]) -> list[int]:
        """start_token."""
        return [self.model.config.start_token]

    def read(self, group: int, row: int, prompt: Sequence[int]) -> None:
        """The encoder's result for the prompt, and its keys and values in each block."""
        tokens_1S = torch.tensor([list(prompt)], device=self.device)
        memory = self.model.encode(tokens_1S)
        for block, kept in zip(self._blocks(), self.memories[group], strict=True):
            kept.fill(row, *block.cross.memory_keys(memory, (1, len(prompt))))  # type: ignore[union-attr,operator]

    def hidden(self, group: int, span: RowSpan, tokens_RT: Tensor, x: Tensor | None) -> Tensor:
        """See `Decoder.hidden`."""
        stack, shape = self.model.decoder, (tokens_RT.shape[0], tokens_RT.shape[1])
        x = stack.dropout1(self.model.embedding(tokens_RT))
        bias = span.bias(stack.relative())
        kept = zip(stack.blocks, self.caches[group], self.memories[group], strict=True)
        for block, cache, memory in kept:
            cache.span = memory.span = span
            x = block(x, shape, bias=bias, past=(cache, memory))
        result: Tensor = stack.dropout2(stack.norm(x))
        return result

    def move(self, group: int, source: int, target: int) -> None:
        """See `Decoder.move`."""
        super().move(group, source, target)
        for memory in self.memories[group]:
            memory.move(source, target)


def decoder_of(
    model: nn.Module, num_rows: Sequence[int], dtype: torch.dtype | None = None
) -> Decoder:
    """The model as generation takes it.

    Args:
        model: GPT or T5.
        num_rows: Of each group of rows.
        dtype: Of keys and values.

    Raises:
        TypeError: For another model.
        ValueError: For a GPT with a sparse pattern, and parameters on meta, or none.
    """
    if isinstance(model, T5):
        _check_parameters(model)
        return T5Decoder(model, num_rows, dtype)
    if not isinstance(model, GPT):
        hint = "pyops.models.GPT and T5 predict the token that follows"
        if callable(getattr(model, "generate", None)):
            hint = f"call its own generate, or load it as one of pyops' by pyops.hub: {hint}"
        raise TypeError(f"generate: the model is {type(model).__name__}; {hint}")
    if model.config.pattern:
        raise ValueError(
            f"generate: the model attends by the pattern {model.config.pattern!r}; continue a text "
            "with pyops.models.sample, which takes one row"
        )
    _check_parameters(model)
    return GPTDecoder(model, num_rows, dtype)


def _check_parameters(model: nn.Module) -> None:
    """Refuse a model that can't compute."""
    named = dict(model.named_parameters())
    if not named:
        raise ValueError(
            f"generate: this {type(model).__name__} has no parameters on this rank; let every rank "
            "keep a layer"
        )
    for name, parameter in named.items():
        if parameter.is_meta:
            raise ValueError(
                f"generate: {name} is on meta and has no numbers; give the model memory (to_empty) "
                "and load its weights first"
            )
