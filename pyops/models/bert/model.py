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

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelPart, ChannelSet
from pyops.mesh import ALONE
from pyops.models.bert.config import BERTConfig
from pyops.models.bert.layers import BERTEmbedding, BERTHead, make_blocks
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import IGNORED
from pyops.tensor_parallel import Ranks, RanksLike, initialize_model_, set_dropout
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["BERT"]


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
