"""Products that are fused with their collective over GPUs' symmetric memory: torch's own kernels,
where the group has that.

    gathered_products    x of this rank -> gather | x W^T part by part, as the parts come
                         (column-parallel forward, row-parallel backward)
    scattered_product    x W^T -> sum over ranks, part by part, as they are ready
                         (row-parallel forward, column-parallel backward)

They are taken under sequence parallelism, for large products, by groups whose ranks can map each
other's memory: tried once for a group, at its first large product, and taken when all ranks can. A
product is computed in parts and its sum over ranks made in the dtype of
the result, so the bits differ from those without: sums of 16-bit parts are left to layers with
reduce="native".
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.torch_private import symmetric_empty_tensor, symmetric_rendezvous

__all__ = ["LEAST", "fuses", "gathered_products", "scattered_product"]

# Elements of the gathered tensor: below, starting the parts takes longer than the overlap saves.
LEAST = 1 << 22


def fuses(x: Tensor, ranks: Ranks, *, rows: int) -> bool:
    """Whether products of x [.., k] are fused, the same on every rank.

    Args:
        rows: Those of all ranks together, gathered.
    """
    if not x.is_cuda or ranks.size == 1 or torch.compiler.is_compiling():
        return False
    if rows % ranks.size or rows * x.shape[-1] < LEAST:
        return False
    return shares_memory(ranks.process_group, x.device)


# What was found, as long as the group lives.
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def shares_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of the group can map each other's memory. A collective at a group's first
    call: no rank maps where one can't, and none takes what others do not."""
    if group not in _found:
        memory = error = None
        try:
            memory = symmetric_empty_tensor(16, dtype=torch.uint8, device=device)
        except Exception as caught:  # of any kind: these names of torch are private
            error = caught
        if _all(error is None, group, device):
            try:
                assert memory is not None
                symmetric_rendezvous(memory, group)
            except Exception as caught:
                error = caught
            _found[group] = _all(error is None, group, device)
        else:
            _found[group] = False
    return _found[group]


def _all(holds: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    held = torch.tensor(int(holds), dtype=torch.int32, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN, group=group)
    return bool(held.item())


def gathered_products(
    x: Tensor, matrices: Sequence[Tensor], ranks: Ranks
) -> tuple[Tensor, list[Tensor]]:
    """x [n, k] of every rank, gathered: [ranks * n, k]; and its product with each matrix [k, m]."""
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x, list(matrices), 0, ranks.process_group.group_name
    )
    return whole, list(products)


def scattered_product(x: Tensor, matrix: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of the ranks' sum of x [ranks * n, k] times matrix [k, m]: [n, m]."""
    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, matrix, "sum", 0, ranks.process_group.group_name
    )
    return found
