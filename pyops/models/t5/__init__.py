"""T5: an encoder and a decoder with relative positions."""

from pyops.models.t5.model import T5, T5Config

__all__ = ["T5", "T5Config"]
