"""layer_norm, rms_norm and their forms with the residual addition: values, gradients, statistics,
what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers import norm
from tests.tolerance import assert_close_to_reference

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WIDTHS = (
    1,
    3,
    16,
    65,
    512,
    1031,
)  # one number, below a register, a register, past four of them, a whole row, and neither
OFFSET = 0.7
NORMS = ("layer", "layer without bias", "rms")


def random(
    *shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0, mean: float = 0.0
) -> Tensor:
    return (torch.randn(shape, device=device, dtype=F64) * scale + mean).to(dtype)


def ours(
    kind: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """(y,) or (y, sum)."""
    if kind == "rms":
        if residual is None:
            return (norm.rms_norm(x, weight, eps=1e-3, offset=OFFSET),)
        return norm.add_rms_norm(x, residual, weight, eps=1e-3, offset=OFFSET)
    b = bias if kind == "layer" else None
    if residual is None:
        return (norm.layer_norm(x, weight, b, eps=1e-3),)
    return norm.add_layer_norm(x, residual, weight, b, eps=1e-3)


def plain(
    kind: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """The same by torch's own functions."""
    s = x if residual is None else x + residual
    w = weight if s.dtype == weight.dtype else weight.to(s.dtype)
    if kind == "rms":
        y = functional.rms_norm(s, s.shape[-1:], w + OFFSET, 1e-3)
    else:
        y = functional.layer_norm(
            s, s.shape[-1:], w, bias.to(w.dtype) if kind == "layer" else None, 1e-3
        )
    return (y,) if residual is None else (y, s)


def results(
    form: Callable[..., tuple[Tensor, ...]],
    kind: str,
    tensors: list[Tensor | None],
    dtype: torch.dtype | None,
    seeds: list[Tensor],
) -> list[Tensor]:
    """Outputs and the gradients of all tensors that take part, computed in `dtype` (None: each in
    its own)."""
    x, residual, weight, bias = (
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors
    )
    outputs = form(kind, x, residual, weight, bias)
    taking_part = [
        t for t in (x, residual, weight, bias if kind == "layer" else None) if t is not None
    ]
    gradients = torch.autograd.grad(
        outputs, taking_part, [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=False)]
    )
    return [*outputs, *gradients]


def size_of_terms(kind: str, s: Tensor, dy: Tensor, weight: Tensor) -> float:
    """The input's gradient is a difference of terms of this size, whatever is left of them."""
    if not s.numel():
        return 0.0
    spread = s.square().mean(-1) if kind == "rms" else s.var(-1, correction=0)
    return float((spread + 1e-3).rsqrt().max() * (dy * (weight + OFFSET)).abs().max())


