"""The 1,797 images of handwritten digits that ship inside scikit-learn, [n, 1, 8, 8], with labels 0
to 9.

(Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998: the images of its test
part.)
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import torch

from pyops.data.corpus import CorpusError
from pyops.data.images import Images, split

__all__ = ["load_digits"]

FILE = "datasets/data/digits.csv.gz"  # inside the package sklearn


def load_digits(*, held_out: float = 0.5) -> tuple[Images, Images]:
    """The images to train on, and those held out: that part of them, drawn once and for all,
    whatever the seed of a run.

    Raises:
        CorpusError: Where scikit-learn is not installed.
        ValueError: For a part that leaves nothing on either side.
    """
    rows = _rows()
    images = rows[:, :-1].reshape(-1, 8, 8).float()[:, None] / 8 - 1
    return split(Images(images, rows[:, -1].clone()), held_out, name="digits")


def _rows() -> torch.Tensor:
    """[n, 65] int64: 64 pixels of 0 to 16, and the label.

    The file is read as it lies in the package: to import scikit-learn, and scipy with it, takes
    each process of a run about a second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None:
        message = (
            "the digits images are in the package scikit-learn, which is not installed: pip "
            "install scikit-learn"
        )
        raise CorpusError(message) from ModuleNotFoundError(message, name="sklearn")
    for folder in found.submodule_search_locations or ():
        file = Path(folder) / FILE
        if file.exists():
            lines = gzip.decompress(file.read_bytes()).split()
            return torch.tensor([[int(x) for x in line.split(b",")] for line in lines])
    from sklearn import datasets  # a release that keeps the file elsewhere

    bunch = datasets.load_digits()
    pixels, labels = (torch.from_numpy(x).long() for x in (bunch.data, bunch.target))
    return torch.cat([pixels, labels[:, None]], dim=1)
