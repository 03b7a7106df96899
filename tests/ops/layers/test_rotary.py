"""rotary: values against float64 at every layout, the turn back, and the relative positions it is
for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.layers.rotary import rotary
from tests.tolerance import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tables(
    T: int, R: int, device: torch.device, *, batch: int | None = None
) -> tuple[Tensor, Tensor]:
    frequency = 100.0 ** (-torch.arange(0, R, 2, device=device) / R)
    position = (
        torch.arange(T, device=device)
        if batch is None
        else torch.randint(0, 50, (batch, T), device=device)
    )
    angle = position[..., None] * frequency
    return angle.cos(), angle.sin()


def plain(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """As the formula stands, pair by pair."""
    half, y = cos.shape[-1], x.clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (t[..., i].unsqueeze(-1).to(x.dtype) for t in (cos, sin))
        a, b = x[..., first].clone(), x[..., second].clone()
        y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_twice_plain_torch(
    dtype: torch.dtype, interleaved: bool, device: torch.device, isa: str
):
    for B, T, H, K, R, batched in (
        (2, 3, 5, 12, 8, True),
        (1, 4, 2, 70, 70, False),
        (2, 40, 8, 64, 64, False),
        (1, 1, 1, 3, 2, True),
    ):
        cos, sin = tables(T, R, device, batch=B if batched else None)
        x, dy = (torch.randn(B, T, H, K, device=device).to(dtype) for _ in range(2))
        layouts = (
            x,
            x.transpose(1, 2).contiguous().transpose(1, 2),
            torch.stack([x, x], dim=-1)[..., 0],
        )
        assert [t.is_contiguous() for t in layouts][1:] == [T == 1 or H == 1, False]
        exact, torchs = (
            plain(x.to(d), cos, sin, interleaved=interleaved) for d in (torch.float64, dtype)
        )
        terms = (
            x.double().abs().amax(-1, keepdim=True) * torch.finfo(torch.float32).eps
        ).expand_as(exact)
        tiny = (terms + torch.finfo(dtype).eps * exact.abs()).cpu()
        for layout in layouts:
            leaf = layout.detach().requires_grad_()
            y = rotary(leaf, cos, sin, interleaved=interleaved)
            assert y.is_contiguous()
            assert_close_to_reference(y, torchs, exact, tiny=tiny)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            back = (
                plain(dy.to(d), cos, -sin, interleaved=interleaved) for d in (dtype, torch.float64)
            )
            assert_close_to_reference(dx, *back, tiny=tiny + terms.cpu() * 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_and_gradcheck(interleaved: bool, device: torch.device):
    cos, sin = tables(3, 4, device)
    x = torch.randn(2, 3, 2, 5, device=device, dtype=torch.float64, requires_grad=True)
    y = rotary(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(
        y, plain(x, cos, sin, interleaved=interleaved), rtol=1e-14, atol=1e-14
    )
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.autograd.gradcheck(lambda t: rotary(t, cos, sin, interleaved=interleaved), (x,))


def test_a_score_depends_on_the_distance_alone(device: torch.device, isa: str):
    cos, sin = tables(12, 8, device)
    q, k = (torch.randn(1, 1, 1, 8, device=device).expand(1, 12, 1, 8) for _ in range(2))
    score = rotary(q, cos, sin)[0, :, 0] @ rotary(k, cos, sin)[0, :, 0].T
    for distance in (0, 3, 7):
        same = score.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-4)
    assert (score[:, 0] - score[0, 0]).abs().max() > 0.1


def test_empty(device: torch.device):
    for B, T, H in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        cos, sin = tables(T, 4, device)
        assert rotary(torch.empty(B, T, H, 6, device=device), cos, sin).shape == (B, T, H, 6)
    x = torch.randn(2, 3, 2, 6, device=device)
    assert torch.equal(rotary(x, *(torch.empty(3, 0, device=device),) * 2), x)


def test_refusals(device: torch.device):
    cos, sin = tables(3, 4, device)
    x = torch.zeros(2, 3, 2, 6, device=device)
    with pytest.raises(ValueError, match=r"x must be \[B, T, H, K\]"):
        rotary(x[0], cos, sin)
    for c, s in (
        (cos[:2], sin[:2]),
        (cos, sin[:2]),
        (cos.double(), sin.double()),
        (torch.zeros(3, 4, device=device),) * 2,
    ):
        with pytest.raises(
            ValueError, match=r"cos and sin must be float32 \[3, R/2\] or \[2, 3, R/2\] with R <= 6"
        ):
            rotary(x, c, s)
    with pytest.raises((RuntimeError, ValueError), match="cos and sin must be float32"):
        torch.ops.pyops.rotary(x, cos[:2], sin[:2], interleaved=False, inverse=False)
