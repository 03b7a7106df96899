"""storages: the memory of the tensors of this process."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

__all__ = ["storages"]


def storages(*, floating_point: bool = False) -> dict[int, int]:
    """Bytes by address of every storage that a tensor of this process keeps alive.

    Subclasses with a dispatch of their own (fake tensors, reduced gradients of ZeRO) and functional
    tensors of a trace own no memory, and are left out.

    Args:
        floating_point: Count those of floating-point numbers alone.
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    found = [
        each.untyped_storage()
        for each in tensors
        if type(each).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch._is_functional_tensor(each)
        and (each.is_floating_point() or not floating_point)
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in found}
