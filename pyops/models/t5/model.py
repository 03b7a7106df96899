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

import torch
from torch import Tensor

from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelSet
from pyops.mesh import ALONE
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.t5.config import T5Config
from pyops.models.t5.layers import T5Block, T5Embedding, T5Head, T5Stack
from pyops.models.vocabulary_head import IGNORED
from pyops.tensor_parallel import Ranks, RanksLike, initialize_model_, set_dropout
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["T5"]


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
