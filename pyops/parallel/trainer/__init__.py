"""Trainer: a model that was shared out by a plan, trained, evaluated, saved and read back as if it
were in one place."""

from pyops.parallel.trainer.trainer import Trainer
from pyops.parallel.trainer.trainer_parts import TrainerParts

__all__ = ["Trainer", "TrainerParts"]
