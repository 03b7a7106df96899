"""T5: an encoder and a decoder with relative positions, norms in front, and no biases (Raffel et
al., 2020).

    tokens_BS  -> embedding -> encoder block 0 ... block L-1 -> norm -> memory_BSD
    targets_BT -> shifted by one -> embedding -> decoder block 0 ... -> norm -> head -> logits_BTV

    decoder block:  x + attention(norm1(x)) = y
                    y + cross(norm_cross(y), memory) = z
                    z + mlp(norm2(z))

1.0: activation "relu", one table for embedding and head, whose input is scaled by D^-1/2. 1.1:
"gated_gelu", not scaled.

Letters of tensor names: B batch, S the encoder's sequence, T the decoder's, D model width, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelSet
from pyops.mesh import ALONE
from pyops.models.config_checks import ACTIVATIONS, check_config
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.vocabulary_head import IGNORED, VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    MemoryRows,
    MLPConfig,
    ParallelAttention,
    Ranks,
    RanksLike,
    RelativeBias,
    RelativeBiasConfig,
    RowCache,
    VocabParallelEmbedding,
    initialize_model_,
    set_dropout,
)
from pyops.tensor_parallel.functional.scores import DistanceBias
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["T5", "T5Config"]

MOST_DISTANCE = 1 << 20  # a table of the buckets of all distances is made


@dataclass(frozen=True)
class T5Config:
    """The shape of a T5.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 32128
    """Number of words."""
    num_layers: int = 6
    """Number of blocks of the encoder."""
    num_decoder_layers: int = 0
    """Number of blocks of the decoder; 0: num_layers."""
    num_heads: int = 8
    """Number of heads of attention."""
    dim: int = 512
    """Width of the model."""
    head_dim: int = 0
    """Width of a head; 0: dim / num_heads."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    num_buckets: int = 32
    """Number of buckets of relative positions, even, 4 or more."""
    max_distance: int = 128
    """Relative positions from here on share a bucket."""
    norm_eps: float = 1e-6
    """Added to the variance in norms."""
    activation: str = "relu"
    """ "relu", "gelu", "gated_gelu" or "swiglu"."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    scaled_head: bool = True
    """The input of the head is scaled by dim^-1/2."""
    start_token: int = 0
    """The token that the decoder sees before its first target."""
    dropout: float = 0.0
    """Probability with which elements are dropped: of embeddings, inside the MLP, of what
    blocks add, and of the results of encoder and decoder."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=("vocab_size", "num_layers", "num_heads", "dim", "max_distance"),
            choices={"activation": ("relu", "gelu", "gated_gelu", "swiglu")},
        )
        if self.num_decoder_layers < 0:
            raise ValueError(
                f"num_decoder_layers is {self.num_decoder_layers}; give a number, or 0 "
                "for as many as num_layers"
            )
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(f"num_buckets is {self.num_buckets}; it must be even, 4 or more")
        if not self.num_buckets // 2 < self.max_distance <= MOST_DISTANCE:
            raise ValueError(
                f"max_distance is {self.max_distance}; it must be more than num_buckets / 2 = "
                f"{self.num_buckets // 2}, distances that have buckets of their own, and at most "
                f"{MOST_DISTANCE}"
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ValueError(
                f"start_token is {self.start_token}, outside the vocabulary of {self.vocab_size}"
            )

    @property
    def mlp_width(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    @property
    def head_width(self) -> int:
        """`head_dim`, or the usual width."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return ACTIVATIONS[self.activation].gated

    def resolved(self) -> T5Config:
        """The same with every 0 that means a usual value replaced by it."""
        layers = self.num_decoder_layers or self.num_layers
        return replace(
            self, hidden=self.mlp_width, head_dim=self.head_width, num_decoder_layers=layers
        )


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


