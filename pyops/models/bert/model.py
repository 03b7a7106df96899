"""BERT: an encoder with the norms behind the residuals, a head for masked tokens, and one for pairs
of sentences.

    tokens, types -> embedding -> block 0 -> ... -> block L-1 -> head -> logits_BTV
                                                     `-> first token -> pooler -> logits_B2
                                                         of the next sentence

    block:  norm1(x_BTD + attention(x_BTD)) = y_BTD;    norm2(y_BTD + mlp(y_BTD))

(Devlin et al., 2019.) With positions = "rotary" it is RoFormer (Su et al., 2021): no positions are
learned, attention turns neighbours (2i, 2i + 1) of queries and keys by them.

Letters of tensor names: B batch, T sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

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
from pyops.models.vocabulary_head import IGNORED, VocabularyHead
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RanksLike,
    VocabParallelEmbedding,
    initialize_model_,
    set_dropout,
)
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["BERT", "BERTConfig"]


@dataclass(frozen=True)
class BERTConfig:
    """The shape of a BERT.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    vocab_size: int = 30522
    """Number of words."""
    sequence_length: int = 512
    """Number of tokens that a sequence has at most."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Number of heads of attention."""
    dim: int = 768
    """Width of the model."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    num_types: int = 2
    """Number of kinds of tokens: of the first and of the second sentence."""
    norm_eps: float = 1e-12
    """Added to the variance in norms."""
    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh" or "relu"."""
    positions: str = "learned"
    """ "learned", or "rotary" (Su et al., 2021)."""
    rotary_theta: float = 10000.0
    """Base of the frequencies of rotary positions."""
    tied_head: bool = True
    """The head's matrix is the table of the embedding."""
    pooled_head: bool = True
    """There is a head for pairs of sentences."""
    dropout: float = 0.0
    """Probability with which elements of the embedding and of what blocks add are dropped."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""
    pattern: str = ""
    """Which blocks of tokens attention sees: a text such as "BigBird(seed=1) | Longformer()", of
    the patterns of `pyops.attention` (or one of these itself, of which the text is kept); "":
    all."""
    pattern_block: int = 64
    """Tokens of a block's side, a multiple of 16."""

    def __post_init__(self) -> None:
        check_config(
            self,
            at_least_one=(
                "vocab_size",
                "sequence_length",
                "num_layers",
                "num_heads",
                "dim",
                "num_types",
            ),
            choices={"activation": ("gelu", "gelu_tanh", "relu"), "positions": POSITIONS},
        )
        check_pattern(self)

    @property
    def mlp_width(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    def resolved(self) -> BERTConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(self, hidden=self.mlp_width)


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


class BERT(SharedRows):
    """tokens [B, T] int64, T <= sequence_length -> logits [B, T, V], and with pooled_head also
    next-sentence logits [B, 2].

    Args:
        config: the shape of the model.
        group: the ranks that share the layers, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Tokens and results are the same on every rank,
            and on any number of them.
        sequence_parallel: between blocks a rank holds its part of the tokens only.
        context: the ranks that share out the tokens of rows, see `GPT`. Next-sentence logits are
            the same on all of them, and counted once. None: every rank has all tokens.
        order: which tokens each of them holds, see `GPT`.
        seed: of the initial parameters, each drawn by (seed, parameter name), so that neither the
            order of construction, nor the device, nor the number of ranks changes them. Weights are
            normal with deviation 0.02, biases 0, norms 1.
            None: they are left as they are in memory, to be loaded.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads that the ranks can't share.
        TypeError: `group` is no group that this rank is in.
    """

    def __init__(
        self,
        config: BERTConfig,
        *,
        group: RanksLike = ALONE,
        sequence_parallel: bool = False,
        context: ContextRanks | None = None,
        order: str = "contiguous",
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.shared_rows = rows = TokenContext.of(context, order)
        self.layout = layout = ModelLayout(Ranks.of(group), sequence_parallel, device, dtype, rows)
        self.embedding = BERTEmbedding(config, layout=layout)
        self.blocks = make_blocks(config, layout=layout)
        self.head = BERTHead(config, layout=layout)
        if config.tied_head:
            self.head.output.tie(self.embedding.token)
        self.pooler = (
            layout.linear(config.dim, config.dim, per_token=False) if config.pooled_head else None
        )
        self.next_sentence = (
            layout.linear(config.dim, 2, per_token=False) if config.pooled_head else None
        )
        if seed is not None:
            self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition gives the logits of tokens, in order: embedding, blocks,
        head."""
        return [self.embedding, *self.blocks, self.head]

    def permutations(self) -> list[ChannelSet]:
        """The channels whose order is free: those of the residual stream, with the head's, whose
        last matrix may be the embedding's table, and those within layers."""
        learned = self.config.positions == "learned"
        others = [
            ChannelPart("embedding.kind.weight", 1),
            *([ChannelPart("embedding.position.weight", 1)] if learned else []),
            ChannelPart("head.dense.weight", 1, reads=True),
            ChannelPart("head.dense.weight", 0),
            ChannelPart("head.dense.bias", 0),
            *([ChannelPart("pooler.weight", 1, reads=True)] if self.config.pooled_head else []),
        ]
        whole = stream(self, self.config.dim, others)
        return [whole, *inner_channels(self, rotary=not learned)]

    def encode(
        self, tokens_BT: Tensor, *, types_BT: Tensor | None = None, mask_BT: Tensor | None = None
    ) -> Tensor:
        """x_BTD of the last block, as a rank holds it.

        Args:
            tokens_BT: int64 [B, T].
            types_BT: int64 [B, T], the segment of each token; None: all 0.
            mask_BT: bool [B, T], True where a token is to be seen; None: all are.
        """
        if tokens_BT.shape[1] > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than sequence_length = "
                f"{self.config.sequence_length}; cut it, or make the model with a longer one"
            )
        x: Tensor = self.embedding(tokens_BT, types_BT)
        for block in self.blocks:
            x = block(x, (tokens_BT.shape[0], tokens_BT.shape[1]), mask_BT)
        return x

    def pooled(self, x: Tensor, shape: Shape) -> Tensor:
        """Next-sentence logits [B, 2] of `encode`'s result."""
        assert self.pooler is not None
        assert self.next_sentence is not None
        first_BD = self.layout.first_token(x, shape)
        result: Tensor = self.next_sentence(torch.tanh(self.pooler(first_BD)))
        return self.layout.once(result, shape)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        types: Tensor | None = None,
        mask: Tensor | None = None,
        next_B: Tensor | None = None,
        gather: bool = True,
        reduction: str = "mean",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with pooled_head (logits, next-sentence logits). With targets, `loss`.

        Args:
            types: [B, T] of each token, 0 where None.
            mask: [B, T] bool, False where padding is.
            gather: False: this rank's part of the vocabulary, [B, T, ceil(V / ranks)].
        """
        shape = (tokens_BT.shape[0], tokens_BT.shape[1])
        x = self.encode(tokens_BT, types_BT=types, mask_BT=mask)
        found: Tensor = self.head(
            x, shape, targets_BT=targets_BT, gather=gather, reduction=reduction
        )
        if self.pooler is None:
            return found
        if targets_BT is None:
            return found, self.pooled(x, shape)
        if next_B is None:
            return found
        scores_B2 = self.pooled(x, shape)
        scores_B2 = scores_B2 if scores_B2.dtype == torch.float64 else scores_B2.float()
        of_pairs = functional.cross_entropy(
            scores_B2, next_B, ignore_index=IGNORED, reduction=reduction
        )
        return found + (self.layout.summand(of_pairs, shape) if reduction == "sum" else of_pairs)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        types: Tensor | None = None,
        mask: Tensor | None = None,
        next_B: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """-ln p(target) of the masked tokens, plus that of next_B [B] (0: the second sentence
        follows), the same on every rank.

        targets: -100 where a token is not masked, which does not count.

        Args:
            reduction: Each part's "mean", or "sum".
        """
        found = self(
            tokens_BT, targets_BT, types=types, mask=mask, next_B=next_B, reduction=reduction
        )
        assert isinstance(found, Tensor)
        return found

    def initialize(self, seed: int, *, only: nn.Module | None = None) -> None:
        """Draw all parameters anew.

        Args:
            only: A module of this model: its own parameters, not its children's, and its table.
        """
        if isinstance(only, Rotary):
            only.fill()
        initialize_model_(self, seed=seed, std=0.02, only=only)

    def set_dropout(self, shape: Shape, *, seed: int, step: int, first_row: int = 0) -> None:
        """Key all dropout for the next forward, as GPT.set_dropout does.

        Args:
            shape: (B, T) of the forward.
            seed: Of the run.
            step: The number of the step, so that each draws other masks.
            first_row: The first of these sequences in the batch of all ranks.
        """
        if self.config.dropout or self.config.attention_dropout:
            set_dropout(self, seed=seed, step=step, shape=shape, first_row=first_row)
