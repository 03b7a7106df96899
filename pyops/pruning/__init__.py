"""Pruning: a model most of whose weights are 0, and stay so while it is trained.

masks = Masks(model, {"fc.weight": alive})       one bit for each weight; what is not alive is 0
"""

from pyops.pruning.masks import Mask, Masks, masks_of, pack_bits, unpack_bits

__all__ = ["Mask", "Masks", "masks_of", "pack_bits", "unpack_bits"]
