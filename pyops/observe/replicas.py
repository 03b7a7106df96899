"""Replicas that should be equal bit for bit, compared by a digest of each tensor: the odd rank is
named.

    rank 0   w: 7f31...  b: 02ab...   --.
    rank 1   w: 7f31...  b: 02ab...   --+-- all_gather, 8 bytes a tensor  ->  "rank 2: w"
    rank 2   w: 90c4...  b: 02ab...   --'

Hardware that computes wrong now and then says nothing by itself; state that is there more than once
tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import naming_lost_ranks
from pyops.mesh import ProcessGroupLike, resolve

__all__ = ["OddReplica", "compare_replicas", "digest"]

CHUNK = 1 << 20  # elements that are looked at together: bounds the memory that it takes
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class OddReplica:
    """Ranks whose values of a tensor differ from those of most."""

    name: str
    """Of the tensor."""
    ranks: tuple[int, ...]
    """Counted among all; of two that differ, both."""


def digest(tensor: Tensor) -> Tensor:
    """A number of the tensor's bits: int64 [], on its device. A single bit that differs, or two
    elements that change places, give another one.

    Args:
        tensor: Of any dtype and shape.
    """
    flat = tensor.detach().contiguous().view(-1)
    raw = flat.view(torch.uint8)
    if raw.numel() % 8 == 0 and raw.numel() and raw.data_ptr() % 8 == 0:
        raw = raw.view(torch.int64)
    elif raw.numel() % 4 == 0 and raw.numel():
        raw = raw.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, raw.numel(), CHUNK):
        part = raw[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(part), device=tensor.device)
        weights = (place * MULTIPLIER) | 1  # odd, so that no bit is lost
        total += (part * weights).sum() + part.sum()
    return total


def compare_replicas(
    tensors: Mapping[str, Tensor], *, group: ProcessGroupLike = None
) -> list[OddReplica]:
    """The tensors that not all ranks have the same bits of; the same list on every rank.
    Collective: every rank must call it, with tensors of the same names.

    Args:
        tensors: By name.
        group: The ranks that should be equal; see `pyops.mesh.resolve`. One process is equal to
            itself.

    Raises:
        CommunicationError: A rank is lost; the error names it.
    """
    ranks = resolve(group, "replicas that are compared")
    if ranks is None or ranks.size() == 1 or not tensors:
        return []
    names = list(tensors)
    own = torch.stack([digest(tensors[name]) for name in names])
    everyone = [torch.empty_like(own) for _ in range(ranks.size())]
    with naming_lost_ranks("comparing replicas", group=ranks):
        dist.all_gather(everyone, own, group=ranks)
    members = dist.get_process_group_ranks(ranks)
    found = []
    for name, values in zip(names, torch.stack(everyone).T.tolist(), strict=True):
        counts = Counter(values)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        clear = times > len(values) / 2
        odd = [m for m, v in zip(members, values, strict=True) if not clear or v != usual]
        found.append(OddReplica(name, tuple(odd)))
    return found
