"""Tensors as nobody expects them, made from an ordinary one; a test puts each in an argument's
place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ODD", "WITHOUT_MEMORY", "bits_of"]


def _expanded(t: Tensor) -> Tensor:
    return t.reshape(-1)[:1].clone().expand(t.shape) if t.numel() else t.clone()


def _overlapping(t: Tensor) -> Tensor:
    """Windows of one stretch of memory that share elements."""
    room = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    room[: t.numel()] = t.reshape(-1)
    return room.as_strided(t.shape, [1] * t.dim())


def _resized(t: Tensor, kept: int, *, offset: int = 0) -> Tensor:
    """A copy whose storage keeps so many bytes."""
    room = torch.zeros(t.numel() + offset, dtype=t.dtype, device=t.device)
    copy = room[offset:].view(t.shape)
    room.untyped_storage().resize_(kept)
    return copy


def _strided(t: Tensor) -> Tensor:
    """A copy with gaps between its elements."""
    return torch.stack([t, t], dim=-1)[..., 0]


def _integers(t: Tensor) -> Tensor:
    return (t * 3).to(torch.int32)


def _imaginary(t: Tensor) -> Tensor:
    """The imaginary part of a conjugate, which torch keeps as a view whose sign is still to be
    taken."""
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"there is no complex number of {t.dtype}")
    return torch.complex(torch.zeros_like(t), -t).conj().imag


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda t: t.new_empty(0),
    "0-dim": lambda t: t.new_ones(()),
    "one dimension more": lambda t: t.clone().unsqueeze(0),
    "expanded": _expanded,
    "overlapping": _overlapping,
    "with gaps": _strided,
    "sparse": lambda t: t.to_sparse(),
    "complex": lambda t: t.to(torch.complex64),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "imaginary part": _imaginary,
    "negative view": lambda t: torch._neg_view(t.clone()),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "meta": lambda t: t.to("meta"),
    "emptied": lambda t: _resized(t, 0),
    "emptied, with an offset": lambda t: _resized(t, 0, offset=3),
    "too short": lambda t: _resized(t, max(0, t.numel() * t.element_size() - 1)),
    "fp64": lambda t: t.double(),
    "integers": _integers,
    "leaf": lambda t: t.clone().requires_grad_(t.is_floating_point()),
}
WITHOUT_MEMORY = ("emptied", "emptied, with an offset", "too short")  # nothing but an error will do


def bits_of(t: Tensor) -> Tensor | None:
    """A copy of a tensor's bytes, None where it has none that can be read."""
    if t.layout != torch.strided or t.is_meta or t._is_zerotensor() or not t.numel():
        return None
    last = (
        t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    )
    storage = t.untyped_storage()
    if storage.nbytes() < last * t.element_size():
        return None
    return torch.tensor([], dtype=torch.uint8).set_(storage).clone()
