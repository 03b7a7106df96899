"""The layers of a T5: embedding, block of attention and MLP, stack of blocks, and head.

Letters of tensor names: B batch, S the encoder's sequence, T the decoder's, D model width, V
vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from pyops.models.config_checks import ACTIVATIONS
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.t5.config import T5Config
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    MemoryRows,
    MLPConfig,
    ParallelAttention,
    RelativeBias,
    RelativeBiasConfig,
    RowCache,
    VocabParallelEmbedding,
)
from pyops.tensor_parallel.functional.scores import DistanceBias

__all__ = ["T5Block", "T5Embedding", "T5Head", "T5Stack"]


class T5Block(nn.Module):
    """x_BTD -> x_BTD; with memory_BSD in a decoder; of a rank's rows, with the shapes of all
    tokens, likewise."""

    def __init__(self, config: T5Config, *, layout: ModelLayout, decoder: bool) -> None:
        super().__init__()
        self.layout = layout

        def attention(*, causal: bool = False, cross: bool = False) -> ParallelAttention:
            return layout.attend_over_ranks(
                ParallelAttention(
                    config.dim,
                    config.num_heads,
                    AttentionConfig(
                        head_dim=config.head_width,
                        causal=causal,
                        cross=cross,
                        bias=False,
                        scale=1.0,
                        dropout=config.attention_dropout,
                        seed=None,
                    ),
                    **layout.parallel,
                )
            )

        parts = 3 if decoder else 2
        self.norm1, self.norm2, *more = (
            layout.norm("rmsnorm", config.dim, eps=config.norm_eps) for _ in range(parts)
        )
        self.norm_cross = more[0] if decoder else None
        self.dropout1, self.dropout2, *rest = (
            layout.dropout(config.dropout, config.dim) for _ in range(parts)
        )
        self.dropout_cross = rest[0] if decoder else None
        self.attention = attention(causal=decoder)
        self.cross = attention(cross=True) if decoder else None
        activation = ACTIVATIONS[config.activation]
        self.mlp = layout.mlp(
            config.dim,
            config.mlp_width,
            MLPConfig(
                activation=activation.function,
                gated=activation.gated,
                bias=False,
                dropout=config.dropout,
                seed=None,
            ),
        )

    def forward(
        self,
        x: Tensor,
        shape: Shape | None = None,
        *,
        bias: Tensor | DistanceBias | None = None,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_shape: Shape | None = None,
        memory_mask: Tensor | None = None,
        past: tuple[RowCache, MemoryRows] | None = None,
    ) -> Tensor:
        shape, memory_shape = (self.layout.own_shape(each) for each in (shape, memory_shape))
        kept, memory_kept = past or (None, None)
        x = self.dropout1(
            self.attention(self.norm1(x), shape=shape, mask=mask, bias=bias, past=kept), residual=x
        )
        if (
            self.cross is not None
            and self.norm_cross is not None
            and self.dropout_cross is not None
        ):
            y = self.cross(
                self.norm_cross(x),
                shape=shape,
                memory=memory,
                memory_shape=memory_shape,
                mask=memory_mask,
                past=memory_kept,
            )
            x = self.dropout_cross(y, residual=x)
        result: Tensor = self.dropout2(self.mlp(self.norm2(x)), residual=x)
        return result


class T5Stack(nn.Module):
    """The encoder or the decoder: embedded tokens -> x, as a rank holds them. One bias by distance
    serves all its blocks."""

    def __init__(self, config: T5Config, *, layout: ModelLayout, decoder: bool) -> None:
        super().__init__()
        self.relative = RelativeBias(
            config.num_heads,
            RelativeBiasConfig(
                num_buckets=config.num_buckets,
                max_distance=config.max_distance,
                bidirectional=not decoder,
                seed=None,
            ),
            group=layout.ranks,
            device=layout.device,
            dtype=layout.dtype,
        )
        count = config.resolved().num_decoder_layers if decoder else config.num_layers
        self.blocks = nn.ModuleList(
            T5Block(config, layout=layout, decoder=decoder) for _ in range(count)
        )
        self.norm = layout.norm("rmsnorm", config.dim, eps=config.norm_eps)
        self.dropout1, self.dropout2 = (
            layout.dropout(config.dropout, config.dim) for _ in range(2)
        )

    def forward(self, x: Tensor, shape: Shape, **options: Tensor | Shape | None) -> Tensor:
        x = self.dropout1(x)
        bias: DistanceBias = self.relative()
        for block in self.blocks:
            x = block(x, shape, bias=bias, **options)
        result: Tensor = self.dropout2(self.norm(x))
        return result


class T5Embedding(nn.Module):
    """tokens_BT -> x_BTD, or a rank's rows of it; for encoder and decoder."""

    def __init__(self, config: T5Config, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.token = VocabParallelEmbedding(
            config.vocab_size, config.dim, EmbeddingConfig(seed=None), **layout.parallel
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        result: Tensor = self.token(self.layout.own_tokens(tokens_BT))
        return result


class T5Head(nn.Module):
    """x_BTD -> logits_BTV; with targets_BT, the loss."""

    def __init__(self, config: T5Config, *, layout: ModelLayout) -> None:
        super().__init__()
        self.scale = config.dim**-0.5 if config.scaled_head else 1.0
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
        if targets_BT is None:
            result: Tensor = self.output(x * self.scale, shape, gather=gather)
            return result
        return self.output.loss(x * self.scale, targets_BT, shape=shape, reduction=reduction)
