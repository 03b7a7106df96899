"""Pruning: a model most of whose weights are 0, and stay so while it is trained.

masks = Masks(model, {"fc.weight": alive})       one bit for each weight; what is not alive is 0
permuted = permute(model)                        channels reordered, so that 2:4 keeps more
masks = nm_masks(model, NM(2, 4))                prune once: 2 of each 4 inputs
with sparse_training(model) as sparse: ...       2:4 from the start: SR-STE
save(model, folder, form="2:4")                  and load(model, folder), on any number of ranks
"""

from pyops.pruning.masks import Mask, Masks, masks_of, pack_bits, unpack_bits
from pyops.pruning.nm import NM, nm_masks
from pyops.pruning.permutation import Gain, Permuted, permute
from pyops.pruning.saving import Loaded, form_bytes, load, save, to_semi_structured
from pyops.pruning.straight_through import SparseTraining, sparse_training, sparse_weight
from pyops.pruning.symmetries import channel_sets, inverse, rearrange

__all__ = [
    "NM",
    "Gain",
    "Loaded",
    "Mask",
    "Masks",
    "Permuted",
    "SparseTraining",
    "channel_sets",
    "form_bytes",
    "inverse",
    "load",
    "masks_of",
    "nm_masks",
    "pack_bits",
    "permute",
    "rearrange",
    "save",
    "sparse_training",
    "sparse_weight",
    "to_semi_structured",
    "unpack_bits",
]
