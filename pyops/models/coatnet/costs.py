"""What each layer of a CoAtNet takes: by formulas, its parameters, its products and what autograd
keeps of an image; or measured, for no formula of sizes says how long a layer runs on a processor.

    kind    multiply-adds of an image (p pixels before the depthwise convolution, P behind it)
    stem    P (9 C S' + 9 S' S)
    C       p D' I + 9 P I + 2 I R + P I D                and P D' D where D' is not D
    T       P D' 3 I + 2 P P I + P I D + 8 P D D          likewise
    head    D D + D N

D' and D widths of a block's input and result, I its inner width, R that of squeeze and excitation,
C channels of an image, S' and S widths of the stem, N labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from pyops.mesh import ALONE, ProcessGroupLike
from pyops.models.coatnet.config import EXPANSION, STEM_STRIDE, BlockShape, CoAtNetConfig
from pyops.pipeline import profile

__all__ = ["LayerSizes", "layer_sizes", "measured_costs"]

TAPS = 9  # of a 3 x 3 convolution
STATISTICS = 2  # numbers that a layer norm keeps of a pixel
INDEX = 2  # numbers of 4 bytes that a maximum keeps of a pixel and channel: int64


@dataclass(frozen=True)
class LayerSizes:
    """A layer as numbers. What is "cut" is shared by the ranks of tensor parallelism, the rest is
    whole on each; both are counted for the whole layer."""

    name: str
    """As `CoAtNet.named_modules` has it."""
    kind: str
    """ "stem", "C", "T" or "head"."""
    width: int
    """The narrowest side of its products."""
    parameters: int
    """All of them."""
    cut_parameters: int = 0
    """Those that ranks share."""
    products: int = 0
    """Multiply-adds of an image in forward, scores included."""
    cut_products: int = 0
    """Those that ranks share."""
    scores: int = 0
    """Multiply-adds of scores, and of what they weigh."""
    taken: int = 0
    """Numbers of an image that it takes."""
    given: int = 0
    """Numbers of an image that it gives."""
    kept: int = 0
    """Numbers of an image that autograd keeps for backward, whole on each rank."""
    cut_kept: int = 0
    """Those that ranks share."""
    wide_kept: int = 0
    """Numbers that are kept in fp32 whatever the precision, whole on each rank."""
    cut_wide_kept: int = 0
    """Those that ranks share."""
    norm_pixels: int = 0
    """Pixels of an image in layer norms over channels that ranks may share: shared ones keep what
    they have centred and scaled, and one number of a pixel in place of two."""
    norm_channels: int = 0
    """Channels of such a norm, which ranks share."""
    pairs: int = 0
    """Numbers of the bias of all pairs of pixels: kept once, however many images there are."""
    inside: int = 0
    """Numbers of an image in the widest tensor within, which ranks share."""

    def kept_bytes(self, images: float, *, element: int, ranks: int = 1) -> float:
        """Bytes that autograd keeps for backward on a rank.

        Args:
            images: Of a micro-batch.
            element: Bytes of a number.
            ranks: Of tensor parallelism.
        """
        norms = self.norm_pixels if ranks > 1 else 0
        cut = self.cut_kept + norms * self.norm_channels
        numbers = element * (self.kept + cut / ranks)
        wide = 4.0 * (self.wide_kept - norms + self.cut_wide_kept / ranks)
        return images * (numbers + wide) + element * self.pairs / ranks

    def rank_parameters(self, ranks: int) -> float:
        """Parameters of a rank of tensor parallelism.

        Args:
            ranks: Of tensor parallelism.
        """
        return self.parameters - self.cut_parameters * (1.0 - 1.0 / ranks)


def layer_sizes(config: CoAtNetConfig) -> list[LayerSizes]:
    """Every layer of `CoAtNet.layers()`, in order, without stochastic depth.

    Args:
        config: The shape of the model.
    """
    found = [_stem(config)]
    height, across = (side // STEM_STRIDE for side in config.sides)
    for number, shape in enumerate(config.blocks()):
        make = _transformer if shape.kind == "T" else _convolution
        found.append(make(config, shape, f"blocks.{number}", height * across))
        height, across = shape.grid
    return [*found, _head(config, height * across)]


def _of_norm(config: CoAtNetConfig) -> int:
    """Numbers that a norm of a convolution block keeps of a pixel beside its input."""
    return STATISTICS if config.norm == "layer" else 0


def _stem(config: CoAtNetConfig) -> LayerSizes:
    hidden = config.stem_hidden or config.stem_width
    sides = prod(config.sides)
    pixels = sides // STEM_STRIDE**2
    weights = TAPS * hidden * (config.num_channels + config.stem_width)
    return LayerSizes(
        "stem",
        "stem",
        hidden,
        weights + 2 * hidden,
        products=pixels * weights,
        taken=sides * config.num_channels,
        given=pixels * config.stem_width,
        kept=sides * config.num_channels + 3 * pixels * hidden,
        wide_kept=_of_norm(config) * pixels,
        inside=pixels * hidden,
    )


@dataclass(frozen=True)
class _Shortcut:
    """What stands beside a block: parameters, multiply-adds, and what it keeps beside its input."""

    parameters: int
    products: int
    kept: int
    wide_kept: int


def _shortcut(config: CoAtNetConfig, shape: BlockShape, *, bias: bool) -> _Shortcut:
    pixels, taken, width = prod(shape.grid), shape.in_width, shape.width
    pooled, projected = shape.stride > 1, taken != width
    indices = INDEX * pixels * taken if pooled and config.pool != "average" else 0
    return _Shortcut(
        parameters=width * (taken + bias) if projected else 0,
        products=pixels * taken * width if projected else 0,
        kept=pixels * taken if pooled and projected else 0,
        wide_kept=indices,
    )


def _convolution(config: CoAtNetConfig, shape: BlockShape, name: str, before: int) -> LayerSizes:
    beside = _shortcut(config, shape, bias=config.conv_bias)
    taken, width, inner, squeezed = shape.in_width, shape.width, shape.inner, shape.squeezed
    pixels = prod(shape.grid)
    expanded = before if config.stride_in == "depthwise" else pixels
    pooled = config.stride_in == "pool" and shape.stride > 1
    matrices = inner * (taken + width + 2 * squeezed)
    cut = matrices + (2 * 2 + TAPS + 1) * inner  # two norms, the taps, the gate's bias
    products = (
        expanded * taken * inner
        + TAPS * pixels * inner
        + 2 * inner * squeezed
        + pixels * inner * width
    )
    # The input, what the norm in front gives, and that in half the side where it is pooled.
    kept = before * taken * (3 if config.pre_norm_act else 2)
    if pooled:
        kept += pixels * taken
    elif expanded < before:
        kept -= (before - expanded) * taken
    wide = beside.wide_kept + (before + expanded + pixels) * _of_norm(config)
    if pooled and config.pool != "average":
        wide += INDEX * pixels * taken
    return LayerSizes(
        name,
        "C",
        min(taken, width),
        cut + 2 * taken + squeezed + width * config.conv_bias + beside.parameters,
        cut,
        products + beside.products,
        products,
        taken=before * taken,
        given=pixels * width,
        kept=kept + beside.kept + 2 * squeezed,
        # Around both norms and activations, and the gate with its averages.
        cut_kept=(3 * expanded + 4 * pixels + 2) * inner,
        wide_kept=wide,
        norm_pixels=expanded + pixels if config.norm == "layer" else 0,
        norm_channels=inner,
        inside=pixels * inner,  # before its stride a block has let go of as much
    )


def _transformer(config: CoAtNetConfig, shape: BlockShape, name: str, before: int) -> LayerSizes:
    beside = _shortcut(config, shape, bias=config.shortcut_bias)
    taken, width, inner = shape.in_width, shape.width, shape.inner
    pixels, heads = prod(shape.grid), shape.inner // config.head_dim
    hidden, scales = EXPANSION * width, 2 * width if config.layer_scale else 0
    offsets = prod(2 * side - 1 for side in shape.grid)
    matrices = taken * 3 * inner + inner * width + 2 * width * hidden
    cut = matrices + 3 * inner + hidden + offsets * heads
    scores = 2 * pixels * pixels * inner
    kept = before * taken + pixels * (taken + 2 * width + scales)
    wide = beside.wide_kept + STATISTICS * (before + pixels)
    if shape.stride > 1:
        kept += before * taken  # a pooling keeps what it takes
        wide += INDEX * pixels * taken if config.pool != "average" else 0
    return LayerSizes(
        name,
        "T",
        min(taken, width),
        cut + 2 * taken + 4 * width + scales + beside.parameters,
        cut,
        pixels * matrices + scores + beside.products,
        pixels * matrices + scores,
        scores,
        taken=before * taken,
        given=pixels * width,
        kept=kept + beside.kept,
        cut_kept=pixels * (4 * inner + 2 * hidden),
        wide_kept=wide,
        cut_wide_kept=pixels * heads,
        pairs=heads * pixels * pixels,
        inside=pixels * hidden,
    )


def _head(config: CoAtNetConfig, pixels: int) -> LayerSizes:
    width, labels = config.widths[-1], config.num_labels
    hidden = width * width if config.head_hidden else 0
    # Of the average: the norm, its result, the hidden layer's; else the norm of every pixel.
    kept = 3 * width if config.head_hidden else (pixels + 1) * width
    return LayerSizes(
        "head",
        "head",
        min(width, labels),
        2 * width + hidden + (width if hidden else 0) + width * labels + labels,
        products=hidden + width * labels,
        taken=pixels * width,
        given=labels,
        kept=kept,
        wide_kept=STATISTICS * (1 if config.head_hidden else pixels) + labels,
        inside=width,
    )


def measured_costs(
    layers: list[nn.Module],
    images_BCHW: Tensor,
    *,
    rounds: int = 5,
    group: ProcessGroupLike = ALONE,
) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer, by which a pipeline evens out its stages:
    `pyops.pipeline.balance(costs, num_stages=...)`, or `LayeredModel(costs=...)`.

    Args:
        layers: `CoAtNet.layers()`.
        images_BCHW: A micro-batch.
        rounds: Of which the median is taken.
        group: The ranks that measure at the same time, each with all layers, and get the same; by
            default this process alone.

    Returns:
        A number for each of `layers`.
    """
    found = profile(layers, images_BCHW, rounds=rounds, group=group)
    return tuple(layer.forward + layer.backward for layer in found.layers)
