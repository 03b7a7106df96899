"""The 1,797 images of handwritten digits that ship inside scikit-learn, [n, 1, 8, 8], with labels 0
to 9.

(Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998: the images of its test
part.)
"""

from __future__ import annotations

import torch

from pyops.data.corpus import CorpusError
from pyops.data.images import Images, split

__all__ = ["load_digits"]


def load_digits(*, held_out: float = 0.5) -> tuple[Images, Images]:
    """The images to train on, and those held out: that part of them, drawn once and for all,
    whatever the seed of a run.

    Raises:
        CorpusError: Where scikit-learn is not installed.
        ValueError: For a part that leaves nothing on either side.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        message = (
            "the digits images are in the package scikit-learn, which is not installed: pip "
            "install scikit-learn"
        )
        raise CorpusError(message) from error
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    return split(Images(images, torch.from_numpy(found.target).long()), held_out, name="digits")
