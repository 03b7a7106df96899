"""Printed letters and digits, [n, 1, 8, 8]: the 62 of ASCII in the fonts that ship inside
matplotlib, each filling its image.

They are for a model that reads handwritten digits later to begin with: other images, of something
alike.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pyops.data.corpus import CorpusError
from pyops.data.images import Images, split

__all__ = ["CHARACTERS", "load_characters"]

CHARACTERS = string.digits + string.ascii_letters
SIDE = 8
# of a character before it is made smaller: some twelve points in each pixel, so edges become greys
POINTS = 96
_STYLES = {"DejaVuSans": "Oblique", "DejaVuSansMono": "Oblique", "DejaVuSerif": "Italic"}
FONTS = (
    *(
        family + style
        for family, slope in _STYLES.items()
        for style in ("", "-Bold", f"-{slope}", f"-Bold{slope}")
    ),
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)


def load_characters(*, held_out: float = 0.1) -> tuple[Images, Images]:
    """The images to train on, and those held out: that part of them, drawn once and for all,
    whatever the seed of a run. Labels are places in CHARACTERS.

    Raises:
        CorpusError: Where matplotlib, pillow or a font is not installed.
        ValueError: For a part that leaves nothing on either side.
    """
    try:
        import matplotlib
        from PIL import ImageFont
    except ModuleNotFoundError as error:
        what = "characters are drawn by pillow in the fonts of matplotlib"
        raise CorpusError(
            f"{what}; {error.name} is not installed: pip install matplotlib pillow"
        ) from error
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images = []
    for name in FONTS:
        try:
            font = ImageFont.truetype(str(folder / f"{name}.ttf"), POINTS)
        except (OSError, ImportError) as error:  # ImportError: a pillow without FreeType
            message = (
                f"the font {name}.ttf can't be read from {folder}; install matplotlib and "
                "pillow again"
            )
            raise CorpusError(message) from error
        images += [_image(font, character) for character in CHARACTERS]
    labels = torch.arange(len(CHARACTERS), device="cpu").repeat(len(FONTS))
    return split(Images(torch.stack(images), labels), held_out, name="characters")


def _image(font: object, character: str) -> Tensor:
    """[1, SIDE, SIDE]: its ink, in the middle of the smallest square that holds it, each pixel the
    mean of what it covers."""
    mask = font.getmask(character, mode="L")  # type: ignore[attr-defined]
    width, height = mask.size
    ink = torch.tensor(list(mask), dtype=torch.float32, device="cpu").view(height, width) / 255
    rows, columns = (torch.nonzero(ink.sum(dim=dim))[:, 0] for dim in (1, 0))
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = ink.shape
    side = max(height, width)
    left, top = (side - width) // 2, (side - height) // 2
    square = functional.pad(ink, (left, side - width - left, top, side - height - top))
    return 2 * functional.adaptive_avg_pool2d(square[None], SIDE) - 1
