"""Models as numbers: decoders of equal blocks, models of images, whose layers differ, and decoders
with experts, which are counted alone."""

from pyops.plan.shapes.decoder import ModelShape
from pyops.plan.shapes.experts import Experts, ExpertShape, LatentAttention, decoder_of_folder
from pyops.plan.shapes.images import ImageShape
from pyops.plan.shapes.numbers import PlanError, count

__all__ = [
    "ExpertShape",
    "Experts",
    "ImageShape",
    "LatentAttention",
    "ModelShape",
    "PlanError",
    "count",
    "decoder_of_folder",
]
