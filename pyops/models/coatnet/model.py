"""A CoAtNet: convolutions where an image has many pixels, attention where it has few (Dai, Liu, Le
and Tan, "CoAtNet: Marrying Convolution and Attention for All Data Sizes", 2021).

    images_BCHW -> stem -> convolution blocks -> transformer blocks -> mean over pixels -> norm
                -> tanh(hidden) -> logits_BN

Between layers x is [B, H, W, D], channels last. Letters of tensor names: B batch, C channels of an
image, H, W its pixels, D width, N labels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import ChannelPart, ChannelSet
from pyops.flat.channels import written
from pyops.mesh import ALONE
from pyops.models.coatnet.batch_norm import GroupBatchNorm2d
from pyops.models.coatnet.config import BlockShape, CoAtNetConfig
from pyops.models.coatnet.convolution_block import ConvolutionBlock, FoldedConvolutionBlock
from pyops.models.coatnet.relative_bias import RelativeBias2d
from pyops.models.coatnet.stem import FoldedStem, Stem
from pyops.models.coatnet.transformer_block import TransformerBlock
from pyops.models.model_layout import ModelLayout
from pyops.models.vocabulary_head import IGNORED
from pyops.protocols import HasPlacements
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    Ranks,
    RanksLike,
    RowParallelLinear,
    initialize_model_,
    set_dropout,
)
from pyops.tensor_parallel.layers.channels import inner_channels

__all__ = ["CoAtNet"]


class CoAtNetHead(nn.Module):
    """x_BHWD -> logits_BN of the mean over pixels, on every rank; with labels, their loss."""

    def __init__(self, config: CoAtNetConfig, *, layout: ModelLayout) -> None:
        super().__init__()
        dim = config.widths[-1]
        self.norm = layout.norm("layernorm", dim, eps=config.attention_norm_eps)
        self.hidden = layout.linear(dim, dim, per_token=False) if config.head_hidden else None
        self.output = layout.linear(dim, config.num_labels, per_token=False)

    def forward(
        self, x_BHWD: Tensor, labels_B: Tensor | None = None, *, reduction: str = "mean"
    ) -> Tensor:
        if self.hidden is None:
            mean_BD = self.norm(x_BHWD).mean(dim=(1, 2))
        else:
            mean_BD = torch.tanh(self.hidden(self.norm(x_BHWD.mean(dim=(1, 2)))))
        logits_BN: Tensor = self.output(mean_BD)
        if labels_B is None:
            return logits_BN
        logits_BN = logits_BN if logits_BN.dtype == torch.float64 else logits_BN.float()
        return functional.cross_entropy(
            logits_BN, labels_B, ignore_index=IGNORED, reduction=reduction
        )


class CoAtNet(nn.Module):
    """images [B, C, H, W] -> logits [B, num_labels] in the dtype of the parameters.

    Args:
        config: the shape of the model.
        group: the ranks that share the blocks, see `pyops.tensor_parallel.RanksLike`; by default
            this process alone: the model is whole. Images and results are the same on every rank,
            and on any number of them.
        tp_stages: the stages, from 1, whose blocks the ranks share; None: all. The stem, the head
            and the blocks of other stages are whole on every rank.
        batch_group: the ranks whose images a norm of "batch" takes as one batch, such as those of
            data parallelism; by default this process alone.
        seed: of the initial parameters, each drawn by (seed, parameter name), so that neither the
            order of construction, nor the device, nor the number of ranks changes them.
            Weights of convolutions are normal with variance 2 / (outputs of an input), those of
            transformer blocks with 2 / (inputs + outputs), tables and the head's with deviation
            0.02; biases are 0, norms 1. None: they are left as they are in memory, to be
            loaded.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads or channels that the ranks can't share; stages that there are not.
        TypeError: a group is no group that this rank is in.
    """

    def __init__(
        self,
        config: CoAtNetConfig,
        *,
        group: RanksLike = ALONE,
        tp_stages: Collection[int] | None = None,
        batch_group: RanksLike = ALONE,
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        ranks = Ranks.of(group)
        stages = range(1, len(config.kinds) + 1)
        shared = set(stages if tp_stages is None else tp_stages)
        if unknown := sorted(shared - set(stages)):
            raise ValueError(
                f"tp_stages has {unknown[0]}, but the stages behind the stem are 1 to "
                f"{stages[-1]}; name some of these"
            )
        alone = ModelLayout(Ranks.of(ALONE), False, device, dtype)
        split = ModelLayout(ranks, False, device, dtype)
        batch = Ranks.of(batch_group)
        self.stem = Stem(config, layout=alone, batch_group=batch)
        shapes = config.blocks()
        self.blocks = nn.ModuleList(
            _block(
                config,
                shape,
                layout=split if shape.stage in shared else alone,
                batch_group=batch,
                drop=config.stochastic_depth * i / max(1, len(shapes) - 1),
            )
            for i, shape in enumerate(shapes)
        )
        self.head = CoAtNetHead(config, layout=alone)
        for layer in self.layers():
            if ranks.size > 1 and _stage_of(layer) not in shared:
                _hold_whole(layer, ranks)
        if seed is not None:
            self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is forward, in order: stem, blocks, head."""
        return [self.stem, *self.blocks, self.head]

    def permutations(self) -> list[ChannelSet]:
        """The channels whose order is free: those between blocks, from one change of the width to
        the next, those of stem and head, and those within layers."""
        if not hasattr(self, "stem") or not hasattr(self, "head"):
            raise ValueError(
                "this CoAtNet is a part of a model, whose channels go on in others; permute the "
                "whole model before a pipeline takes it apart"
            )
        hidden = len(self.stem.conv1.weight)
        stem = (
            ChannelPart("stem.conv1.weight"),
            *self.stem.norm.channel_parts("stem.norm"),
            ChannelPart("stem.conv2.weight", 1, reads=True),
        )
        found = [ChannelSet("stem.hidden", hidden, stem), *self._streams()]
        if self.head.hidden is not None:
            rows = written("head.hidden", bias=True)
            parts = (*rows, ChannelPart("head.output.weight", 1))
            found.append(ChannelSet("head.hidden", self.config.widths[-1], parts))
        return [*found, *inner_channels(self)]

    def _streams(self) -> list[ChannelSet]:
        """What the blocks pass on, a set for each width."""
        found: list[ChannelSet] = []
        width, parts = self.config.stem_width, [ChannelPart("stem.conv2.weight")]
        for i, block in enumerate(self.blocks):
            assert isinstance(block, ConvolutionBlock | TransformerBlock)
            prefix = f"blocks.{i}"
            reads, results = block.stream_parts()
            parts += [part.under(prefix) for part in reads]
            if block.shortcut.weight is not None:
                parts.append(ChannelPart(f"{prefix}.shortcut.weight", 1, reads=True))
                found.append(ChannelSet(f"stream.{len(found)}", width, tuple(parts)))
                biased = block.shortcut.bias is not None
                rows = written("shortcut", bias=biased)
                width, parts = block.shape.width, [part.under(prefix) for part in rows]
            parts += [part.under(prefix) for part in results]
        parts += [ChannelPart("head.norm.weight"), ChannelPart("head.norm.bias")]
        last = "output" if self.head.hidden is None else "hidden"
        parts.append(ChannelPart(f"head.{last}.weight", 1, reads=last == "hidden"))
        return [*found, ChannelSet(f"stream.{len(found)}", width, tuple(parts))]

    def keep_layers(self, numbers: Collection[int]) -> None:
        """Let go of all `layers()` but these, for a rank that has a part of the model: names stay
        those of the whole.

        Raises:
            ValueError: For a norm of "batch", which a pipeline would apply to a micro-batch.
        """
        if self.config.norm == "batch":
            raise ValueError(
                "norm is 'batch', but a stage of a pipeline sees a micro-batch at a time, so that "
                "the result would depend on how many there are; set norm to 'layer', or to "
                "'ghost' with a ghost_size that divides a micro-batch"
            )
        last = self.config.num_layers + 1
        for i in range(self.config.num_layers):
            if i + 1 not in numbers:
                del self.blocks._modules[str(i)]
        if 0 not in numbers:
            del self.stem
        if last not in numbers:
            del self.head

    def forward(
        self, images_BCHW: Tensor, labels_B: Tensor | None = None, *, reduction: str = "mean"
    ) -> Tensor:
        """Logits; with labels, `loss`.

        Args:
            images_BCHW: [B, C, H, W].
            labels_B: int64 [B], or None.
            reduction: Of the loss: "mean" or "sum".
        """
        x = self.stem(images_BCHW)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x, labels_B, reduction=reduction)
        return result

    def loss(self, images_BCHW: Tensor, labels_B: Tensor, *, reduction: str = "mean") -> Tensor:
        """-ln p(label), the same on every rank; labels of -100 don't count.

        Args:
            reduction: "mean" over those that do, or "sum".
        """
        result: Tensor = self(images_BCHW, labels_B, reduction=reduction)
        return result

    @torch.no_grad()
    def initialize(self, seed: int, *, only: nn.Module | None = None) -> None:
        """Draw all parameters anew, and forget the running statistics of batch norms.

        Args:
            only: A module of this model: its own parameters, not its children's.
        """
        spreads = _spreads(self)
        initialize_model_(self, seed=seed, std=lambda name: spreads.get(name, 0.02), only=only)
        for module in self.modules() if only is None else (only,):
            if isinstance(module, GroupBatchNorm2d):
                module.reset_running_stats()
            elif isinstance(module, TransformerBlock) and self.config.layer_scale:
                module.scale1.fill_(self.config.layer_scale)
                module.scale2.fill_(self.config.layer_scale)

    def resize_(self, *, image_size: int, image_width: int = 0) -> None:
        """Take images of another size from now on: the tables of relative positions are
        interpolated, bilinearly, as in the paper's appendix. They become new parameters, so that an
        optimizer is to be made afterwards.

        Args:
            image_size: Height in pixels, a multiple of 32.
            image_width: Width; 0: the same.

        Raises:
            ValueError: For a size that is no multiple of 32.
        """
        config = replace(self.config, image_size=image_size, image_width=image_width)
        for block, shape in zip(self.blocks, config.blocks(), strict=True):
            for module in block.modules():
                if isinstance(module, RelativeBias2d):
                    module.resize_(shape.grid)
        self.config, self.stem.sides = config, config.sides

    def folded(self) -> CoAtNet:
        """A copy for inference, in eval mode and without gradients, whose batch norms are part of
        the convolutions: the same logits up to rounding, in less time. Its parameters have other
        names; it is not for training or saving.

        Raises:
            ValueError: for norm "layer", whose statistics are those of each pixel, and for a model
                that ranks share.
        """
        if self.config.norm == "layer":
            raise ValueError(
                'norm is "layer": each pixel has statistics of its own, and there is nothing to '
                'fold; use the model as it is, or train one of norm "batch"'
            )
        found = copy.deepcopy(self).eval().requires_grad_(False)
        blocks = [block for block in found.blocks if isinstance(block, ConvolutionBlock)]
        if any(len(block.depthwise.weight) < block.shape.inner for block in blocks):
            raise ValueError(
                "the model is shared by ranks; load it whole, with group=pyops.mesh.ALONE"
            )
        found.stem = FoldedStem(found.stem)  # type: ignore[assignment]
        for i, block in enumerate(found.blocks):
            if isinstance(block, ConvolutionBlock):
                found.blocks[i] = FoldedConvolutionBlock(block)
        return found

    def set_dropout(
        self, num_images: int | tuple[int, int], *, seed: int, step: int, first_row: int = 0
    ) -> None:
        """Key stochastic depth for the next forward over that many images, as GPT.set_dropout does.

        Args:
            num_images: Of this forward; or (images, anything).
            seed: Of the run.
            step: The number of the step, so that each leaves out other images.
            first_row: Of this forward in the batch of all ranks.
        """
        if self.config.stochastic_depth:
            rows = num_images if isinstance(num_images, int) else num_images[0]
            set_dropout(self, seed=seed, step=step, shape=(rows, 1), first_row=first_row)


