"""Pruning: a model most of whose weights are 0, and stay so while it is trained.

masks = magnitude(model, 0.9, scope="global")    the smallest go; one bit for each weight
with hold(masks, optimizer): ...                 what is pruned stays 0, to the bit
schedule = CubicSchedule(final=0.9, begin=100, every=20, times=40)
with gradual(model, optimizer, schedule) as pruner: ...          a little more every 20 steps
for ticket in lottery(make, train, LotteryConfig(rounds=8, rate=0.4)): ...    rewinding
print(report(model))                             sparsity and bytes of each parameter

| file | what it does |
|---|---|
| masks.py | which weights are alive |
| ranking/ | the k largest of all ranks, exactly; whole rows and columns |
| packed.py | masks in checkpoints |
| training/ | masks held in the step; the gradual schedule; lottery tickets |
| sparsity_report.py | sparsity and bytes |
"""

from pyops.ops.sparse.radix_count import Threshold
from pyops.pruning.masks import Mask, Masks, masks_of, pack_bits, unpack_bits
from pyops.pruning.packed import masks_from_state, masks_state
from pyops.pruning.ranking import Structure, kth_magnitude, magnitude
from pyops.pruning.sparsity_report import PrunedLayer, PruningReport, report
from pyops.pruning.training import (
    CubicSchedule,
    Gradual,
    Hold,
    LotteryConfig,
    Ticket,
    gradual,
    hold,
    lottery,
    rate_of,
)

__all__ = [
    "CubicSchedule",
    "Gradual",
    "Hold",
    "LotteryConfig",
    "Mask",
    "Masks",
    "PrunedLayer",
    "PruningReport",
    "Structure",
    "Threshold",
    "Ticket",
    "gradual",
    "hold",
    "kth_magnitude",
    "lottery",
    "magnitude",
    "masks_from_state",
    "masks_of",
    "masks_state",
    "pack_bits",
    "rate_of",
    "report",
    "unpack_bits",
]
