"""The 1,797 images of handwritten digits that ship inside scikit-learn, in two parts, and copies of them that differ a little.

    images [n, 1, 8, 8]    -1 paper ... 1 ink            labels 0 ... 9
    copies [n, C, 1, 8, 8] each image C times, turned, scaled and shifted a little, each copy its own way

(Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998: the images of its test part.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops import random
from pyops.data.corpus import CorpusError

__all__ = ["IMAGES", "Digits", "copies", "load_digits", "training_images"]

IMAGES = 1797
PAPER = -1.0


class Digits(NamedTuple):
    """images: [n, 1, 8, 8] fp32, -1 to 1. labels: int64 [n], 0 to 9."""

    images: Tensor
    labels: Tensor


def training_images(held_out: float) -> int:
    """How many images are trained on when that part is held out."""
    return max(1, min(IMAGES - 1, round(IMAGES * (1 - held_out))))


def load_digits(*, held_out: float = 0.5) -> tuple[Digits, Digits]:
    """The images to train on, and those held out: that part of them, drawn once and for all, whatever the seed of a run.

    CorpusError where scikit-learn is not installed; ValueError for a part that leaves nothing on either side.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out is {held_out}; give the part of the images to keep for the score, between 0 and 1")
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        message = "the digits images are in the package scikit-learn, which is not installed: pip install scikit-learn"
        raise CorpusError(message) from error
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(found.target).long()
    order = torch.argsort(random.uniform(0, "digits.split", (len(labels),)), stable=True)
    cut = training_images(held_out)
    parts = [Digits(images[some].contiguous(), labels[some].contiguous()) for some in (order[:cut], order[cut:])]
    return parts[0], parts[1]


def copies(images: Tensor, count: int, *, name: str = "train") -> Tensor:
    """images [n, 1, S, S] -> [n, count, 1, S, S]: of each the image itself, and count - 1 copies of it, which are turned by up
    to 12 degrees, up to 12 % larger or smaller, and shifted by up to 0.6 pixels each way.

    They are drawn by (name, image, copy), so they are the same whenever they are made. What comes in at the edges is paper.
    ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be 1 or more")
    side = images.shape[-1]
    drawn = [random.uniform(0, f"digits.copies.{name}.{i}", (count, 4)) for i in range(len(images))]
    turn, size, down, right = (2 * torch.stack(drawn) - 1).flatten(0, 1).unbind(-1) if drawn else torch.zeros(4, 0)
    turn, size = turn * math.radians(12.0), 1 + 0.12 * size
    down, right = (0.6 * 2 / side * each for each in (down, right))
    maps = torch.stack([turn.cos() * size, -turn.sin() * size, right, turn.sin() * size, turn.cos() * size, down], dim=-1)
    every = images.repeat_interleave(count, dim=0)
    grid = functional.affine_grid(maps.view(-1, 2, 3), list(every.shape), align_corners=False)
    found = functional.grid_sample(every - PAPER, grid, align_corners=False) + PAPER  # zeros come in
    found = found.unflatten(0, (len(images), count))
    found[:, 0] = images
    return found
