"""CoAtNetConfig: which blocks a CoAtNet has, how wide they are, and where it puts its strides,
poolings, norms and gates.

    stage      0                1                2                3                4
    kind       stem             C                C                T                T
    side       1/2              1/4              1/8              1/16             1/32
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from pyops.models.config_checks import MOST_NUMBERS

__all__ = ["BlockShape", "CoAtNetConfig"]

STEM_STRIDE = 2
EXPANSION = 4  # of a convolution block and of a feed-forward
CHOICES = {
    "norm": ("batch", "ghost", "layer"),
    "activation": ("gelu", "gelu_tanh", "silu", "relu"),
    "se_activation": ("silu", "relu", "gelu", "gelu_tanh"),
    "stride_in": ("expand", "depthwise", "pool"),
    "pool": ("average", "max", "max3"),
    "expand_from": ("output", "input"),
}


class BlockShape(NamedTuple):
    """One block of a CoAtNet."""

    kind: str
    """ "C", a convolution block, or "T", a transformer block."""
    stage: int
    """From 1; the stem is stage 0."""
    in_width: int
    """Channels of its input."""
    width: int
    """Channels of its result."""
    inner: int
    """Channels within: of the depthwise convolution, or of all heads."""
    squeezed: int
    """Channels between the two layers of squeeze and excitation; 0 in a transformer block."""
    stride: int
    """1, or 2 where its result has half the side."""
    grid: tuple[int, int]
    """Height and width of its result."""


@dataclass(frozen=True)
class CoAtNetConfig:
    """The shape of a CoAtNet.

    The defaults are CoAtNet-0 with stride and pooling as timm's `coatnet_0_224` has them; the paper
    has `stride_in="expand"` and `pool="max"`. `named` gives the variants.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    num_labels: int = 1000
    """Number of labels."""
    image_size: int = 224
    """Height of an image in pixels, a multiple of 2 times all strides (32)."""
    image_width: int = 0
    """Width of an image in pixels; 0: image_size."""
    num_channels: int = 3
    """Number of channels of an image."""
    stem_width: int = 64
    """Channels of the stem's result."""
    stem_hidden: int = 0
    """Channels of the stem's first convolution; 0: stem_width."""
    kinds: tuple[str, ...] = ("C", "C", "T", "T")
    """Of each stage after the stem: "C", convolution blocks, or "T", transformer blocks."""
    depths: tuple[int, ...] = (2, 3, 5, 2)
    """Blocks of each stage."""
    widths: tuple[int, ...] = (96, 192, 384, 768)
    """Channels of each stage."""
    strides: tuple[int, ...] = (2, 2, 2, 2)
    """Of the first block of each stage: 2, or 1 where it keeps the side."""
    head_dim: int = 32
    """Width of a head of attention."""
    norm: str = "batch"
    """Of convolution blocks and stem: "batch", "ghost" (each ghost_size images by themselves) or
    "layer" (over the channels of a pixel)."""
    ghost_size: int = 0
    """Images that a norm of "ghost" takes together, by their place in the whole batch."""
    norm_eps: float = 1e-5
    """Added to the variance in those norms."""
    attention_norm_eps: float = 1e-6
    """Added to the variance in the layer norms of transformer blocks and of the head."""
    activation: str = "gelu"
    """Of convolution blocks and stem: "gelu" (with erf), "gelu_tanh", "silu" or "relu"."""
    stride_in: str = "depthwise"
    """Which part of a convolution block has its stride: the first 1 x 1 convolution ("expand"), the
    "depthwise" one, or a "pool" before both."""
    pool: str = "average"
    """Of 2 x 2 pixels, "average" or "max"; or "max3", of 3 x 3 with stride 2."""
    expand_from: str = "output"
    """Whether a block's inner width is that of its "output", times 4 in convolution blocks, or of
    its "input"."""
    conv_bias: bool = True
    """The last convolution of a convolution block and its shortcut's have biases."""
    shortcut_bias: bool = True
    """The shortcuts' projections of transformer blocks have biases."""
    pre_norm_act: bool = False
    """An activation follows the norm in front of a convolution block."""
    se_activation: str = "silu"
    """Within squeeze and excitation."""
    se_ratio: float = 0.25
    """Width within squeeze and excitation, as a part of the block's width; of its inner width where
    expand_from is "input"."""
    se_early: bool = False
    """Squeeze and excitation stand before the norm of the depthwise convolution, not behind."""
    layer_scale: float = 0.0
    """First value of a learned factor for each channel that transformer blocks add; 0: none."""
    head_hidden: bool = True
    """The head has a hidden layer with tanh, and its norm behind the average over pixels, not
    before."""
    stochastic_depth: float = 0.0
    """Probability with which what the last block adds is left out for an image; of earlier blocks
    less, in proportion to their number (Huang et al., 2016)."""

    def __post_init__(self) -> None:
        for field in ("kinds", "depths", "widths", "strides"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        _check_fields(self)
        _check_stages(self)
        _check_sides(self)
        _check_size(self)

    @classmethod
    def named(cls, name: str, **changes: Any) -> CoAtNetConfig:
        """A variant: "0" to "7" of the paper, or "pico_rw", "nano_rw", "0_rw" to "3_rw", of which
        timm has trained weights of all but the first.

        Args:
            name: Of the variant.
            changes: Fields to have otherwise, such as num_labels or image_size.

        Raises:
            ValueError: For another name, and as the class does.
        """
        if name not in VARIANTS:
            raise ValueError(f"there is no CoAtNet {name!r}; choose one of {', '.join(VARIANTS)}")
        return cls(**{**VARIANTS[name], **changes})

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.image_size, self.image_width or self.image_size

    @property
    def num_layers(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def num_tokens(self) -> int:
        """Pixels of the last stage's result."""
        return prod(self.blocks()[-1].grid)

    def blocks(self) -> list[BlockShape]:
        """All blocks, in order."""
        found, width = [], self.stem_width
        height, across = (side // STEM_STRIDE for side in self.sides)
        stages = zip(self.kinds, self.depths, self.widths, self.strides, strict=True)
        for stage, (kind, depth, out, stride) in enumerate(stages, start=1):
            height, across = height // stride, across // stride
            for i in range(depth):
                base = out if self.expand_from == "output" else width
                inner = EXPANSION * base if kind == "C" else base
                squeezed = int(self.se_ratio * (out if self.expand_from == "output" else inner))
                found.append(
                    BlockShape(
                        kind,
                        stage,
                        width,
                        out,
                        inner,
                        max(1, squeezed) if kind == "C" else 0,
                        stride if i == 0 else 1,
                        (height, across),
                    )
                )
                width = out
        return found

    def estimated_elements(self) -> int:
        """About how many numbers the model has; never less than its weights."""
        sizes = (*self.widths, self.stem_width, self.stem_hidden, self.num_channels)
        height, width = self.sides
        found = 30 * max(sizes) ** 2 * (2 + sum(self.depths)) + max(sizes) * self.num_labels
        return found + 4 * height * width * max(sizes) * sum(self.depths)

    def resolved(self) -> CoAtNetConfig:
        """The same with every 0 that means a usual value replaced by it."""
        return replace(
            self, image_width=self.sides[1], stem_hidden=self.stem_hidden or self.stem_width
        )


def _check_fields(config: CoAtNetConfig) -> None:
    for field in ("num_labels", "image_size", "num_channels", "stem_width", "head_dim"):
        if getattr(config, field) < 1:
            raise ValueError(f"{field} is {getattr(config, field)}; it must be 1 or more")
    for field in ("image_width", "stem_hidden", "ghost_size"):
        if getattr(config, field) < 0:
            raise ValueError(
                f"{field} is {getattr(config, field)}; give a number, or 0 for the usual one"
            )
    for field, known in CHOICES.items():
        if getattr(config, field) not in known:
            raise ValueError(
                f"{field} is {getattr(config, field)!r}; choose one of {', '.join(known)}"
            )
    _check_numbers(config)


def _check_numbers(config: CoAtNetConfig) -> None:
    if (config.norm == "ghost") != (config.ghost_size > 0):
        raise ValueError(
            f"norm is {config.norm!r}, but ghost_size is {config.ghost_size}; a norm of 'ghost' "
            "takes 1 image or more together, and no other has a ghost_size"
        )
    if not 0.0 <= config.stochastic_depth < 1.0:
        raise ValueError(
            f"stochastic_depth is {config.stochastic_depth}; it is a probability, 0 or more and "
            "less than 1"
        )
    if not 0.0 < config.se_ratio <= 1.0:
        raise ValueError(f"se_ratio is {config.se_ratio}; give more than 0, and 1 or less")
    for field in ("norm_eps", "attention_norm_eps"):
        if not getattr(config, field) > 0.0:
            raise ValueError(f"{field} is {getattr(config, field)}; it must be more than 0")
    if not config.layer_scale >= 0.0:
        raise ValueError(f"layer_scale is {config.layer_scale}; give 0 for none, or more")


def _check_stages(config: CoAtNetConfig) -> None:
    for field, wrong, known in (
        ("kinds", lambda v: v not in ("C", "T"), '"C" or "T"'),
        ("depths", lambda v: v < 1, "1 or more"),
        ("widths", lambda v: v < 1, "1 or more"),
        ("strides", lambda v: v not in (1, 2), "1 or 2"),
    ):
        values = getattr(config, field)
        if not values or len(values) != len(config.kinds):
            raise ValueError(
                f"{field} has {len(values)} values, kinds {len(config.kinds)}; give one for each "
                "stage behind the stem"
            )
        if bad := [value for value in values if wrong(value)]:
            raise ValueError(f"{field} is {values}, with {bad[0]!r}; each must be {known}")
    for block in config.blocks():
        if block.kind == "T" and block.inner % config.head_dim:
            raise ValueError(
                f"widths is {config.widths}: stage {block.stage} has attention {block.inner} wide, "
                f"which head_dim = {config.head_dim} does not divide; change one of them"
            )


def _check_sides(config: CoAtNetConfig) -> None:
    every = STEM_STRIDE * prod(config.strides)
    for field, side in zip(("image_size", "image_width"), config.sides, strict=True):
        if side % every:
            raise ValueError(
                f"{field} is {side}, which is no multiple of {every}, the stem's stride times "
                f"those of all stages; the next that is one is {-(-side // every) * every}"
            )


def _check_size(config: CoAtNetConfig) -> None:
    """ValueError for a model larger than any memory."""
    if config.estimated_elements() > MOST_NUMBERS:
        raise ValueError(
            f"widths is {str(config.widths)[:80]}, depths {str(config.depths)[:80]}, num_labels "
            f"{config.num_labels}, image_size {config.image_size}; no memory holds such a model: "
            "make it smaller"
        )


def _paper(
    stem: int, depths: Sequence[int], widths: Sequence[int], **more: Any
) -> Mapping[str, Any]:
    return {"stem_width": stem, "depths": tuple(depths), "widths": tuple(widths), **more}


def _six(stem: int, widths: Sequence[int]) -> Mapping[str, Any]:
    """Stage 3 has both kinds of blocks, with the stride before the first."""
    more = {"kinds": ("C", "C", "C", "T", "T"), "strides": (2, 2, 2, 1, 2), "head_dim": 128}
    return _paper(stem, (2, 4, 8, 42, 2), widths, **more)


def _rw(stem: Sequence[int], depths: Sequence[int], width: int, **more: Any) -> Mapping[str, Any]:
    """timm's own variants, trained before the paper's code was known."""
    return {
        "stem_hidden": stem[0],
        "expand_from": "input",
        "activation": "silu",
        "head_hidden": False,
        **_paper(stem[1], depths, tuple(width * 2**i for i in range(4)), **more),
    }


_FIRST = {"pre_norm_act": True, "conv_bias": False, "se_activation": "relu"}
_SMALL = {"se_early": True, "shortcut_bias": False}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "0": _paper(64, (2, 3, 5, 2), (96, 192, 384, 768)),
    "1": _paper(64, (2, 6, 14, 2), (96, 192, 384, 768)),
    "2": _paper(128, (2, 6, 14, 2), (128, 256, 512, 1024)),
    "3": _paper(192, (2, 6, 14, 2), (192, 384, 768, 1536)),
    "4": _paper(192, (2, 12, 28, 2), (192, 384, 768, 1536)),
    "5": _paper(192, (2, 12, 28, 2), (256, 512, 1280, 2048), head_dim=64),
    "6": _six(192, (192, 384, 768, 1536, 2048)),
    "7": _six(192, (256, 512, 1024, 2048, 3072)),
    "pico_rw": _rw((32, 64), (2, 3, 5, 2), 64),
    "nano_rw": _rw((32, 64), (3, 4, 6, 3), 64, stride_in="pool"),
    "0_rw": _rw((32, 64), (2, 3, 7, 2), 96, stride_in="pool", **_FIRST, **_SMALL),
    "1_rw": _rw((32, 64), (2, 6, 14, 2), 96, **_FIRST, **_SMALL),
    "2_rw": _rw((64, 128), (2, 6, 14, 2), 128, **{**_FIRST, "se_activation": "silu"}),
    "3_rw": _rw(
        (96, 192), (2, 6, 14, 2), 192, **{**_FIRST, "se_activation": "silu"}, layer_scale=1e-6
    ),
}