def compare(kind: str, tensors: list[Tensor | None]) -> None:
    x, residual, weight, _ = tensors
    out = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    seeds = [
        random(*x.shape, dtype=out, device=x.device) for _ in range(1 if residual is None else 2)
    ]
    actual, torchs = (results(form, kind, tensors, None, seeds) for form in (ours, plain))
    reference = results(plain, kind, tensors, F64, seeds)
    s = x.double() if residual is None else x.double() + residual.double()
    terms = size_of_terms(kind, s, seeds[0].double(), weight.double())
    rounded = (
        0.0 if residual is None else torch.finfo(out).eps
    )  # the sum is, and is then what is normalised
    for a, p, r in zip(actual, torchs, reference, strict=True):
        size = max(1.0, terms, float(r.detach().abs().max())) if r.numel() else 1.0
        assert_close_to_reference(
            a, p.to(a.dtype), r, tiny=4 * max(rounded, torch.finfo(a.dtype).eps) * size
        )
        assert x.shape[-1] == 1 or not x.numel() or a.abs().max() > 0


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_against_float64(
    dtype: torch.dtype, kind: str, added: bool, device: torch.device, isa: str
):
    for width in WIDTHS:
        x = random(7, width, dtype=dtype, device=device, scale=2.0, mean=0.5)
        residual = random(7, width, dtype=dtype, device=device) if added else None
        compare(
            kind,
            [x, residual, *(random(width, dtype=dtype, device=device, mean=1.0) for _ in range(2))],
        )


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("x", "residual", "weight"),
    [
        (BF16, None, F32),
        (F32, None, F16),
        (BF16, F32, F32),
        (F32, F16, BF16),
        (F16, BF16, F32),
        (BF16, BF16, F32),
    ],
    ids=str,
)
def test_dtypes_may_differ(
    x: torch.dtype,
    residual: torch.dtype | None,
    weight: torch.dtype,
    kind: str,
    device: torch.device,
    isa: str,
):
    first = random(5, 37, dtype=x, device=device)
    other = None if residual is None else random(5, 37, dtype=residual, device=device)
    vectors = [random(37, dtype=weight, device=device) for _ in range(2)]
    compare(kind, [first, other, *vectors])
    outputs = ours(kind, first, other, *vectors)
    assert all(
        o.dtype == (x if residual is None else torch.promote_types(x, residual)) for o in outputs
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_what_is_normalised_is_the_sum_as_rounded(
    dtype: torch.dtype, device: torch.device, isa: str
):
    x, residual = (random(4, 200, dtype=dtype, device=device) for _ in range(2))
    vectors = [random(200, dtype=F32, device=device) for _ in range(2)]
    for kind in NORMS:
        y, s = ours(kind, x, residual, *vectors)
        assert torch.equal(s, x + residual)
        assert torch.equal(y, ours(kind, s, None, *vectors)[0])


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_by_finite_differences(kind: str, device: torch.device, isa: str):
    for width in (1, 5, 19):
        shapes = [(1, 2, width)] * 2 + [(width,)] * 2
        tensors = [random(*shape, dtype=F64, device=device).requires_grad_() for shape in shapes]
        x, _, weight, bias = tensors
        assert torch.autograd.gradcheck(
            lambda x, w, b: ours(kind, x, None, w, b), (x, weight, bias)
        )
        assert torch.autograd.gradcheck(lambda *t: ours(kind, *t), tensors)
        assert (
            width == 1
            or torch.autograd.grad(ours(kind, *tensors)[0].square().sum(), weight)[0].abs().max()
            > 0
        )


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_any_leading_shape(shape: tuple[int, ...], kind: str, device: torch.device):
    x, residual = (random(*shape, dtype=F32, device=device) for _ in range(2))
    compare(kind, [x, residual, *(random(4, dtype=F32, device=device) for _ in range(2))])
    assert (
        ours(kind, x, None, *(random(4, dtype=F32, device=device) for _ in range(2)))[0].shape
        == shape
    )


def test_any_strides(device: torch.device, isa: str):
    x = random(3, 5, 8, dtype=F32, device=device).transpose(0, 1)
    residual = random(5, 3, 16, dtype=F32, device=device)[..., ::2]
    vectors = [
        random(16, dtype=F32, device=device)[::2],
        random(8, dtype=F32, device=device).flip(0),
    ]
    compare("layer", [x, residual, *vectors])
    compare("rms", [x.mT.contiguous().mT, None, *vectors])
    x = x.detach().requires_grad_()
    norm.layer_norm(x, *vectors).sum().backward()  # a gradient of stride 0
    expected = torch.autograd.grad(functional.layer_norm(x, (8,), *vectors).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert expected.abs().max() > 0


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_for_any_number_of_threads(dtype: torch.dtype, isa: str):
    tensors = [random(1001, 70, dtype=dtype, device=torch.device("cpu")) for _ in range(2)]
    tensors += [random(70, dtype=F32, device=torch.device("cpu")) for _ in range(2)]
    seeds = [random(1001, 70, dtype=dtype, device=torch.device("cpu")) for _ in range(2)]
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(results(ours, "layer", tensors, None, seeds))
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_sums_over_many_rows(device: torch.device):
    """More rows than the most groups of the smallest size, and not a multiple of a group."""
    tensors = [
        random(8201, 3, dtype=F32, device=device, mean=1.0),
        None,
        *(random(3, dtype=F32, device=device) for _ in range(2)),
    ]
    seeds = [random(8201, 3, dtype=F32, device=device, mean=1.0)]
    for kind in NORMS:
        actual, reference = (
            results(ours, kind, tensors, None, seeds),
            results(plain, kind, tensors, F64, seeds),
        )
        for a, r in zip(actual[2:], reference[2:], strict=True):
            torch.testing.assert_close(a.double(), r, rtol=2e-6, atol=1e-2)


@pytest.mark.cpu_only
@pytest.mark.parametrize("width", [1024, 1000])
def test_large_results_have_the_bits_of_small_ones(width: int, isa: str):
    """From 2^20 elements on, results are written past the caches; a row's bits don't depend on
    that."""
    x, residual, dy, ds = (torch.randn(1100, width) for _ in range(4))
    weight, bias = torch.randn(width), torch.randn(width)
    whole = results(ours, "layer", [x, residual, weight, bias], None, [dy, ds])[:4]
    halves = [
        results(ours, "layer", [x[part], residual[part], weight, bias], None, [dy[part], ds[part]])[
            :4
        ]
        for part in (slice(0, 551), slice(551, 1100))
    ]
    assert all(torch.equal(a, torch.cat(parts)) for a, *parts in zip(whole, *halves, strict=True))
    assert all(a.abs().max() > 0 for a in whole)


def test_a_large_mean_cancels_nothing(device: torch.device, isa: str):
    """Rows of 30000 +- 1: E[x^2] - E[x]^2 would have no digit left, and a mean rounded to fp32
    would be off by up to 1e-3."""
    x = random(9, 300, dtype=F32, device=device, mean=30000.0)
    weight = torch.ones(300, device=device)
    reference = functional.layer_norm(x.double(), (300,), eps=1e-5)
    assert (norm.layer_norm(x, weight) - reference).abs().max() < (1e-3 if x.is_cuda else 3e-6)
    _, mean, rstd = torch.ops.pyops.layer_norm.default(x, weight, None, eps=1e-5)
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=1e-7, atol=0)
    torch.testing.assert_close(
        rstd.double(), (x.double().var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("kind", NORMS)
def test_what_is_not_finite_stays_in_its_row(kind: str, device: torch.device, isa: str):
    x = random(5, 67, dtype=F32, device=device)
    x[1, 3], x[2, 66], x[3] = torch.inf, torch.nan, -torch.inf
    weight, bias = (random(67, dtype=F32, device=device) for _ in range(2))
    tensors, seeds = [x, None, weight, bias], [torch.ones_like(x)]
    y, dx, *of_vectors = results(ours, kind, tensors, None, seeds)
    # On the CPU: of a row with an infinite number torch's RMS norm on CUDA is nan altogether.
    on_cpu = [None if t is None else t.cpu() for t in tensors]
    expected, *_ = results(plain, kind, on_cpu, F64, [s.cpu() for s in seeds])
    assert torch.equal(y.isnan().cpu(), expected.isnan())
    assert y[1:4].isnan().any(dim=-1).all()
    assert dx[1:4].isnan().any(dim=-1).all()
    assert y[[0, 4]].isfinite().all()
    assert dx[[0, 4]].isfinite().all()
    assert of_vectors[0].isnan().any()


def test_only_what_is_asked_for(device: torch.device):
    """One output used, or some inputs frozen: the rest is as in the full backward pass."""
    x, residual, dy, ds = (random(6, 40, dtype=F32, device=device) for _ in range(4))
    weight, bias = (random(40, dtype=F32, device=device) for _ in range(2))

    def gradients(wanted: list[int], used: list[int]) -> dict[int, Tensor]:
        tensors = [
            t.detach().requires_grad_(i in wanted)
            for i, t in enumerate((x, residual, weight, bias))
        ]
        outputs = norm.add_layer_norm(*tensors)
        torch.autograd.backward([outputs[i] for i in used], [(dy, ds)[i] for i in used])
        return {i: t.grad for i, t in enumerate(tensors) if t.grad is not None}

    whole = gradients([0, 1, 2, 3], [0, 1])
    assert all(torch.equal(g, whole[i]) for i, g in gradients([0], [0, 1]).items())
    assert all(torch.equal(g, whole[i]) for i, g in gradients([3], [0]).items())
    alone = gradients([0, 1, 2, 3], [0])
    torch.testing.assert_close(alone[0] + ds, whole[0])
    assert torch.equal(alone[2], whole[2])
    of_sum = gradients([0, 1, 2, 3], [1])
    assert torch.equal(of_sum[0], ds)
    assert torch.equal(of_sum[1], ds)
    assert set(of_sum) == {0, 1}


def test_saves_the_input_and_two_numbers_a_row(device: torch.device):
    x, residual = (random(4, 32, dtype=F32, device=device).requires_grad_() for _ in range(2))
    weight = torch.ones(32, device=device, requires_grad=True)
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        norm.layer_norm(x, weight)
        assert sorted(t.numel() for t in saved) == [4, 4, 32, 4 * 32]
        assert x.data_ptr() in {t.data_ptr() for t in saved}
        saved.clear()
        _, s = norm.add_rms_norm(x, residual, weight)
    assert sorted(t.numel() for t in saved) == [4, 32, 4 * 32]
    assert s.data_ptr() in {t.data_ptr() for t in saved}


def test_no_second_derivative(device: torch.device):
    x, weight = (
        random(2, 8, dtype=F32, device=device).requires_grad_(),
        torch.ones(8, device=device),
    )
    (gradient,) = torch.autograd.grad(norm.rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_refusals(device: torch.device):
    x, weight = torch.zeros(2, 4, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match=r"x has shape \(\); a norm is over a last dimension"):
        norm.layer_norm(x[0, 0], weight)
    with pytest.raises(ValueError, match="last dimension of at least 1"):
        norm.rms_norm(x[:, :0], weight[:0])
    with pytest.raises(ValueError, match=r"one shape, got \(2, 4\) and \(4,\)"):
        norm.add_rms_norm(x, x[0], weight)
    with pytest.raises(ValueError, match=r"must have shape \[4\].*got \[\(4,\), \(3,\)\]"):
        norm.layer_norm(x, weight, weight[:3])
    with pytest.raises(TypeError, match=r"one dtype, got torch\.float32 and torch\.float16"):
        norm.add_layer_norm(x, x, weight, weight.half())
    with pytest.raises(TypeError, match="all float64"):
        norm.layer_norm(x.double(), weight)
    with pytest.raises(TypeError, match="int64"):
        norm.rms_norm(x.long(), weight)


def test_the_ops_themselves_refuse_what_would_be_read_past_its_end(device: torch.device):
    """Called without the wrappers, as a compiled graph does."""
    x, weight, ones = (torch.ones(shape, device=device) for shape in ((2, 4), (4,), (3,)))
    ops = torch.ops.pyops
    error = (RuntimeError, ValueError)
    with pytest.raises(error):
        ops.layer_norm.default(x, weight[:3], None, eps=1e-5)
    with pytest.raises(error):
        ops.add_rms_norm.default(x, x[:1], weight, eps=1e-5, offset=0.0)
    with pytest.raises(error):
        ops.rms_norm_backward.default(x[:1], None, x, weight, ones, offset=0.0, weight_grad=True)
    with pytest.raises(error):
        ops.layer_norm_backward.default(x, x.half(), x, weight, ones[:2], ones, weight_grad=True)
