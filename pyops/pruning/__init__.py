"""Pruning: a model most of whose weights are 0, and stay so while it is trained.

masks = magnitude(model, 0.9, scope="global")    the smallest go; one bit for each weight
with hold(masks, optimizer): ...                 what is pruned stays 0, to the bit
schedule = CubicSchedule(final=0.9, begin=100, every=20, times=40)
with gradual(model, optimizer, schedule) as pruner: ...          a little more every 20 steps
for ticket in lottery(make, train, LotteryConfig(rounds=8, rate=0.4)): ...    rewinding
permuted = permute(model)                        channels reordered, so that 2:4 keeps more
masks = nm_masks(model, NM(2, 4))                prune once: 2 of each 4 inputs
with sparse_training(model) as sparse: ...       2:4 from the start: SR-STE
save(model, folder, form="2:4")                  and load(model, folder), on any number of ranks
print(report(model))                             sparsity and bytes of each parameter

| file | what it does |
|---|---|
| masks.py | which weights are alive |
| ranking/ | the k largest of all ranks, exactly; whole rows and columns |
| packed.py | masks in checkpoints |
| training/ | masks held in the step; the gradual schedule; lottery tickets |
| nm.py, straight_through.py | N of each M: once, and from the start |
| permutation.py, symmetries.py | the order of channels, and which ones move together |
| saving.py | files of pruned models |
| sparsity_report.py | sparsity and bytes |
"""

from pyops.ops.sparse.radix_count import Threshold
from pyops.pruning.masks import Mask, Masks, masks_of, pack_bits, unpack_bits
from pyops.pruning.nm import NM, nm_masks
from pyops.pruning.packed import masks_from_state, masks_state
from pyops.pruning.permutation import Gain, Permuted, permute
from pyops.pruning.ranking import Structure, kth_magnitude, magnitude
from pyops.pruning.saving import Loaded, form_bytes, load, save, to_semi_structured
from pyops.pruning.sparsity_report import PrunedLayer, PruningReport, report
from pyops.pruning.straight_through import SparseTraining, sparse_training, sparse_weight
from pyops.pruning.symmetries import channel_sets, inverse, rearrange
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
    "NM",
    "CubicSchedule",
    "Gain",
    "Gradual",
    "Hold",
    "Loaded",
    "LotteryConfig",
    "Mask",
    "Masks",
    "Permuted",
    "PrunedLayer",
    "PruningReport",
    "SparseTraining",
    "Structure",
    "Threshold",
    "Ticket",
    "channel_sets",
    "form_bytes",
    "gradual",
    "hold",
    "inverse",
    "kth_magnitude",
    "load",
    "lottery",
    "magnitude",
    "masks_from_state",
    "masks_of",
    "masks_state",
    "nm_masks",
    "pack_bits",
    "permute",
    "rate_of",
    "rearrange",
    "report",
    "save",
    "sparse_training",
    "sparse_weight",
    "to_semi_structured",
    "unpack_bits",
]
