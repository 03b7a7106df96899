"""The parts of batch norm: moments, merging, application, sums and gradient; bits, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers import batch_norm as ops

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Fewer rows than one sum takes, several blocks of them; channels below a register, with a rest,
# more than a tile.
SHAPES = ((3, 5), (2, 40, 19), (70, 37), (40, 2051))


def random(*shape: int, dtype: torch.dtype, device: torch.device, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=device, dtype=F64) + mean).to(dtype)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    size = max(1.0, float(exact.abs().max()))
    error = float((found.double() - exact.double()).abs().max().detach())
    bound = {F64: 1e-13, F32: 3e-7, BF16: 2**-8, F16: 2**-11}[dtype]
    assert error <= 4 * bound * size, (error, size)
    assert exact.abs().max() > 0


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's batch norm of [..., C]."""
    flat = x.reshape(-1, x.shape[-1])
    return functional.batch_norm(flat, None, None, weight, bias, True, 0.0, 0.1).view(x.shape)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_the_parts_joined_are_torchs_batch_norm(dtype: torch.dtype, device: torch.device, isa: str):
    vectors = F64 if dtype == F64 else F32
    for shape in SHAPES:
        x, dy = (random(*shape, dtype=dtype, device=device, mean=0.7) for _ in range(2))
        weight, bias = (random(shape[-1], dtype=vectors, device=device) for _ in range(2))
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        exact = normalized(*leaves)
        dx, dweight, dbias = torch.autograd.grad(exact, leaves, dy.double())
        count = x.numel() // shape[-1]
        mean, squares = ops.batch_norm_moments(x)
        rstd = (squares / count + 0.1).rsqrt()
        close(ops.batch_norm_apply(x, mean, rstd, weight, bias), exact.detach(), dtype)
        sums = ops.batch_norm_sums(dy, x, mean)
        wide = F64 if dtype == F64 else F32  # the sums of 16 bits are those of fp32
        close(sums[0], dbias, wide)
        close(sums[1] * rstd, dweight, wide)
        found = ops.batch_norm_input_grad(dy, x, mean, rstd, weight, sums, count=count)
        assert found.dtype == dtype
        close(found, dx, dtype)


def test_moments_of_a_large_mean_keep_their_digits(device: torch.device, isa: str):
    """Of 30000 +- 1 in fp32: E[x^2] - E[x]^2 would have no digit left."""
    x = random(500, 21, dtype=F32, device=device, mean=30000.0)
    mean, squares = ops.batch_norm_moments(x)
    wide = x.double()
    torch.testing.assert_close(mean, wide.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(squares, (wide - wide.mean(0)).square().sum(0), rtol=1e-5, atol=0)
    y = ops.batch_norm_apply(x, mean, (squares / 500).rsqrt())
    exact = (wide - mean) * (squares / 500).rsqrt()
    assert (y - exact).abs().max() < 1e-6


def test_merged_moments_are_those_of_all(device: torch.device):
    x = random(31, 6, dtype=F64, device=device, mean=100.0)
    parts = x.tensor_split([1, 1, 20])  # of 1, 0, 19 and 11 rows
    counts = torch.tensor([float(len(p)) for p in parts], device=device, dtype=F64)
    moments = torch.stack([ops.batch_norm_moments(p) for p in parts])
    count, merged = ops.merge_moments(counts, moments)
    assert count == 31
    torch.testing.assert_close(merged, ops.batch_norm_moments(x), rtol=1e-13, atol=0)
    none, nothing = ops.merge_moments(counts[1:2], moments[1:2])
    assert none == 0
    assert nothing.count_nonzero() == 0


def test_an_activation(device: torch.device, isa: str):
    x = random(9, 33, dtype=F32, device=device)
    mean, squares = ops.batch_norm_moments(x)
    y = ops.batch_norm_apply(x, mean, squares.rsqrt())
    for name, form in (("gelu", functional.gelu), ("silu", functional.silu)):
        found = ops.batch_norm_apply(x, mean, squares.rsqrt(), activation=name)
        torch.testing.assert_close(found, form(y), rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only
def test_the_same_bits_for_any_number_of_threads(isa: str):
    dy, x = (random(3001, 70, dtype=F32, device=torch.device("cpu"), mean=3.0) for _ in range(2))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            mean, squares = ops.batch_norm_moments(x)
            sums = ops.batch_norm_sums(dy, x, mean)
            y = ops.batch_norm_apply(x, mean, squares.rsqrt())
            dx = ops.batch_norm_input_grad(dy, x, mean, squares.rsqrt(), None, sums, count=3001.0)
            found.append((mean, squares, sums, y, dx))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=1))


def test_no_rows(device: torch.device):
    x = torch.zeros(0, 4, 6, device=device)
    moments = ops.batch_norm_moments(x)
    assert torch.equal(moments, torch.zeros(2, 6, device=device, dtype=F64))
    assert ops.batch_norm_apply(x, *moments).shape == x.shape
    assert ops.batch_norm_sums(x, x, moments[0]).count_nonzero() == 0
    assert ops.batch_norm_input_grad(x, x, *moments, None, moments, count=3.0).shape == x.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: ops.batch_norm_moments(x[0, 0]), "x has no dimensions"),
        (lambda x, m: ops.batch_norm_moments(x.int()), "x must be one of.*got torch.int32"),
        (lambda x, m: ops.batch_norm_apply(x, m[:2], m), r"mean and rstd must be float64 \[4\]"),
        (lambda x, m: ops.batch_norm_apply(x, m.float(), m), r"got \[4\] torch.float32"),
        (lambda x, m: ops.batch_norm_apply(x, m, m, x[0, :3]), r"weight and bias must be \[4\]"),
        (lambda x, m: ops.batch_norm_apply(x, m, m, m), "float64 where x is"),
        (lambda x, m: ops.batch_norm_apply(x, m, m, activation="tanh"), "got 'tanh'"),
        (lambda x, m: ops.batch_norm_sums(x[:1], x, m), r"dy must be \[2, 4\] torch.float32"),
        (
            lambda x, m: ops.batch_norm_input_grad(x, x, m, m, None, m, count=1.0),
            r"sums must be float64 \[2, 4\]; got \[4\]",
        ),
    ],
)
def test_what_is_refused(call, message: str, device: torch.device):
    x, m = torch.ones(2, 4, device=device), torch.ones(4, device=device, dtype=F64)
    with pytest.raises((ValueError, TypeError), match=message):
        call(x, m)


def test_the_ops_themselves_refuse_what_does_not_fit(device: torch.device):
    x, m = torch.ones(2, 4, device=device), torch.ones(4, device=device, dtype=F64)
    error = (RuntimeError, ValueError)
    with pytest.raises(error, match="mean"):
        torch.ops.pyops.batch_norm_apply.default(x, m[:3], m, None, None, activation=None)
    with pytest.raises(error, match="dy"):
        torch.ops.pyops.batch_norm_sums.default(x[:, :3], x, m)
    with pytest.raises(error, match="sums"):
        torch.ops.pyops.batch_norm_input_grad.default(x, x, m, m, None, m[None], count=1.0)
    with pytest.raises(ValueError, match="sums must be float64"):  # what CUDA calls
        ops.batch_norm_input_grad_reference(x, x, m, m, None, m[None], count=1.0)
