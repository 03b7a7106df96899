"""The k largest magnitudes of what all ranks hold, exactly k: by counts of bit patterns, and what
is equal to the smallest of them by its place.

    counts of the upper, then of the lower bits   two sums over the ranks   -> threshold T
    larger than T                                 all kept
    equal to T                                    of these as many as are missing, those that come
                                                  first: by the name, then in row-major order

A number's place is that in the whole parameter, so the choice is the same on any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyops.comm.agreement import agree
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.mesh import ProcessGroupLike, resolve
from pyops.ops.sparse.radix_count import BINS, Threshold
from pyops.ops.sparse.radix_count import kth_magnitude as kth_of_counts

__all__ = ["kth_magnitude", "kth_place"]

BITS = 16  # of a place that are counted at a time


def kth_magnitude(
    tensors: Sequence[Tensor], k: int, *, group: ProcessGroupLike = None
) -> Threshold:
    """The k-th largest |x| of all elements on all ranks: `torch.kthvalue` of the whole, which no
    rank has. Collective: every rank must call it.

    Args:
        tensors: This rank's, at least one, of fp32, bf16 or fp16, each dense; may have no elements.
            What several ranks have alike counts once for each.
        k: From 1 to the number of elements of all ranks, the same on every rank.
        group: The ranks; see `pyops.mesh.resolve`.

    Raises:
        ValueError: On every rank alike: k is out of range, no tensor, or a nan.
    """
    ranks = resolve(group, "kth_magnitude")
    if ranks is None or ranks.size() == 1:
        return kth_of_counts(tensors, k)
    problem = None if tensors else ValueError("kth_magnitude needs at least one tensor, got none")
    agree(problem, group=group)
    communicator = Communicator.of(group)
    return kth_of_counts(
        tensors,
        k,
        reduce=lambda counts: all_reduce(
            counts, communicator=communicator, op="sum", label="counts of magnitudes"
        ),
    )


def kth_place(
    places: Sequence[Tensor],
    k: int,
    *,
    total: int,
    device: torch.device,
    reduce: Callable[[Tensor], object] | None = None,
) -> int:
    """The k-th smallest of whole numbers that ranks hold, all different.

    Args:
        places: int64, flat, from 0 to `total` - 1.
        k: From 1 to how many there are on all ranks.
        total: A number above them all.
        device: Where counts are made.
        reduce: Sums an int64 tensor over the ranks, in place.
    """
    found, left = 0, list(places)
    levels = max(1, -(-max(total - 1, 1).bit_length() // BITS))
    for level in reversed(range(levels)):
        counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        digits = [(each >> (BITS * level)) & (BINS - 1) for each in left]
        for digit in digits:
            counts += torch.bincount(digit, minlength=BINS)
        if reduce is not None:
            reduce(counts)
        up = counts.cumsum(0).cpu()
        here = int(torch.searchsorted(up, torch.tensor(k, device="cpu")))
        k -= int(up[here - 1]) if here else 0
        found = found << BITS | here
        left = [each[digit == here] for each, digit in zip(left, digits, strict=True)]
    return found
