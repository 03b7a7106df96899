"""fingerprint: what tells one base from another, the same on any layout of the ranks and in any
floating dtype.

    sum over all elements of  bits(value rounded to bf16) * (2 i + 1)   mod 2^64,   i its place in
                                                                        the whole parameter

Ranks sum their parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.ops.memory import require_memory
from pyops.quantized import QuantizedLinear
from pyops.tensor_parallel import Ranks

__all__ = ["fingerprint"]

CHUNK = 1 << 20  # elements that are looked at together


@torch.no_grad()
def fingerprint(model: nn.Module, *, group: Ranks) -> str:
    """16 hex digits of a model's parameters that belong to no adapter, and of the codes of
    quantized layers: names, shapes, values. A collective.

    Args:
        model: What is merged into it counts.
        group: The ranks that share its layers.

    Raises:
        ValueError: For a parameter that has no memory here, as ZeRO stage 3 leaves it.
    """
    sums, names = [], []
    for name, held, place in _held(model):
        place = place or Placement.whole(held.shape, rank=group.rank, ranks=group.size)
        require_memory(held, name)
        names.append(f"{name} {place.global_shape}")
        sums.append(_sum(held, place) if place.first else 0)
    total = torch.tensor(sums, dtype=torch.int64)
    if group.size > 1:
        device = next(model.parameters()).device
        total = group.sum_(total.to(device)).wait().cpu()
    text = "\n".join(f"{name} {value}" for name, value in zip(names, total.tolist(), strict=True))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor, Placement | None]]:
    """Parameters that belong to no adapter, and the codes of quantized layers, with their
    placements."""
    placements = Placement.of(model)
    for name, parameter in model.named_parameters():
        if ".adapter." not in f".{name}.":
            yield name, parameter, placements.get(name)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            for key in ("codes", "scales", "zero_points"):
                if (codes := getattr(module, key)) is not None:
                    yield f"{name}.{key}", codes, module.code_placements.get(key)


def _sum(parameter: Tensor, place: Placement) -> int:
    """Of this rank's part, as a signed number of 64 bits."""
    part = place.part(parameter.detach())
    rows = part.reshape(-1, part.shape[-1]) if part.dim() > 1 else part.reshape(1, -1)
    width = place.global_shape[-1] if place.global_shape else 1
    first = place.offset[-1] if place.offset else 0
    columns = torch.arange(first, first + rows.shape[1], device=rows.device)
    starts = _row_starts(place, part, rows.device) * width
    total = 0
    step = max(1, CHUNK // max(rows.shape[1], 1))
    for at in range(0, len(rows), step):
        index = starts[at : at + step, None] + columns
        bits = rows[at : at + step].to(torch.bfloat16).view(torch.int16).long()
        total += int((bits * (2 * index + 1)).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _row_starts(place: Placement, part: Tensor, device: torch.device) -> Tensor:
    """The number of each row of a part among the rows of the whole."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    shape = place.global_shape[:-1]
    for size, offset, length in zip(shape, place.offset, part.shape, strict=False):
        found = (found[:, None] * size + torch.arange(offset, offset + length, device=device)).view(
            -1
        )
    return found
