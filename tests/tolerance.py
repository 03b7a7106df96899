"""The one rule by which a 16- or 32-bit result is judged: no worse than twice plain torch, both
against float64."""

from __future__ import annotations

import torch

__all__ = ["assert_close_to_reference"]


def assert_close_to_reference(
    actual: torch.Tensor,
    plain: torch.Tensor,
    reference: torch.Tensor,
    *,
    tiny: float | torch.Tensor | None = None,
) -> None:
    """Assert `|actual - reference| <= 2 |plain - reference| + tiny`, element by element.

    `plain` is plain torch's result in the dtype of `actual`; `reference` the same computation in
    float64. `tiny`
    allows for one rounding where plain torch happens to be exact: by default one unit in the last
    place of the dtype
    at the element's own size. A result that is not finite must be so in the same places as the
    reference.
    """
    assert actual.shape == plain.shape == reference.shape, (
        actual.shape,
        plain.shape,
        reference.shape,
    )
    assert reference.dtype == torch.float64, "the reference is computed in float64"
    actual64, plain64 = actual.detach().double().cpu(), plain.detach().double().cpu()
    reference = reference.detach().cpu()
    finite = reference.isfinite()
    assert torch.equal(actual64.isfinite(), finite), "finite in other places than the reference"
    eps = torch.finfo(actual.dtype).eps if actual.dtype.is_floating_point else 0.0
    tiny = (
        eps * reference.abs()
        if tiny is None
        else tiny.cpu()
        if isinstance(tiny, torch.Tensor)
        else tiny
    )
    allowed = 2 * (plain64 - reference).abs() + tiny
    error = (actual64 - reference).abs()
    wrong = (error > allowed) & finite
    if wrong.any():
        excess = torch.where(wrong, error - allowed, torch.zeros_like(error))
        worst = int(excess.flatten().argmax())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are off; worst at flat index {worst}: "
            f"got {actual64.flatten()[worst]:.9g}, plain torch {plain64.flatten()[worst]:.9g}, "
            f"float64 {reference.flatten()[worst]:.9g}"
        )
