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
from typing import Any

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelPart, ChannelSet
from pyops.mesh import ALONE
from pyops.models.context import SharedRows, TokenContext
from pyops.models.gpt.config import GPTConfig
from pyops.models.gpt.layers import GPTBlock, GPTEmbedding, GPTHead
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.tensor_parallel import KVCache, RanksLike, initialize_model_, set_dropout
from pyops.tensor_parallel.grids import Grid
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["GPT"]


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
