"""fake_quantize: values by the codes that quantization gives, gradients by hand, by torch's op and
by float64, bits, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyops.ops.layers.fake_quantize import fake_quantize, fake_quantize_backward_reference
from pyops.quantized import Int4, Int8, IntN, decode, encode

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def gradients(x: Tensor, scale: Tensor, dy: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, scale)]
    y = fake_quantize(*leaves, **options)
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_the_numbers_that_codes_give_back(dtype: torch.dtype, device: torch.device, isa: str):
    """Bit for bit those of encode and decode, of blocks with zeros and with nan among them."""
    x = torch.randn(7, 3, 64, device=device).to(dtype)
    x[2, 1] = 0.0
    x[3, 2, 5] = torch.inf
    for format, group in ((Int8(), None), (Int4(group=16), 16), (IntN(3), None)):
        codes = encode(x, format)
        y = fake_quantize(
            x,
            codes.scales,
            lo=-(2 ** (format.bits - 1)) + 1,
            hi=2 ** (format.bits - 1) - 1,
            group=group,
        )
        expected = decode(codes).to(dtype)
        assert torch.equal(y.nan_to_num(9.0), expected.nan_to_num(9.0))
        assert y[3, 2].isnan().any()
        assert y[2, 1].count_nonzero() == 0
        assert len(y.nan_to_num(0.0).unique()) > 8
    codes = encode(x[:3], IntN(4, symmetric=False))
    y = fake_quantize(x[:3], codes.scales, codes.zero_points, lo=0, hi=15)
    assert torch.equal(y, decode(codes).to(dtype))
    whole = encode(x[:3], Int8(per="tensor"))
    assert torch.equal(fake_quantize(x[:3], whole.scales), decode(whole).to(dtype))


def test_codes_halfway_go_to_the_even_one(device: torch.device, isa: str):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 3.6, -9.0], device=device)
    y = fake_quantize(x, torch.ones(1, device=device), lo=-3, hi=3)
    assert y.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 3.0, 3.0, -3.0]


def test_gradients_by_hand(device: torch.device, isa: str):
    """Inside, half a step beyond an end (which rounds to it), and beyond; n = 5, hi = 3."""
    x = torch.tensor([0.6, 3.0, 3.4, 4.2, -5.0], device=device)
    dy = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0], device=device)
    dx, ds = gradients(x, torch.ones((), device=device), dy, lo=-3, hi=3)
    assert dx.tolist() == [1.0, 10.0, 100.0, 0.0, 0.0]
    expected = 0.4 * 1 + 0 * 10 - 0.4 * 100 + 3 * 1000 - 3 * 10000
    assert float(ds) == pytest.approx(expected / math.sqrt(5 * 3), rel=1e-5)
    _, of_features = gradients(x, torch.ones((), device=device), dy, lo=-3, hi=3, count=2)
    assert float(of_features) == pytest.approx(expected / math.sqrt(2 * 3), rel=1e-5)


def test_against_torchs_learned_steps(device: torch.device, isa: str):
    """torch's own op, in fp32: inside, below and above, for a tensor and for channels."""
    x, dy = torch.randn(2, 6, 40, device=device), torch.randn(2, 6, 40, device=device)
    for scale, dim in (
        (torch.tensor([0.13], device=device), None),
        (torch.rand(6, device=device) * 0.2 + 0.05, 1),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, scale)]
        n = x.numel() // scale.numel()
        common = (-7, 7, 1 / math.sqrt(n * 7))
        zero = torch.zeros_like(scale)
        if dim is None:
            y = torch._fake_quantize_learnable_per_tensor_affine(*leaves, zero, *common)
        else:
            y = torch._fake_quantize_learnable_per_channel_affine(*leaves, zero, 1, *common)
        expected = torch.autograd.grad(y, leaves, dy)
        found = gradients(x, scale, dy, lo=-7, hi=7, dim=dim)
        torch.testing.assert_close(fake_quantize(x, scale, lo=-7, hi=7, dim=dim), y.detach())
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)
        assert 0 < int((found[0] == 0).sum()) < x.numel() // 2
        assert expected[1].abs().min() > 1e-3


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_the_gradients_of_plain_torch(dtype: torch.dtype, device: torch.device, isa: str):
    """Numbers inside the codes, below and above, with zero points and without."""
    x, dy = (torch.randn(3, 8, device=device).to(dtype) for _ in range(2))
    scale = torch.tensor([0.1, 0.2, 0.3], device=device, dtype=F64 if dtype == F64 else F32)
    zero = torch.tensor([1.0, -2.0, 0.0], device=device, dtype=scale.dtype)
    options = {
        "lo": -3,
        "hi": 4,
        "inner": 8,
        "factor": 0.5,
        "input_grad": True,
        "scale_grad": True,
    }
    for given in (None, zero):
        found = torch.ops.pyops.fake_quantize_backward(dy, x, scale, given, **options)
        expected = fake_quantize_backward_reference(dy, x, scale, given, **options)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        torch.testing.assert_close(found[1], expected[1])
        assert 0 < int((expected[0] == 0).sum()) < x.numel()


