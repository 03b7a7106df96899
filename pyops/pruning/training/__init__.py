"""Training a model whose pruned weights stay 0: masks held, made along a schedule, or rewound."""

from pyops.pruning.training.gradual import Gradual, gradual
from pyops.pruning.training.holding import Hold, hold
from pyops.pruning.training.lottery import LotteryConfig, Ticket, lottery, rate_of
from pyops.pruning.training.schedule import CubicSchedule

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
