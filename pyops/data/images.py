"""Images with labels, copies of them that differ a little, and mixtures of two.

images [n, 1, S, S]      -1 paper ... 1 ink            labels [n]
copies [n, C, 1, S, S]   each image C times, turned, scaled and shifted a little, each copy its own
                         way
mixed  [n, 1, S, S]      an image and another one of the same step, weighted or in pieces; labels
                         become probabilities
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops import random

__all__ = ["Images", "Mixing", "copies", "enlarged", "split"]

PAPER = -1.0


class Images(NamedTuple):
    """images: [n, 1, S, S] fp32, -1 to 1. labels: int64 [n], from 0."""

    images: Tensor
    labels: Tensor


def split(every: Images, held_out: float, *, name: str) -> tuple[Images, Images]:
    """To train on, and held out: that part of two or more, at least one in each, drawn by name,
    whatever the seed of a run.

    Raises:
        ValueError: For a part that leaves nothing on either side.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(
            f"held_out is {held_out}; give the part of the images to keep for the score, "
            "between 0 and 1"
        )
    total = len(every.labels)
    order = torch.argsort(random.uniform(0, f"{name}.split", (total,)), stable=True)
    cut = max(1, min(total - 1, round(total * (1 - held_out))))
    parts = [
        Images(every.images[some].contiguous(), every.labels[some].contiguous())
        for some in (order[:cut], order[cut:])
    ]
    return parts[0], parts[1]