def _block(
    config: CoAtNetConfig,
    shape: BlockShape,
    *,
    layout: ModelLayout,
    batch_group: RanksLike,
    drop: float,
) -> ConvolutionBlock | TransformerBlock:
    if shape.kind == "T":
        return TransformerBlock(config, shape, layout=layout, drop=drop)
    return ConvolutionBlock(config, shape, layout=layout, batch_group=batch_group, drop=drop)


def _stage_of(layer: nn.Module) -> int:
    """Of a block, from 1; 0 for stem and head."""
    return layer.shape.stage if isinstance(layer, ConvolutionBlock | TransformerBlock) else 0


def _hold_whole(layer: nn.Module, ranks: Ranks) -> None:
    """Say of every parameter of a layer that was made for one rank that each of these has all of
    it."""
    for module in layer.modules():
        if isinstance(module, HasPlacements):
            module.placements = {  # type: ignore[misc]
                name: replace(place, copies=ranks.size, first=ranks.rank == 0)
                for name, place in module.placements.items()
            }


def _spreads(model: CoAtNet) -> Mapping[str, float]:
    """{name: deviation of its first values} of weights of convolutions and of linear layers."""
    found = {}
    if hasattr(model, "stem"):
        for name in ("conv1", "conv2"):
            outputs = 9 * len(getattr(model.stem, name).weight)
            found[f"stem.{name}.weight"] = math.sqrt(2 / outputs)
    for i, block in model.blocks._modules.items():
        assert isinstance(block, ConvolutionBlock | TransformerBlock)
        shape = block.shape
        sizes = {"shortcut": (shape.in_width, shape.width)}
        if isinstance(block, ConvolutionBlock):
            sizes["depthwise"] = (9, 9)
        sizes |= {
            name: (module.in_features, module.out_features)
            for name, module in block.named_modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }
        for name, (inputs, outputs) in sizes.items():
            given = 0 if isinstance(block, ConvolutionBlock) else inputs
            found[f"blocks.{i}.{name}.weight"] = math.sqrt(2 / (given + outputs))
    return found
