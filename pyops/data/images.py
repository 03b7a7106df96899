"""Images with labels, and copies of them that differ a little.

images [n, 1, S, S]      -1 paper ... 1 ink            labels [n]
copies [n, C, 1, S, S]   each image C times, turned, scaled and shifted a little, each copy its own
                         way
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops import random

__all__ = ["Images", "copies", "enlarged", "split"]

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