def copies(images: Tensor, count: int) -> Tensor:
    """images [n, 1, S, S] -> [n, count, 1, S, S]: of each the image itself, and count - 1 copies of
    it, which are turned by up to 12 degrees, up to 12 % larger or smaller, and shifted by up to 0.6
    pixels each way.

    They are drawn by (place of the image, copy), so they are the same whenever they are made. What
    comes in at the edges is paper.

    Raises:
        ValueError: For a count below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be 1 or more")
    side = images.shape[-1]
    drawn = [random.uniform(0, f"copies.{i}", (count, 4)) for i in range(len(images))]
    turn, size, down, right = (
        (2 * torch.stack(drawn) - 1).flatten(0, 1).unbind(-1)
        if drawn
        else torch.zeros(4, 0, device="cpu")
    )
    turn, size = turn * math.radians(12.0), 1 + 0.12 * size
    down, right = (0.6 * 2 / side * each for each in (down, right))
    maps = torch.stack(
        [turn.cos() * size, -turn.sin() * size, right, turn.sin() * size, turn.cos() * size, down],
        dim=-1,
    )
    every = images.repeat_interleave(count, dim=0)
    grid = functional.affine_grid(maps.view(-1, 2, 3), list(every.shape), align_corners=False)
    # grid_sample fills with zeros, which are then PAPER.
    found: Tensor = functional.grid_sample(every - PAPER, grid, align_corners=False) + PAPER
    found = found.unflatten(0, (len(images), count))
    found[:, 0] = images
    return found


def enlarged(images: Tensor, side: int) -> Tensor:
    """images [n, 1, S, S] -> [n, 1, side, side], with lines between their pixels."""
    if images.shape[-1] == side:
        return images
    return functional.interpolate(images, side, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Mixing:
    """Each image of a step is mixed with another of the same step: by weights (mixup, Zhang et al.,
    ICLR 2018) or by a rectangle of the other (CutMix, Yun et al., ICCV 2019).

        x <- w x + (1 - w) x'        or x' within a rectangle of (1 - w) of the pixels
        p <- w one(y) + (1 - w) one(y')                                   w ~ Beta(alpha, alpha)

    What is drawn depends on (seed, step, row in the batch of all ranks) alone, so that any layout
    of ranks trains on the same images. The other image is the row that lies a number of rows
    further, the same for a whole step: `partners` says which rows a rank must have beside its own.

    Raises:
        ValueError: For a negative alpha, and where both are 0.
    """

    mixup: float = 0.0
    """alpha of the weights; 0: no image is mixed by weights."""
    cutmix: float = 0.0
    """alpha of the rectangles; 0: none. With both, either comes every other time on average."""
    seed: int = 0
    """Of what is drawn."""
    smoothing: float = 0.0
    """Which part of the probabilities is spread over all labels."""

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0.0 <= alpha < math.inf:
                raise ValueError(f"{name} is {alpha!r}; give a number of 0 or more, such as 0.8")
        if not self.mixup and not self.cutmix:
            raise ValueError("mixup and cutmix are both 0: nothing would be mixed; set one of them")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing is {self.smoothing!r}; give 0 or more, and less than 1")

    def partners(self, *, step: int, first_row: int, count: int, global_batch: int) -> Tensor:
        """int64 [count]: the rows that rows first_row to first_row + count - 1 are mixed with.

        Args:
            step: Of the training.
            first_row: The rank's first row in the batch of all ranks.
            count: Of the rank's rows.
            global_batch: Rows of a step, over all ranks.

        Raises:
            ValueError: For rows that the batch has not, and for a batch of one.
        """
        if global_batch < 2:
            raise ValueError(
                f"global_batch is {global_batch}: there is no other image to mix with; take 2 or "
                "more"
            )
        if first_row < 0 or count < 0 or first_row + count > global_batch:
            raise ValueError(
                f"rows {first_row} to {first_row + count - 1} are not all among the {global_batch} "
                "of a step; give the rank's own first_row and count"
            )
        shift = self._drawn(step, "partner").randrange(1, global_batch)
        return torch.tensor(
            [(row + shift) % global_batch for row in range(first_row, first_row + count)],
            dtype=torch.int64,
            device="cpu",
        )

    def apply(
        self, own: Images, others: Images, *, step: int, first_row: int, num_labels: int
    ) -> tuple[Tensor, Tensor]:
        """The mixed images, and fp32 [n, num_labels]: the probabilities of their labels, as
        `torch.nn.functional.cross_entropy` takes a target.

        Args:
            own: The rank's images [n, ..., H, W] and labels.
            others: Those of the rows that `partners` names, in its order.
            step: Of the training.
            first_row: The rank's first row in the batch of all ranks.
            num_labels: How many labels there are.

        Raises:
            ValueError: Where there are not as many others, or of another shape.
        """
        if own.images.shape != others.images.shape or own.labels.shape != others.labels.shape:
            raise ValueError(
                f"own has images {list(own.images.shape)} and labels {list(own.labels.shape)}, "
                f"others {list(others.images.shape)} and {list(others.labels.shape)}; give one "
                "other image of the same shape for each, those of `partners`"
            )
        height, width = own.images.shape[-2:]
        kept = own.images.new_ones(len(own.labels), height, width)
        for i, weights in enumerate(kept):
            self._weigh(weights, self._drawn(step, first_row + i))
        weight = kept.mean((1, 2), dtype=torch.float32)[:, None]
        kept = kept.view(len(kept), *[1] * (own.images.dim() - 3), height, width)
        mixed = own.images * kept + others.images * (1 - kept)
        ones, other_ones = (
            functional.one_hot(labels, num_labels).float() for labels in (own.labels, others.labels)
        )
        targets = weight * ones + (1 - weight) * other_ones
        return mixed, (1 - self.smoothing) * targets + self.smoothing / num_labels

    def _drawn(self, step: int, what: object) -> Random:
        return Random(random.key_of(self.seed, f"mixing.{step}.{what}"))

    def _weigh(self, weights_HW: Tensor, drawn: Random) -> None:
        """How much of an image is kept at each pixel."""
        cuts = drawn.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if cuts else self.mixup
        weight = drawn.betavariate(alpha, alpha)
        if not cuts:
            weights_HW.fill_(weight)
            return
        places = []
        for size in weights_HW.shape:
            half = size * math.sqrt(1 - weight) / 2
            center = drawn.random() * size
            ends = (round(center - half), round(center + half))
            places.append(slice(max(0, ends[0]), min(size, ends[1])))
        weights_HW[places[0], places[1]] = 0.0
