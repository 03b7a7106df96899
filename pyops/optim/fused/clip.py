"""One device scalar that holds all that is done to gradients before the step: unscaling and
clipping.

    squared norm of each group's gradients (one pass) -> sum [-> sum over ranks] -> norm
            -> factor, skip or not

Nothing is read back to the host. The clipping is torch.nn.utils.clip_grad_norm_'s: max_norm / (norm
+ 1e-6), at most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.ops.optimizers.grad_norm import CLIP_EPSILON

__all__ = ["Factor", "gradient_factor"]


class Factor(NamedTuple):
    """factor: float32 scalar to multiply gradients by, None for 1. found_inf: float32 scalar, not
    0: skip the step.
    norm: float32 scalar, the norm of the unscaled gradients before clipping, None when it was not
    asked for."""

    factor: Tensor | None
    found_inf: Tensor | None
    norm: Tensor | None


def gradient_factor(
    squared_norms: Sequence[Tensor],
    *,
    max_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    device: torch.device,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Factor:
    """The factor of this step.

    Args:
        squared_norms: float64 [2] tensors (sum of squares, count of non-finite elements) of
            disjoint sets of gradients.
        grad_scale: what the loss was multiplied by.
        reduce: makes a local float64 [2] sum a global one, and is called whether or not there are
            gradients here, because other ranks may be waiting.
    """
    inverse = (
        None if grad_scale is None else grad_scale.to(device).double().reciprocal().reshape(())
    )
    if found_inf is not None:
        found_inf = found_inf.to(device).float().reshape(())
    if max_norm is None:
        return Factor(None if inverse is None else inverse.float(), found_inf, None)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for squared in squared_norms:
        total = total + squared.to(device)
    if reduce is not None:
        total = reduce(total)
    norm = total[0].sqrt() if inverse is None else total[0].sqrt() * inverse
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    if inverse is not None:
        factor = factor * inverse
    skip = (total[1] != 0) | ~norm.isfinite()
    if found_inf is not None:
        skip = skip | (found_inf != 0)
    return Factor(factor.float(), skip.float(), norm.float())
