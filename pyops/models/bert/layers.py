"""The layers of a BERT: embedding, block of attention and MLP, and the head of masked tokens and
sentences.

Letters of tensor names: B batch, T sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.models.bert.config import BERTConfig
from pyops.models.config_checks import (
    ACTIVATIONS,
    pattern_of,
)
from pyops.models.model_layout import AddedEmbedding, ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    VocabParallelEmbedding,
)

__all__ = ["BERTBlock", "BERTEmbedding", "BERTHead", "make_blocks"]


class BERTEmbedding(nn.Module):
    """tokens_BT, types_BT -> x_BTD, or a rank's rows of it."""

    def __init__(self, config: BERTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.token = VocabParallelEmbedding(
            config.vocab_size, config.dim, EmbeddingConfig(seed=None), **layout.parallel
        )
        learned = config.positions == "learned"
        self.position = (
            AddedEmbedding(config.sequence_length, config.dim, layout=layout) if learned else None
        )
        self.kind = AddedEmbedding(config.num_types, config.dim, layout=layout)
        self.norm = layout.norm("layernorm", config.dim, eps=config.norm_eps)
        self.dropout = layout.dropout(config.dropout, config.dim)

    def forward(self, tokens_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        types_BT = torch.zeros_like(tokens_BT) if types_BT is None else types_BT
        tokens_BT, types_BT = (self.layout.own_tokens(each) for each in (tokens_BT, types_BT))
        x = self.token(tokens_BT) + self.kind(self.layout.take_index(types_BT))
        if self.position is not None:
            places = self.layout.own_places(tokens_BT.shape[1], tokens_BT.device)
            place_BT = places.expand_as(tokens_BT)
            x = x + self.position(self.layout.take_index(place_BT))
        result: Tensor = self.dropout(self.norm(x))
        return result


class BERTBlock(nn.Module):
    """x_BTD -> x_BTD; of a rank's rows, with the (B, T) of all tokens, likewise."""

    def __init__(
        self, config: BERTConfig, *, layout: ModelLayout, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.layout = layout
        self.attention = ParallelAttention(
            config.dim,
            config.num_heads,
            AttentionConfig(
                dropout=config.attention_dropout,
                interleaved=True,
                pattern=pattern_of(config),
                pattern_block=config.pattern_block,
                skip_bias=True,
                seed=None,
            ),
            **layout.parallel,
        )
        layout.attend_over_ranks(self.attention)
        self.norm1 = layout.norm("layernorm", config.dim, eps=config.norm_eps)
        activation = ACTIVATIONS[config.activation]
        self.mlp = ParallelMLP(
            config.dim,
            config.mlp_width,
            MLPConfig(
                activation=activation.function,
                gated=activation.gated,
                skip_bias=True,
                seed=None,
            ),
            **layout.parallel,
        )
        self.norm2 = layout.norm("layernorm", config.dim, eps=config.norm_eps)
        self.dropout1, self.dropout2 = (
            layout.dropout(config.dropout, config.dim) for _ in range(2)
        )
        self.rotary = rotary

    def forward(
        self, x: Tensor, shape: Shape | None = None, mask_BT: Tensor | None = None
    ) -> Tensor:
        shape = self.layout.own_shape(shape)
        length, turns = x.shape[1] if shape is None else shape[1], None
        if self.rotary is not None:
            places = self.layout.shared_places(length, x.device)
            turns = self.rotary(length, positions_BT=places)
        y = self.norm1(
            self.dropout1(*self.attention(x, shape=shape, mask=mask_BT, rotary=turns), residual=x)
        )
        result: Tensor = self.norm2(self.dropout2(*self.mlp(y), residual=y))
        return result


def make_blocks(config: BERTConfig, *, layout: ModelLayout) -> nn.ModuleList:
    """All of them, with one table of rotary positions between them where the model has these."""
    rotary = None
    if config.positions == "rotary":
        width = config.dim // config.num_heads
        rotary = Rotary(
            config.sequence_length, width, theta=config.rotary_theta, device=layout.device
        )
    return nn.ModuleList(
        BERTBlock(config, layout=layout, rotary=rotary) for _ in range(config.num_layers)
    )


class BERTHead(nn.Module):
    """x_BTD -> logits_BTV; with targets_BT, the loss."""

    def __init__(self, config: BERTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = layout.linear(config.dim, config.dim)
        self.norm = layout.norm("layernorm", config.dim, eps=config.norm_eps)
        self.output = VocabularyHead(config.vocab_size, config.dim, bias=True, layout=layout)

    def forward(
        self,
        x: Tensor,
        shape: Shape | None = None,
        *,
        targets_BT: Tensor | None = None,
        gather: bool = True,
        reduction: str = "mean",
    ) -> Tensor:
        x = self.dense(x)
        if self.activation == "relu":
            x = functional.relu(x)
        else:
            x = functional.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        x = self.norm(x)
        if targets_BT is None:
            result: Tensor = self.output(x, shape, gather=gather)
            return result
        return self.output.loss(x, targets_BT, shape=shape, reduction=reduction)
