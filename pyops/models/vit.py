"""A vision transformer: an image's patches as tokens, behind one that the class is read from
(Dosovitskiy et al., 2021).

    images_BCSS -> patches + class token + positions -> block 0 -> ... -> block L-1 -> norm
                -> class token -> logits_BN

    block:  x_BTD + attention(norm1(x_BTD)) = y_BTD;    y_BTD + mlp(norm2(y_BTD))

Where ranks share out the tokens of an image, the rank of the first token computes the class; the
last tokens are padding, where the ranks do not divide their number.

Letters of tensor names: B batch, C channels, S side of an image, P of a patch, T (S / P)^2 + 1
tokens, D width, N labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.context_parallel import ContextRanks
from pyops.flat import ChannelPart, ChannelSet
from pyops.mesh import ALONE
from pyops.models.config_checks import ACTIVATIONS, check_config
from pyops.models.context import SharedRows, TokenContext
from pyops.models.model_layout import ModelLayout, Shape
from pyops.models.vocabulary_head import IGNORED
from pyops.tensor_parallel import (
    AttentionConfig,
    MLPConfig,
    RanksLike,
    initialize_model_,
    set_dropout,
)
from pyops.tensor_parallel.grids import Grid
from pyops.tensor_parallel.layers.channels import inner_channels, stream

__all__ = ["ViT", "ViTConfig"]


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    num_labels: int = 1000
    """Number of labels."""
    image_size: int = 224
    """Side of an image in pixels."""
    patch_size: int = 16
    """Side of a patch in pixels; it divides image_size."""
    num_channels: int = 3
    """Number of channels of an image."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Number of heads of attention."""
    dim: int = 768
    """Width of the model."""
    hidden: int = 0
    """Width inside the MLP; 0: 4 dim."""
    norm_eps: float = 1e-12
    """Added to the variance in norms."""
    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh" or "relu"."""
    dropout: float = 0.0
    """Probability with which elements of the embedding and of what blocks add are dropped."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped."""

    def __post_init__(self) -> None:
        check_config(
            self,
            choices={"activation": ("gelu", "gelu_tanh", "relu")},
            at_least_one=(
                "num_labels",
                "image_size",
                "patch_size",
                "num_channels",
                "num_layers",
                "num_heads",
                "dim",
            ),
        )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size is {self.image_size}, which patch_size = {self.patch_size} "
                "does not divide; change one"
            )

    @property
    def mlp_width(self) -> int:
        """`hidden`, or the usual width."""
        return self.hidden or 4 * self.dim

    @property
    def num_tokens(self) -> int:
        """T: patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def resolved(self) -> ViTConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(self, hidden=self.mlp_width)


class ViTPatch(nn.Module):
    """images_BCSS -> patches [B, T - 1, D], row by row: a linear map of each patch."""

    def __init__(self, config: ViTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        side = config.patch_size
        self.weight = layout.parameter(config.dim, config.num_channels, side, side)
        self.bias = layout.parameter(config.dim)

    def forward(self, images_BCSS: Tensor, index: Tensor | None = None) -> Tensor:
        side = self.weight.shape[-1]
        if index is not None:  # these patches alone
            patches = functional.unfold(images_BCSS, side, stride=side).index_select(2, index)
            return functional.linear(patches.transpose(1, 2), self.weight.flatten(1), self.bias)
        return (
            functional.conv2d(images_BCSS, self.weight, self.bias, stride=side)
            .flatten(2)
            .transpose(1, 2)
        )


class ViTEmbedding(nn.Module):
    """images_BCSS -> x_BTD, computed on every rank, of its own patches where rows are shared out; a
    rank's rows of it where tokens are."""

    def __init__(self, config: ViTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.patch = ViTPatch(config, layout=layout)
        self.first = layout.parameter(1, config.dim)
        self.position = layout.parameter(config.num_tokens, config.dim)
        self.dropout = layout.dropout(config.dropout, config.dim)

    def forward(self, images_BCSS: Tensor) -> Tensor:
        if self.layout.context is None:
            patches = self.patch(images_BCSS)
            first = self.first.expand(len(patches), 1, -1)
            x = torch.cat([first, patches], dim=1) + self.position
        else:
            x = self._own_tokens(images_BCSS, self.layout.context)
        result: Tensor = self.dropout(self.layout.take(x))
        return result

    def _own_tokens(self, images_BCSS: Tensor, context: TokenContext) -> Tensor:
        """This rank's tokens; those behind the last one are padding."""
        last = len(self.position) - 1
        places = context.row(last + 1).index(device=images_BCSS.device).clamp(max=last)
        patches = self.patch(images_BCSS, (places - 1).clamp(min=0))
        return torch.where((places == 0)[:, None], self.first, patches) + self.position[places]


class ViTBlock(nn.Module):
    """x_BTD -> x_BTD; of a rank's rows, with the (B, T) of all tokens, likewise."""

    def __init__(self, config: ViTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.norm1, self.norm2 = (
            layout.norm("layernorm", config.dim, eps=config.norm_eps) for _ in range(2)
        )
        self.attention = layout.self_attention(
            config.dim,
            config.num_heads,
            AttentionConfig(dropout=config.attention_dropout, skip_bias=True, seed=None),
        )
        activation = ACTIVATIONS[config.activation]
        self.mlp = layout.block_mlp(
            config.dim,
            config.mlp_width,
            MLPConfig(
                activation=activation.function,
                gated=activation.gated,
                skip_bias=True,
                seed=None,
            ),
        )
        self.dropout1, self.dropout2 = (
            layout.dropout(config.dropout, config.dim) for _ in range(2)
        )

    def forward(self, x: Tensor, shape: Shape | None = None) -> Tensor:
        shape = self.layout.own_shape(shape)
        y = self.dropout1(*self.attention(self.norm1(x), shape=shape), residual=x)
        result: Tensor = self.dropout2(*self.mlp(self.norm2(y)), residual=y)
        return result


class ViTHead(nn.Module):
    """x_BTD -> logits_BN of the class token, on every rank."""

    def __init__(self, config: ViTConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.norm = layout.norm("layernorm", config.dim, eps=config.norm_eps)
        self.output = layout.linear(config.dim, config.num_labels, per_token=False)

    def forward(self, x: Tensor, shape: Shape | None = None) -> Tensor:
        first_BD = self.layout.first_token(self.norm(x), shape)[:, : self.output.in_features]
        result: Tensor = self.output(first_BD)
        return result if shape is None else self.layout.once(result, shape)


class ViT(SharedRows):
    """images [B, C, S, S] -> logits [B, num_labels] in the dtype of the parameters.

    Args:
        config: the shape of the model.
        group: the ranks that share the layers, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Tokens and results are the same on every rank,
            and on any number of them. On a grid of them, see `GPT`, the patches' layer and the head
            are whole on every rank.
        sequence_parallel: between blocks a rank holds its part of the tokens only.
        context: the ranks that share out the tokens of images, see `GPT`; each is given whole
            images, and computes its own patches. Logits are the same on all of them, and counted
            once. None: every rank has all tokens.
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
        config: ViTConfig,
        *,
        group: RanksLike | Grid = ALONE,
        sequence_parallel: bool = False,
        context: ContextRanks | None = None,
        order: str = "contiguous",
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.shared_rows = rows = TokenContext.of(context, order, tokens=config.num_tokens)
        self.layout = layout = ModelLayout.of(group, sequence_parallel, device, dtype, rows)
        self.embedding = ViTEmbedding(config, layout=layout)
        self.blocks = nn.ModuleList(
            ViTBlock(config, layout=layout) for _ in range(config.num_layers)
        )
        self.head = ViTHead(config, layout=layout)
        if seed is not None:
            self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is forward, in order: embedding, blocks, head."""
        return [self.embedding, *self.blocks, self.head]

    def permutations(self) -> list[ChannelSet]:
        """The channels whose order is free: those of the residual stream, and those within
        layers."""
        others = [
            ChannelPart("embedding.patch.weight", 0),
            ChannelPart("embedding.patch.bias", 0),
            ChannelPart("embedding.first", 1),
            ChannelPart("embedding.position", 1),
            ChannelPart("head.output.weight", 1),
        ]
        return [stream(self, self.config.dim, others), *inner_channels(self)]

    def forward(
        self, images_BCSS: Tensor, labels_B: Tensor | None = None, *, reduction: str = "mean"
    ) -> Tensor:
        """Logits; with labels, `loss`.

        Args:
            images_BCSS: [B, C, S, S].
            labels_B: int64 [B], or None.
            reduction: Of the loss: "mean" or "sum".
        """
        wanted = (self.config.num_channels, self.config.image_size, self.config.image_size)
        if tuple(images_BCSS.shape[1:]) != wanted:
            raise ValueError(
                f"images are {tuple(images_BCSS.shape)}; this model takes [B, "
                f"{', '.join(map(str, wanted))}]"
            )
        shape = (len(images_BCSS), self.config.num_tokens)
        x = self.embedding(images_BCSS)
        for block in self.blocks:
            x = block(x, shape)
        logits_BN: Tensor = self.head(x, shape)
        if labels_B is None:
            return logits_BN
        logits_BN = logits_BN if logits_BN.dtype == torch.float64 else logits_BN.float()
        found = functional.cross_entropy(
            logits_BN, labels_B, ignore_index=IGNORED, reduction=reduction
        )
        return self.layout.summand(found, shape) if reduction == "sum" else found

    def loss(self, images_BCSS: Tensor, labels_B: Tensor, *, reduction: str = "mean") -> Tensor:
        """-ln p(label), the same on every rank; labels of -100 don't count.

        Args:
            reduction: "mean" over those that do, or "sum".
        """
        result: Tensor = self(images_BCSS, labels_B, reduction=reduction)
        return result

    def initialize(self, seed: int, *, only: nn.Module | None = None) -> None:
        """Draw all parameters anew.

        Args:
            only: A module of this model: its own parameters, not its children's.
        """
        initialize_model_(self, seed=seed, std=0.02, only=only)

    def set_dropout(self, num_images: int, *, seed: int, step: int, first_row: int = 0) -> None:
        """Key all dropout for the next forward over that many images, as GPT.set_dropout does.

        Args:
            num_images: Of this forward.
            seed: Of the run.
            step: The number of the step, so that each draws other masks.
            first_row: Of this forward in the batch of all ranks.
        """
        if self.config.dropout or self.config.attention_dropout:
            shape = (num_images, self.config.num_tokens)
            set_dropout(self, seed=seed, step=step, shape=shape, first_row=first_row)
