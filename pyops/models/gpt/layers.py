"""The layers of a GPT: embedding, block of attention and MLP, and head.

Letters of tensor names: B batch, T sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from pyops.attention import document_positions
from pyops.models.config_checks import (
    ACTIVATIONS,
    pattern_of,
)
from pyops.models.gpt.config import GPTConfig
from pyops.models.model_layout import AddedEmbedding, ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    KVCache,
    MLPConfig,
    RowCache,
    VocabParallelEmbedding,
)
from pyops.tensor_parallel.grids import (
    GridEmbedding,
    GridHead,
    GridLinearConfig,
    GridRows,
)

__all__ = ["GPTBlock", "GPTEmbedding", "GPTHead"]


def places_of(documents_BT: Tensor | None, positions_BT: Tensor | None) -> Tensor | None:
    """int64 [B, T], the place of each token in its document; None: those of the row."""
    if positions_BT is not None or documents_BT is None:
        return positions_BT
    return document_positions(documents_BT)


class GPTEmbedding(nn.Module):
    """tokens_BT -> x_BTD, or a rank's rows of it."""

    def __init__(self, config: GPTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        size = config.vocab_size, config.dim, EmbeddingConfig(seed=None)
        self.token: nn.Module
        self.position: nn.Module | None = None
        learned = config.positions == "learned"
        if layout.grid is not None:
            self.token = GridEmbedding(*size, **layout.on_blocks)
            if learned:
                self.position = GridRows(config.sequence_length, config.dim, **layout.on_blocks)
        else:
            self.token = VocabParallelEmbedding(*size, **layout.parallel)
            if learned:
                self.position = AddedEmbedding(config.sequence_length, config.dim, layout=layout)
        self.dropout = layout.dropout(config.dropout, config.dim)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        first: int = 0,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        tokens_BT = self.layout.own_tokens(tokens_BT)
        x = self.token(tokens_BT)
        if self.position is not None:
            place_BT = places_of(documents_BT, positions_BT)
            if place_BT is None:
                places = self.layout.own_places(tokens_BT.shape[1], tokens_BT.device)
                place_BT = (first + places).expand_as(tokens_BT)
            else:
                place_BT = self.layout.own_tokens(place_BT)
            x = x + self.position(self.layout.take_index(place_BT))
        result: Tensor = self.dropout(x)
        return result


class GPTBlock(nn.Module):
    """x_BTD -> x_BTD; of a rank's rows, with the (B, T) of all tokens, likewise."""

    def __init__(self, config: GPTConfig, *, layout: ModelLayout, rotary: Rotary | None) -> None:
        super().__init__()
        self.layout = layout
        self.norm1, self.norm2 = (
            layout.norm(config.norm, config.dim, eps=config.norm_eps, bias=config.bias)
            for _ in range(2)
        )
        self.attention = layout.self_attention(
            config.dim,
            config.num_heads,
            AttentionConfig(
                num_kv_heads=config.kv_heads,
                head_dim=config.head_width,
                causal=True,
                bias=config.bias,
                dropout=config.attention_dropout,
                pattern=pattern_of(config),
                pattern_block=config.pattern_block,
                skip_bias=True,
                seed=None,
            ),
        )
        activation = ACTIVATIONS[config.activation]
        self.mlp = layout.block_mlp(
            config.dim,
            config.mlp_width,
            MLPConfig(
                activation=activation.function,
                gated=activation.gated,
                bias=config.bias,
                skip_bias=True,
                seed=None,
            ),
        )
        self.dropout1, self.dropout2 = (
            layout.dropout(config.dropout, config.dim) for _ in range(2)
        )
        self.rotary = rotary

    def forward(
        self,
        x: Tensor,
        shape: Shape | None = None,
        *,
        past: KVCache | RowCache | None = None,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        shape = self.layout.own_shape(shape)
        length, first = x.shape[1] if shape is None else shape[1], 0 if past is None else len(past)
        span = past.span if isinstance(past, RowCache) else None
        turns = None if span is None else span.turns
        if self.rotary is not None and turns is None:
            place_BT = places_of(documents_BT, positions_BT)
            if place_BT is None:
                place_BT = self.layout.shared_places(length, x.device)
            else:
                place_BT = self.layout.own_tokens(place_BT)
            turns = self.rotary(length, first=first, positions_BT=place_BT)
            if span is not None:
                span.turns = turns
        y = self.attention(self.norm1(x), shape=shape, mask=documents_BT, rotary=turns, past=past)
        y = self.dropout1(*y, residual=x)
        result: Tensor = self.dropout2(*self.mlp(self.norm2(y)), residual=y)
        return result


class GPTHead(nn.Module):
    """x_BTD -> logits_BTV; with targets_BT, the loss."""

    def __init__(self, config: GPTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.norm = layout.norm(config.norm, config.dim, eps=config.norm_eps, bias=config.bias)
        self.output: VocabularyHead | GridHead
        if layout.grid is not None:
            unset = GridLinearConfig(seed=None)
            self.output = GridHead(config.vocab_size, config.dim, config=unset, **layout.on_blocks)
        else:
            self.output = VocabularyHead(config.vocab_size, config.dim, layout=layout)

    def forward(
        self,
        x: Tensor,
        shape: Shape | None = None,
        *,
        targets_BT: Tensor | None = None,
        gather: bool = True,
        reduction: str = "mean",
    ) -> Tensor:
        x = self.norm(x)
        if targets_BT is None:
            result: Tensor = self.output(x, shape, gather=gather)
            return result
        return self.output.loss(x, targets_BT, shape=shape, reduction=reduction)
