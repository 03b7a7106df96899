"""BERTClassifier: a BERT whose head chooses one of several labels for the whole sequence, from its
first token.

    tokens -> embedding -> block 0 -> ... -> block L-1 -> first token -> tanh(dense) -> output
           -> logits_BN

(Devlin et al., 2019, section 4.1; the head is the pooler and what stands on it.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.context_parallel import ContextRanks
from pyops.mesh import ALONE
from pyops.models.bert import BERTConfig, BERTEmbedding, make_blocks
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import IGNORED
from pyops.tensor_parallel import Ranks, RanksLike, initialize_model_, set_dropout

__all__ = ["BERTClassifier"]


class ClassifierHead(nn.Module):
    """x_BTD -> logits_BN of the first token, on every rank."""

    def __init__(self, config: BERTConfig, num_labels: int, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.dense = layout.linear(config.dim, config.dim, per_token=False)
        self.output = layout.linear(config.dim, num_labels, per_token=False)

    def forward(self, x: Tensor, shape: Shape | None = None) -> Tensor:
        first_BD = self.layout.first_token(x, shape)
        result: Tensor = self.output(torch.tanh(self.dense(first_BD)))
        return result if shape is None else self.layout.once(result, shape)


class BERTClassifier(SharedRows):
    """tokens [B, T] int64, T <= sequence_length -> logits [B, num_labels] in the dtype of the
    parameters.

    `embedding` and `blocks` are named as BERT's, whose weights it takes.

    Args:
        config: the shape of the model; its tied_head and pooled_head are not used.
        num_labels: number of labels, 2 or more.
        group: the ranks that share the layers, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Tokens and results are the same on every rank,
            and on any number of them.
        sequence_parallel: between blocks a rank holds its part of the tokens only.
        context: the ranks that share out the tokens of rows, see `GPT`; logits are the same on all
            of them, and counted once. Each holds tokens side by side. None: every rank has all
            tokens.
        seed: of the initial parameters, each drawn by (seed, parameter name), so that neither the
            order of construction, nor the device, nor the number of ranks changes them. Weights are
            normal with deviation 0.02, biases 0, norms 1.
            None: they are left as they are in memory, to be loaded.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads that the ranks can't share; fewer than two labels.
        TypeError: `group` is no group that this rank is in.
    """

    def __init__(
        self,
        config: BERTConfig,
        *,
        num_labels: int,
        group: RanksLike = ALONE,
        sequence_parallel: bool = False,
        context: ContextRanks | None = None,
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_labels < 2:
            raise ValueError(f"num_labels is {num_labels}; there must be 2 or more to choose from")
        self.config = config
        self.shared_rows = rows = TokenContext.of(context, "contiguous")
        self.layout = layout = ModelLayout(Ranks.of(group), sequence_parallel, device, dtype, rows)
        self.embedding = BERTEmbedding(config, layout=layout)
        self.blocks = make_blocks(config, layout=layout)
        self.head = ClassifierHead(config, num_labels, layout=layout)
        if seed is not None:
            self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is forward, in order: embedding, blocks, head."""
        return [self.embedding, *self.blocks, self.head]

    def forward(
        self,
        tokens_BT: Tensor,
        labels_B: Tensor | None = None,
        *,
        types: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits; with labels, `loss`.

        Args:
            types, mask: [B, T], as of BERT.
        """
        shape = (tokens_BT.shape[0], tokens_BT.shape[1])
        if shape[1] > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {shape[1]} tokens is longer than sequence_length = "
                f"{self.config.sequence_length}; cut it, or "
                "make the model with a longer one"
            )
        x = self.embedding(tokens_BT, types)
        for block in self.blocks:
            x = block(x, shape, mask)
        logits_BN: Tensor = self.head(x, shape)
        if labels_B is None:
            return logits_BN
        logits_BN = logits_BN if logits_BN.dtype == torch.float64 else logits_BN.float()
        found = functional.cross_entropy(
            logits_BN, labels_B, ignore_index=IGNORED, reduction=reduction
        )
        return self.layout.summand(found, shape) if reduction == "sum" else found

    def loss(
        self, tokens_BT: Tensor, labels_B: Tensor, *, reduction: str = "mean", **inputs: Tensor
    ) -> Tensor:
        """-ln p(label), the same on every rank; labels of -100 don't count.

        Args:
            reduction: "mean" over those that do, or "sum".
        """
        result: Tensor = self(tokens_BT, labels_B, reduction=reduction, **inputs)
        return result

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
