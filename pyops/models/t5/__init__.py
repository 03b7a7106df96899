"""T5: an encoder and a decoder with relative positions."""

from pyops.models.t5.config import T5Config
from pyops.models.t5.model import T5

__all__ = ["T5", "T5Config"]
