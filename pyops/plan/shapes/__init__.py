"""Models as numbers: decoders of equal blocks, and models of images, whose layers differ."""

from pyops.plan.shapes.decoder import ModelShape
from pyops.plan.shapes.images import ImageShape
from pyops.plan.shapes.numbers import PlanError, count

__all__ = ["ImageShape", "ModelShape", "PlanError", "count"]
