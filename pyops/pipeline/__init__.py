"""Pipeline parallelism: every schedule as data, proven before it runs, and simulated.

schedule("1f1b", num_stages=4, num_microbatches=16)     -> Schedule: what each rank computes, in its order
simulate(schedule, Costs(forward=1.0, latency=0.1))      -> Timeline: makespan, bubble, peak memory
Pipeline(layers, schedule=..., group=..., loss=...).step(batch, target)      -> the loss; gradients are in .grad
"""

from pyops.pipeline.action import Action
from pyops.pipeline.balance import balance
from pyops.pipeline.draw import draw, text, trace
from pyops.pipeline.names import NAMES, custom, schedule
from pyops.pipeline.orders import Transfer
from pyops.pipeline.pipeline import Pipeline
from pyops.pipeline.schedule import Schedule
from pyops.pipeline.simulate import Costs, Timeline, simulate

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "Pipeline",
    "Schedule",
    "Timeline",
    "Transfer",
    "balance",
    "custom",
    "draw",
    "schedule",
    "simulate",
    "text",
    "trace",
]
