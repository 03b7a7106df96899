"""The 1,797 images of handwritten digits that ship inside scikit-learn, in two parts, and what moves them about.

    images [n, 1, 8, 8]    -1 paper ... 1 ink            labels 0 ... 9
    variants               turned by 0, 90, 180, 270 degrees x shifted by -reach ... reach pixels down and to the right

(Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998: the images of its test part.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops import random
from pyops.data.corpus import CorpusError

__all__ = ["Digits", "load_digits", "variants"]

PAPER = -1.0


class Digits(NamedTuple):
    """images: [n, 1, 8, 8] fp32, -1 to 1. labels: int64 [n], 0 to 9."""

    images: Tensor
    labels: Tensor


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
    cut = max(1, min(len(labels) - 1, round(len(labels) * (1 - held_out))))
    parts = [Digits(images[some].contiguous(), labels[some].contiguous()) for some in (order[:cut], order[cut:])]
    return parts[0], parts[1]


def variants(images: Tensor, *, turns: int = 1, reach: int = 0) -> Tensor:
    """images [n, C, S, S] -> [n, V, C, S, S], V = turns (2 reach + 1)^2: number 0 turned least and shifted up and left most.

    turns: by how many quarters of a circle less one, 1 to 4. What is shifted out is lost, what comes in is paper. ValueError
    for a reach of the image's side or more.
    """
    side = images.shape[-1]
    if not 1 <= turns <= 4 or not 0 <= reach < side:
        raise ValueError(
            f"turns is {turns}, reach {reach}; they must be 1 to 4, and 0 to {side - 1}, less than the image's side"
        )
    found = []
    for quarter in range(turns):
        wide = functional.pad(torch.rot90(images, quarter, dims=(-2, -1)), (reach,) * 4, value=PAPER)
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                found.append(wide[..., reach - down : reach - down + side, reach - right : reach - right + side])
    return torch.stack(found, dim=1)