def test_against_a_smooth_surrogate_in_float64(device: torch.device, isa: str):
    """Where v stands still under the scale, s (v_fixed + noise) has the gradients stated: each
    number's rounding is a constant that autograd sees."""
    for shape, dim, group in (
        ((3, 8), None, 4),
        ((2, 3, 5), 1, None),
        ((4, 6), 1, None),
        ((5,), None, None),
    ):
        x = torch.randn(shape, dtype=F64).to(device)  # the CPU's numbers: some lie beyond the range
        zeros = {None: (1,) if group is None else (3, 2), 1: (shape[1] if len(shape) > 1 else 1,)}
        size = zeros[dim]
        scale = (torch.rand(size, dtype=F64) * 0.2 + 0.1).to(device)
        zero = torch.randint(-2, 3, size).to(device)
        spread = (
            scale.repeat_interleave(4, -1)
            if group
            else scale.view(-1, *[1] * (len(shape) - 2))
            if dim == 1
            else scale
        )
        leaves = [x.clone().requires_grad_(), spread.expand(shape).clone().requires_grad_()]
        z = (
            zero.repeat_interleave(4, -1)
            if group
            else zero.view(-1, *[1] * (len(shape) - 2))
            if dim == 1
            else zero
        ).expand(shape)
        with torch.no_grad():
            v = leaves[0] / leaves[1]
            rounding, q = v.round() - v, v.round()
        low, high = -4 - z, 5 - z
        y = torch.where(
            q < low,
            low * leaves[1],
            torch.where(q > high, high * leaves[1], leaves[0] + rounding * leaves[1]),
        )
        dy = torch.randn(shape, dtype=F64).to(device)
        dx, ds = torch.autograd.grad(y, leaves, dy)
        if group:
            ds = ds.view(3, 2, 4).sum(-1)
        elif dim == 1:
            ds = ds.sum([d for d in range(len(shape)) if d != 1])
        else:
            ds = ds.sum().view(1)
        found = gradients(x, scale, dy, zero=zero, lo=-4, hi=5, dim=dim, group=group, count=1)
        torch.testing.assert_close(found[0], dx, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], ds / math.sqrt(5), rtol=1e-12, atol=1e-12)
        assert (dx == 0).any()
        assert (dx != 0).any()


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["tensor", "rows", "columns"])
def test_the_same_bits_for_any_number_of_threads_and_any_instruction_set(layout: str):
    """Pieces with a rest, and more of them than threads."""
    from pyops.ops import library

    x = torch.randn(3, 41, 1027)
    size, dim = {"tensor": ((1,), None), "rows": ((3, 41), None), "columns": ((1027,), 2)}[layout]
    scale, dy = torch.rand(size) * 0.02 + 0.005, torch.randn(x.shape)
    threads, found = torch.get_num_threads(), []
    try:
        for name in library.isas() or ["none"]:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                with library.use_isa(name) if name != "none" else torch.enable_grad():
                    y = fake_quantize(x, scale, dim=dim)
                    found.append([y, *gradients(x, scale, dy, dim=dim)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert found[0][2].abs().min() > 0


def test_only_what_is_asked_for_and_no_elements(device: torch.device, isa: str):
    x, scale = torch.randn(4, 6, device=device), torch.full((4,), 0.1, device=device)
    alone = x.clone().requires_grad_()
    fake_quantize(alone, scale).sum().backward()  # a gradient of stride 0
    whole = gradients(x, scale, torch.ones_like(x))
    assert torch.equal(alone.grad, whole[0])
    step = scale.clone().requires_grad_()
    fake_quantize(x, step).sum().backward()
    assert torch.equal(step.grad, whole[1])
    assert whole[1].abs().min() > 0
    empty = gradients(x[:, :0], scale, x[:, :0])
    assert empty[0].shape == (4, 0)
    assert empty[1].count_nonzero() == 0
    gaps = torch.stack([x, x], -1)[..., 0]
    assert torch.equal(fake_quantize(gaps, scale), fake_quantize(x, scale))
    assert fake_quantize(x.t(), scale, dim=1).is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (3,)}, r"scale must be one number or \[4\] for x \[4, 6\].*got \[3\]"),
        ({"scale": (4,), "dim": 1}, r"scale must be one number or \[6\]"),
        ({"group": 4}, r"group=4 does not divide the last dimension.*: 1, 2, 3, 6"),
        ({"group": 3, "dim": 0}, r"leave out dim=0"),
        ({"dim": 2}, r"dim=2, but x has 2 dimensions"),
        ({"lo": 5, "hi": 5}, r"lo must be below hi; got lo=5, hi=5"),
        ({"lo": -8, "hi": 0}, r"a learned scale needs hi above 0; got 0"),
        ({"zero": (2,)}, r"zero must have scale's shape \[4\]; got \[2\]"),
        ({"count": 0}, r"count must be 1 or more; got 0"),
        ({"dtype": F64}, r"scale must be torch.float64 for x torch.float64; got torch.float32"),
        ({"dtype": torch.int32}, r"got torch.int32"),
    ],
)
def test_what_is_refused(options: dict, message: str, device: torch.device):
    x = torch.ones(4, 6, device=device).to(options.pop("dtype", F32))
    scale = torch.ones(options.pop("scale", (4,)), device=device, requires_grad=True)
    if "zero" in options:
        options["zero"] = torch.zeros(options["zero"], device=device)
    with pytest.raises(ValueError, match=message):
        fake_quantize(x, scale, **options)
