"""ImageShape: a CoAtNet as numbers, layer by layer: the first have the activations, the last the
parameters, so that no layer stands for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pyops.models import CoAtNetConfig
from pyops.models.coatnet.costs import LayerSizes, layer_sizes
from pyops.plan.shapes.numbers import PlanError

__all__ = ["ImageShape"]

PREFIX = "coatnet-"
NORM = "layer"  # the one whose statistics are the same on every layout


@dataclass(frozen=True)
class ImageShape:
    """A CoAtNet, and the size of its images."""

    config: CoAtNetConfig
    """Its widths, depths and images."""
    name: str = "CoAtNet"
    """What the tables call it."""

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """Stem, blocks, head."""
        return tuple(layer_sizes(self.config))

    @property
    def num_layers(self) -> int:
        """Layers that a pipeline may cut between."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def sequence_length(self) -> int:
        """What a row of a step counts as: one image."""
        return 1

    @property
    def unit(self) -> str:
        """What a row is, in short."""
        return "img"

    @property
    def rows(self) -> str:
        """What the rows of a step are, for a text."""
        height, width = self.config.sides
        return f"images of {height} x {width} pixels"

    @property
    def convention(self) -> str:
        """What `operations` counts."""
        return "6 operations an image for each multiply-add of its products"

    @property
    def most_ranks_of_tp(self) -> int:
        """The most ranks that share all heads, and all channels within convolution blocks, evenly;
        its divisors do, too."""
        found = 0
        for block in self.config.blocks():
            shared = block.inner if block.kind == "C" else block.inner // self.config.head_dim
            found = math.gcd(found, shared)
        return found

    def operations(self, *, causal: bool = False) -> float:
        """Model operations of an image, forward and backward: 6 of each multiply-add.

        Args:
            causal: No image has a mask: it changes nothing.
        """
        return 6.0 * sum(layer.products for layer in self.layers)

    def with_image_size(self, pixels: int) -> ImageShape:
        """The same for square images of another size.

        Args:
            pixels: Of a side.

        Raises:
            PlanError: No CoAtNet takes such images.
        """
        try:
            config = replace(self.config, image_size=pixels, image_width=0)
        except ValueError as error:
            raise PlanError(str(error)) from None
        return replace(self, config=config)

    @classmethod
    def named(cls, name: str, **changes: Any) -> ImageShape:
        """The shape of a variant: "coatnet-0" to "coatnet-7", or of timm, as "coatnet-0_rw"; with
        layer norms, whose statistics are the same on every layout.

        Args:
            name: Of the variant.
            changes: Fields of `CoAtNetConfig` to have otherwise.

        Raises:
            PlanError: There is no such variant, or a field makes no sense.
        """
        try:
            variant = name.removeprefix(PREFIX)
            return cls(CoAtNetConfig.named(variant, **{"norm": NORM, **changes}), name)
        except ValueError as error:
            raise PlanError(str(error)) from None

    @classmethod
    def of_numbers(cls, values: Mapping[str, Any]) -> ImageShape:
        """The shape that `dataclasses.asdict` gives, as JSON has it.

        Args:
            values: {"config": {field: value}, "name": text}.

        Raises:
            PlanError: For a field that there is not, or that makes no sense.
        """
        config = values["config"]
        known = {field.name for field in fields(CoAtNetConfig)}
        if strange := sorted(set(config) - known):
            raise PlanError(f"a CoAtNet has no {strange[0]}; it has {', '.join(sorted(known))}")
        try:
            return cls(CoAtNetConfig(**config), values["name"])
        except ValueError as error:
            raise PlanError(str(error)) from None
