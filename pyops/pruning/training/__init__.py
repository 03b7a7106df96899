"""Training a model whose pruned weights stay 0: masks held, made along a schedule, or rewound."""

from pyops.pruning.training.along_schedule import Gradual, gradual
from pyops.pruning.training.holding import Hold, hold
from pyops.pruning.training.schedule import CubicSchedule
from pyops.pruning.training.tickets import LotteryConfig, Ticket, lottery, rate_of

__all__ = [
    "CubicSchedule",
    "Gradual",
    "Hold",
    "LotteryConfig",
    "Ticket",
    "gradual",
    "hold",
    "lottery",
    "rate_of",
]
