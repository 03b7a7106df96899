"""N of M by magnitude: of each M consecutive numbers along a dimension, the N largest stay.

    w        0.3  -0.9   0.1   0.5 |  -2   1   -2   2        2 of 4, ties to the lower index
    masked    0   -0.9    0    0.5 |  -2   0   -2   0
    bits      0     1     0     1  |   1   0    1   0        bit i % 8 of byte i // 8

(Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", 2021.)
Magnitudes are compared as bit patterns, so that every kernel gives the same bits; -0 equals 0, and
a nan is larger than any number.

Bytes per element of fp32: 8 and a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers.activation import FLOATS
from pyops.ops.library import define

__all__ = ["MOST", "check", "nm_mask", "nm_mask_reference"]

MOST = 32
"""M, at most."""


def nm_mask(w: Tensor, n: int, m: int, *, dim: int = 1) -> tuple[Tensor, Tensor]:
    """The n largest of each m consecutive numbers of `dim` by magnitude, and bits that say which.

    Args:
        w: fp32, bf16, fp16 or float64, of any shape; of a convolution's kernel dim 1 are its input
            channels, for each position.
        n: how many stay, 1 to m.
        m: of how many, at most 32; it divides the size of `dim`.
        dim: the dimension along which groups lie; from the last one where it is negative.

    Returns:
        (masked, bits): w with 0 in place of what does not stay, contiguous; uint8
        [ceil(w.numel() / 8)], element i of row-major order in bit i % 8 of byte i // 8.

    Raises:
        ValueError: for n and m that are no pattern, and a size that m does not divide.
        TypeError: for other dtypes.
    """
    dim = dim + w.dim() if dim < 0 else dim
    check(w, n, m, dim)
    found: tuple[Tensor, Tensor] = torch.ops.pyops.nm_mask.default(w, n=n, m=m, dim=dim)
    return found


def check(w: Tensor, n: int, m: int, dim: int) -> None:
    """Raise ValueError or TypeError unless `w` can have n of each m along `dim`, 0 or more."""
    if w.dtype not in FLOATS:
        raise TypeError(
            f"nm_mask: w must be float32, bfloat16, float16 or float64; got {w.dtype}: prune "
            "before quantizing"
        )
    if not 1 <= n <= m <= MOST:
        raise ValueError(f"nm_mask: n of m must be 1 <= n <= m <= {MOST}; got {n} of {m}")
    if not 0 <= dim < w.dim():
        raise ValueError(f"nm_mask: dim must be one of {list(w.shape)}; got {dim}")
    if w.shape[dim] % m:
        raise ValueError(
            f"nm_mask: dim {dim} of {list(w.shape)} must be a multiple of m = {m}, so that groups "
            f"are whole; leave the tensor out, or make it {-(-w.shape[dim] // m) * m} wide"
        )


def nm_mask_reference(w: Tensor, *, n: int, m: int, dim: int) -> tuple[Tensor, Tensor]:
    """The op in plain torch: how many of its group beat each number."""
    check(w, n, m, dim)
    x = w.detach().contiguous()
    groups = x.unflatten(dim, (-1, m)).movedim(dim + 1, -1)
    key = _keys(groups)
    beaten = torch.zeros_like(key, dtype=torch.int32)
    for j in range(m):
        other = key[..., j : j + 1]
        beaten[..., :j] += other > key[..., :j]
        beaten[..., j + 1 :] += other >= key[..., j + 1 :]
    kept = (beaten < n).movedim(-1, dim + 1).flatten(dim, dim + 1).contiguous()
    flags = functional.pad(kept.flatten().to(torch.uint8), (0, -kept.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=w.device)
    bits = (flags << places).sum(1, dtype=torch.uint8)
    return torch.where(kept, x, torch.zeros_like(x)), bits


def _keys(x: Tensor) -> Tensor:
    """Bit patterns of magnitudes, whole numbers that order as these do."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(whole) & torch.iinfo(whole).max


def _fake(w: Tensor, *, n: int, m: int, dim: int) -> tuple[Tensor, Tensor]:
    masked = torch.empty_like(w, memory_format=torch.contiguous_format)
    return masked, w.new_empty((w.numel() + 7) // 8, dtype=torch.uint8)


define(
    "nm_mask(Tensor w, *, int n, int m, int dim) -> (Tensor, Tensor)",
    reference=nm_mask_reference,
    fake=_fake,
    triton="sparse.nm_mask",
)