class T5(SharedRows):
    """tokens [B, S], decoder's tokens [B, T], int64 -> logits [B, T, V] in the dtype of the
    parameters.

    Args:
        config: the shape of the model.
        group: the ranks that share the layers, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Tokens and results are the same on every rank,
            and on any number of them.
        sequence_parallel: between blocks a rank holds its part of the tokens only.
        context: the ranks that share out the tokens of rows, see `GPT`: those of the encoder and
            those of the decoder, each in `order`. None: every rank has all tokens.
        order: which tokens each of them holds, see `GPT`.
        seed: of the initial parameters, each drawn by (seed, parameter name), so that neither the
            order of construction, nor the device, nor the number of ranks changes them. The
            embedding has deviation 1, queries (D K)^-1/2, other weights the inverse root of their
            input's width; norms are 1.
            None: they are left as they are in memory, to be loaded.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads that the ranks can't share.
        TypeError: `group` is no group that this rank is in.
    """

    def __init__(
        self,
        config: T5Config,
        *,
        group: RanksLike = ALONE,
        sequence_parallel: bool = False,
        context: ContextRanks | None = None,
        order: str = "zigzag",
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.shared_rows = rows = TokenContext.of(context, order)
        self.layout = layout = ModelLayout(Ranks.of(group), sequence_parallel, device, dtype, rows)
        self.embedding = T5Embedding(config, layout=layout)
        self.encoder = T5Stack(config, layout=layout, decoder=False)
        self.decoder = T5Stack(config, layout=layout, decoder=True)
        self.head = T5Head(config, layout=layout)
        if config.tied_head:
            self.head.output.tie(self.embedding.token)
        if seed is not None:
            self.initialize(seed)

    def _deviation(self, name: str) -> float:
        config = self.config
        if name.startswith(("embedding", "head")):
            return 1.0
        if name.endswith("output.weight"):
            fan = config.num_heads * config.head_width
        elif name.endswith("q.weight"):
            fan = config.dim * config.head_width
        else:
            fan = config.mlp_width if name.endswith("down.weight") else config.dim
        return float(fan**-0.5)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw all parameters anew."""
        initialize_model_(self, seed=seed, std=self._deviation)
        for module in self.modules():
            if isinstance(module, T5Block):  # scores are not scaled, so queries begin small
                width = self.config.head_width
                module.attention.qkv.weight.unflatten(0, (-1, 3, width))[:, 0].mul_(width**-0.5)

    def permutations(self) -> list[ChannelSet]:
        """The channels whose order is free: those of the residual stream, which encoder and decoder
        share as they share the embedding, and those within layers."""
        return [stream(self, self.config.dim), *inner_channels(self)]

    def encode(self, tokens_BS: Tensor, *, mask_BS: Tensor | None = None) -> Tensor:
        """The memory_BSD, as a rank holds tokens."""
        result: Tensor = self.encoder(
            self.embedding(tokens_BS), (tokens_BS.shape[0], tokens_BS.shape[1]), mask=mask_BS
        )
        return result

    def forward(
        self,
        tokens_BS: Tensor,
        decoder_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        decoder_mask: Tensor | None = None,
        gather: bool = True,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits; with targets, the loss.

        Args:
            mask, decoder_mask: [B, S] and [B, T] bool, False where padding is.
            gather: False: this rank's part of the vocabulary, [B, T, ceil(V / ranks)].
        """
        shape, memory_shape = ((t.shape[0], t.shape[1]) for t in (decoder_BT, tokens_BS))
        memory = self.encode(tokens_BS, mask_BS=mask)
        x = self.decoder(
            self.embedding(decoder_BT),
            shape,
            mask=decoder_mask,
            memory=memory,
            memory_shape=memory_shape,
            memory_mask=mask,
        )
        result: Tensor = self.head(
            x, shape, targets_BT=targets_BT, gather=gather, reduction=reduction
        )
        return result

    def shifted(self, targets_BT: Tensor) -> Tensor:
        """What the decoder sees: start_token, then all targets but the last; 0 for those of
        -100."""
        seen_BT = targets_BT.roll(1, dims=1).masked_fill(targets_BT.roll(1, dims=1) == IGNORED, 0)
        seen_BT[:, 0] = self.config.start_token
        return seen_BT

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BT: Tensor,
        *,
        mask: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """-ln p(target), each given the tokens and the targets before it, the same on every rank;
        -100 does not count.

        Args:
            mask: [B, S] bool, False where padding is.
            reduction: "mean" over the targets that count, or "sum".
        """
        result: Tensor = self(
            tokens_BS, self.shifted(targets_BT), targets_BT, mask=mask, reduction=reduction
        )
        return result

    def set_dropout(
        self, shape: Shape, decoder_shape: Shape, *, seed: int, step: int, first_row: int = 0
    ) -> None:
        """Key all dropout for the next forward, as GPT.set_dropout does.

        Args:
            shape: (B, S), decoder_shape: (B, T).
        """
        if not (self.config.dropout or self.config.attention_dropout):
            return
        for name, stack, own in (
            ("encoder.", self.encoder, shape),
            ("decoder.", self.decoder, decoder_shape),
        ):
            set_dropout(stack, seed=seed, step=step, shape=own, first_row=first_row, prefix=name)
