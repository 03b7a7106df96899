"""Products that are fused with their collective over GPUs' symmetric memory: torch's own kernels,
where the group has that.

    gathered_products    x of this rank -> gather | x W^T part by part, as the parts come
                         (column-parallel forward, row-parallel backward)
    scattered_product    x W^T -> sum over ranks, part by part, as they are ready
                         (row-parallel forward, column-parallel backward)

They are taken under sequence parallelism, for large products, by groups for which symmetric memory
was enabled with torch.distributed._symmetric_memory.enable_symm_mem_for_group(group.group_name);
nothing is enabled here. A product is computed in parts and its sum over ranks made in the dtype of
the result, so the bits differ from those without: sums of 16-bit parts are left to layers with
reduce="native".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.torch_private import has_symmetric_memory

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
    return has_symmetric_memory(ranks.process_group)


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
