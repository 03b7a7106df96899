"""Mixing: the same images on any layout of ranks, weights that labels share, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pyops.data import Images, Mixing

BATCH, LABELS = 12, 5
WAYS = {
    "mixup": Mixing(mixup=0.8, seed=3),
    "cutmix": Mixing(cutmix=1.0, seed=3),
    "both": Mixing(mixup=0.8, cutmix=1.0, seed=3, smoothing=0.1),
}


def batch() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 8, 6, generator=generator)
    return Images(images, torch.arange(BATCH) % LABELS)


def of_rank(mixing: Mixing, first: int, count: int, step: int = 7) -> tuple[Any, Any]:
    whole = batch()
    rows = mixing.partners(step=step, first_row=first, count=count, global_batch=BATCH)
    own = Images(*(t[first : first + count] for t in whole))
    others = Images(*(t[rows] for t in whole))
    return mixing.apply(own, others, step=step, first_row=first, num_labels=LABELS)


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_has_the_same_images(way: str):
    images, targets = of_rank(WAYS[way], 0, BATCH)
    for sizes in ((6, 6), (3, 3, 3, 3), (5, 0, 7)):
        parts, first = [], 0
        for count in sizes:
            parts.append(of_rank(WAYS[way], first, count))
            first += count
        assert torch.equal(torch.cat([part for part, _ in parts]), images)
        assert torch.equal(torch.cat([part for _, part in parts]), targets)
    other_step, _ = of_rank(WAYS[way], 0, BATCH, step=8)
    assert (other_step != images).flatten(1).any(1).all()


@pytest.mark.parametrize("way", WAYS)
def test_labels_have_the_weights_of_the_images(way: str):
    """Of images that are 1 everywhere among images that are 0, the mean is the weight."""
    mixing, ones = WAYS[way], torch.ones(BATCH, 1, 8, 6)
    labels = torch.zeros(BATCH, dtype=torch.int64)
    others = Images(torch.zeros_like(ones), labels + 1)
    images, targets = mixing.apply(
        Images(ones, labels), others, step=0, first_row=0, num_labels=LABELS
    )
    weight = images.mean((1, 2, 3))
    spread = mixing.smoothing / LABELS
    torch.testing.assert_close(targets[:, 0], (1 - mixing.smoothing) * weight + spread)
    torch.testing.assert_close(targets.sum(1), torch.ones(BATCH))
    assert torch.equal(targets[:, 2:], torch.full((BATCH, LABELS - 2), spread))
    assert weight.std() > 0.1
    pieces = ((images == 0) | (images == 1)).flatten(1).all(1)
    assert {"mixup": 0, "cutmix": BATCH}.get(way, pieces.sum()) == pieces.sum()
    if way == "both":
        assert 0 < pieces.sum() < BATCH


def test_a_rectangle_has_the_part_that_was_drawn():
    """A step's rectangles, on average over many: 1 - w, less what lies beyond the edges."""
    mixing, side = Mixing(cutmix=1.0), 32
    ones, labels = torch.ones(200, side, side), torch.zeros(200, dtype=torch.int64)
    own, others = Images(ones, labels), Images(torch.zeros_like(ones), labels)
    images, _ = mixing.apply(own, others, step=0, first_row=0, num_labels=2)
    for image in images[:20]:
        rows, columns = (image == 0).any(1), (image == 0).any(0)
        assert torch.equal(image == 0, rows[:, None] & columns[None])  # one rectangle
    # Of a side of s = sqrt(1 - w), w uniform, s - s^2 / 4 lies within on average; squared.
    sides = torch.linspace(0, 1, 2001).sqrt()
    expected = (sides - sides.square() / 4).square().mean()
    assert (1 - images.mean()) == pytest.approx(float(expected), abs=0.04)


def test_weights_are_of_the_beta_distribution():
    """The variance of Beta(a, a) is 1 / (8 a + 4)."""
    ones, labels = torch.ones(400, 1, 1), torch.zeros(400, dtype=torch.int64)
    own, others = Images(ones, labels), Images(torch.zeros_like(ones), labels)
    for alpha in (0.2, 2.0):
        weight, _ = Mixing(mixup=alpha).apply(own, others, step=0, first_row=0, num_labels=1)
        assert weight.mean() == pytest.approx(0.5, abs=0.06)
        assert weight.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.2)


def test_nobody_is_mixed_with_itself():
    for step in range(20):
        rows = Mixing(mixup=1.0).partners(step=step, first_row=0, count=3, global_batch=3)
        assert sorted(rows.tolist()) == [0, 1, 2]
        assert (rows != torch.arange(3)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "mixup and cutmix are both 0: nothing would be mixed"),
        ({"mixup": -0.1}, "mixup is -0.1; give a number of 0 or more"),
        ({"cutmix": math.inf}, "cutmix is inf; give a number of 0 or more"),
        ({"mixup": 1.0, "smoothing": 1.0}, "smoothing is 1.0; give 0 or more, and less than 1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Mixing(**options)


def test_rows_that_are_refused():
    mixing = Mixing(mixup=1.0)
    with pytest.raises(ValueError, match="global_batch is 1: there is no other image"):
        mixing.partners(step=0, first_row=0, count=1, global_batch=1)
    with pytest.raises(ValueError, match="rows 6 to 13 are not all among the 12 of a step"):
        mixing.partners(step=0, first_row=6, count=8, global_batch=12)
    whole = batch()
    few = Images(whole.images[:3], whole.labels[:3])
    with pytest.raises(
        ValueError, match=r"own has images \[12, 3, 8, 6\] .* others \[3, 3, 8, 6\]"
    ):
        mixing.apply(whole, few, step=0, first_row=0, num_labels=LABELS)
