"""A GPT: embedding, blocks of attention and MLP with the norms in front, and a head (Radford et
al., 2019).

    tokens_BT -> embedding -> block 0 -> ... -> block L-1 -> head -> logits_BTV

    block:  x_BTD + attention(norm1(x_BTD)) = y_BTD;    y_BTD + mlp(norm2(y_BTD))

The options make it GPT-2 (the defaults, with activation "gelu_tanh") or Llama (rmsnorm, swiglu,
rotary, bias False). Its layers are shared out over the ranks of a group; with sequence parallelism
x is a rank's rows of the tokens between them.

Letters of tensor names: B batch, T sequence, D model width, H heads, K width of a head, F width
inside the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyops.attention import document_positions
from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelPart, ChannelSet
from pyops.mesh import ALONE
from pyops.models.config_checks import (
    ACTIVATIONS,
    POSITIONS,
    check_config,
    check_pattern,
    pattern_of,
)
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import AddedEmbedding, ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    KVCache,
    MLPConfig,
    RanksLike,
    RowCache,
    VocabParallelEmbedding,
    initialize_model_,
    set_dropout,
)
from pyops.tensor_parallel.grids import (
    Grid,
    GridEmbedding,
    GridHead,
    GridLinearConfig,
    GridRows,
)
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["GPT", "GPTBlock", "GPTConfig", "GPTEmbedding", "GPTHead"]

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
    "positions": POSITIONS,
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 256
    """Number of words."""
    sequence_length: int = 256
    """Number of tokens that a sequence has at most."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Number of heads of attention."""
    num_kv_heads: int = 0
    """Number of heads of keys and values, each shared by as many of queries (Ainslie et al.,
    2023); 0: num_heads."""
    dim: int = 256
    """Width of the model."""
    head_dim: int = 0
    """Width of a head; 0: dim / num_heads."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim, and for swiglu 8/3 dim rounded up to a multiple of 64,
    which has about as many weights (Shazeer, 2020, section 3)."""
    norm: str = "layernorm"
    """ "layernorm" or "rmsnorm"."""
    norm_eps: float = 1e-5
    """Added to the variance in norms."""
    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh", "relu" or "swiglu"."""
    positions: str = "learned"
    """ "learned", or "rotary" (Su et al., 2021)."""
    rotary_theta: float = 10000.0
    """Base of the frequencies of rotary positions."""
    rotary_stretch: float = 1.0
    """As in Llama 3.1, for a model that was trained on rotary_length tokens: how much slower
    the pairs turn that turn less than rotary_low times over them."""
    rotary_low: float = 1.0
    """See rotary_stretch."""
    rotary_high: float = 4.0
    """Pairs that turn more often over rotary_length tokens are not slowed down."""
    rotary_length: int = 8192
    """Number of tokens of the training before the stretch."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    bias: bool = True
    """Linear layers and layer norms have biases."""
    dropout: float = 0.0
    """Probability with which elements of the embedding and of what blocks add are dropped."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""
    pattern: str = ""
    """Which blocks of tokens attention sees: a text such as "BigBird(seed=1) | Longformer()", of
    the patterns of `pyops.attention` (or one of these itself, of which the text is kept); "": all
    up to a token's own."""
    pattern_block: int = 64
    """Tokens of a block's side, a multiple of 16."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=("vocab_size", "sequence_length", "num_layers", "num_heads", "dim"),
            choices=CHOICES,
        )
        if (
            not self.rotary_stretch >= 1.0
            or not 0.0 < self.rotary_low < self.rotary_high
            or self.rotary_length < 1
        ):
            raise ValueError(
                f"rotary_stretch is {self.rotary_stretch}, rotary_low {self.rotary_low}, "
                f"rotary_high {self.rotary_high}, "
                f"rotary_length {self.rotary_length}; they must be 1 or more, above 0, "
                "above rotary_low, and 1 or more"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads = "
                f"{self.num_heads}; change one of them"
            )
        check_pattern(self)

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads`, or the usual number."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """K: `head_dim`, or the usual width."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        """F: `hidden`, or the usual width for the activation."""
        if self.hidden:
            return self.hidden
        return (
            64 * math.ceil(8 * self.dim / 3 / 64) if self.activation == "swiglu" else 4 * self.dim
        )

    def resolved(self) -> GPTConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(
            self, hidden=self.mlp_width, num_kv_heads=self.kv_heads, head_dim=self.head_width
        )


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


def _check_places(
    tokens_BT: Tensor, documents_BT: Tensor | None, positions_BT: Tensor | None
) -> None:
    for name, places, dtype in (
        ("documents_BT", documents_BT, torch.int32),
        ("positions_BT", positions_BT, torch.int64),
    ):
        if places is not None and (places.shape != tokens_BT.shape or places.dtype != dtype):
            raise ValueError(
                f"{name} is {places.dtype} {list(places.shape)}; it must be {dtype} "
                f"{list(tokens_BT.shape)}, a number for each token"
            )


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


class GPT(SharedRows):
    """tokens [B, T] int64, T <= sequence_length -> logits [B, T, V] in the dtype of the parameters.

    Args:
        config: the shape of the model.
        group: the ranks that share the layers, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Tokens and results are the same on every rank,
            and on any number of them. A `pyops.tensor_parallel.grids.Grid` of them cuts
            activations, too, without sequence_parallel and context.
        sequence_parallel: between blocks a rank holds its part of the tokens only.
        context: the ranks that share out the tokens of rows, and the method
            (`pyops.context_parallel`). They are given the same whole rows and targets; logits, and
            a loss with reduction="sum", are of the own tokens, and gradients are summands: sum them
            over data and context parallel ranks together. None: every rank has all tokens.
        order: which tokens of a row each of them holds: "zigzag", "contiguous" or "striped".
        seed: of the initial parameters, each drawn by (seed, parameter name), so that neither the
            order of construction, nor the device, nor the number of ranks changes them. Weights are
            normal with deviation 0.02, the projections that write into the residual stream
            0.02 / sqrt(2 L) (Radford et al., 2019, section 2.3); biases 0, norms 1.
            None: they are left as they are in memory, to be loaded.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads that the ranks can't share.
        TypeError: `group` is no group that this rank is in.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: RanksLike | Grid = ALONE,
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
        self.layout = layout = ModelLayout.of(group, sequence_parallel, device, dtype, rows)
        self.embedding = GPTEmbedding(config, layout=layout)
        rotary = None
        if config.positions == "rotary":
            rotary = Rotary(
                config.sequence_length,
                config.head_width,
                theta=config.rotary_theta,
                stretch=config.rotary_stretch,
                low=config.rotary_low,
                high=config.rotary_high,
                trained=config.rotary_length,
                device=device,
            )
        self.blocks = nn.ModuleList(
            GPTBlock(config, layout=layout, rotary=rotary) for _ in range(config.num_layers)
        )
        self.head = GPTHead(config, layout=layout)
        if config.tied_head:
            table: Any = self.embedding.token
            self.head.output.tie(table)
        if seed is not None:
            self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is forward, in order: embedding, blocks, head."""
        return [self.embedding, *self.blocks, self.head]

    def permutations(self) -> list[ChannelSet]:
        """The channels whose order is free: those of the residual stream, and those within
        layers."""
        learned = self.config.positions == "learned"
        others = [ChannelPart("embedding.position.weight", 1)] if learned else []
        whole = stream(self, self.config.dim, others)
        return [whole, *inner_channels(self, rotary=not learned)]

    def keep_layers(self, numbers: Collection[int]) -> None:
        """Let go of all `layers()` but these, for a rank that has a part of the model: names stay
        those of the whole.

        A tied head that stays without the embedding keeps the table as `embedding.token`.
        """
        first, last = 0, self.config.num_layers + 1
        for i in range(self.config.num_layers):
            if i + 1 not in numbers:
                del self.blocks._modules[str(i)]
        if first not in numbers and last in numbers and self.config.tied_head:
            holder = nn.Module()
            holder.token = self.embedding.token
            self.embedding = holder  # type: ignore[assignment]  # in its place, so that the table has its first name
        elif first not in numbers:
            del self.embedding
        if last not in numbers:
            del self.head

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        gather: bool = True,
        reduction: str = "mean",
        past: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Logits; with gather=False this rank's part of the vocabulary, [B, T, ceil(V / ranks)].
        With targets, `loss`.

        Args:
            documents_BT: int32 [B, T], which document of its row each token belongs to, and -1 for
                padding: it sees the tokens of that one alone. None: a row is one document.
            positions_BT: int64 [B, T], the place of each token in its document; None: counted from
                `documents_BT`, which waits for a GPU.
            past: `new_kv_caches()`, and then the same again: the tokens follow those that were
                given with it before.
        """
        if past is not None and self.layout.context is not None:
            raise ValueError(
                "past is for ranks that have all tokens of a row; generate texts within "
                "model.whole_rows()"
            )
        if past is not None and self.layout.grid is not None:
            raise ValueError(
                "past is of a model whose weights alone are cut; a grid keeps no keys: load the "
                "checkpoint into GPT(group=...) to generate texts"
            )
        first = len(past[0]) if past else 0
        if first + tokens_BT.shape[1] > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {first + tokens_BT.shape[1]} tokens is longer than "
                "sequence_length = "
                f"{self.config.sequence_length}; cut it, or make the model with a longer one"
            )
        shape = (tokens_BT.shape[0], tokens_BT.shape[1])
        if past is None:
            places = {"documents_BT": documents_BT, "positions_BT": positions_BT}
            _check_places(tokens_BT, **places)
            x = self.embedding(tokens_BT, **places)
            for block in self.blocks:
                x = block(x, shape, **places)
        elif documents_BT is not None or positions_BT is not None:
            raise ValueError(
                "documents_BT and positions_BT are of whole rows; leave them out with past="
            )
        else:
            x = self.embedding(tokens_BT, first=first)
            for block, kept in zip(self.blocks, past, strict=True):
                x = block(x, shape, past=kept)
        result: Tensor = self.head(
            x, shape, targets_BT=targets_BT, gather=gather, reduction=reduction
        )
        return result

    def new_kv_caches(self) -> list[KVCache]:
        """What `forward` keeps of the tokens it was given, one for each block: nothing yet."""
        return [KVCache() for _ in range(self.config.num_layers)]

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """-ln p(target) over the tokens, the same on every rank, without whole logits; targets of
        -100 don't count.

        Args:
            documents_BT, positions_BT: as of `forward`.
            reduction: "mean" over those that count, or "sum".
        """
        result: Tensor = self(
            tokens_BT,
            targets_BT,
            documents_BT=documents_BT,
            positions_BT=positions_BT,
            reduction=reduction,
        )
        return result

    @torch.no_grad()
    def initialize(self, seed: int, *, only: nn.Module | None = None) -> None:
        """Draw all parameters anew.

        Args:
            only: A module of this model: its own parameters, not its children's, and its table.
        """
        if isinstance(only, Rotary):
            only.fill()
        residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        into_residual = ("attention.output.weight", "mlp.down.weight")
        initialize_model_(
            self,
            seed=seed,
            only=only,
            std=lambda name: residual if name.endswith(into_residual) else 0.02,
        )

    def set_dropout(self, shape: Shape, *, seed: int, step: int, first_row: int = 0) -> None:
        """Key all dropout for the next forward, over tokens of `shape` (B, T).

        Args:
            step: Keys it together with `seed`, so that another step drops other elements. The B
                sequences are rows [first_row, first_row + B) of the step's global batch: whoever
                computes them, the same elements fall.
        """
        if self.config.dropout or self.config.attention_dropout:
            set_dropout(self, seed=seed, step=step, shape=shape, first_row=first_row)
