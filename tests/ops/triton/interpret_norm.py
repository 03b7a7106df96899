"""The Triton kernels of the stem `norm`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.layers import norm as contract
from pyops.ops.triton import norm as kernels
from tests.ops.triton.rounding import assert_within_roundings

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# x, residual or None, weight: each dtype, and mixtures
DTYPES = (
    (F32, None, F32),
    (F32, F32, F32),
    (BF16, None, F32),
    (BF16, BF16, BF16),
    (F16, F32, F16),
    (F64, F64, F64),
)


def operands(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x with gaps between its rows, a residual or None, weight, bias."""
    of_x, of_residual, of_weight = dtypes
    x = (torch.randn(*shape[:-1], shape[-1] + 1, dtype=F64) + 3.0).to(of_x)[..., : shape[-1]]
    residual = None if of_residual is None else torch.randn(shape, dtype=F64).to(of_residual)
    return x, residual, *(torch.randn(shape[-1], dtype=F64).to(of_weight) for _ in range(2))


def assert_alike(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_within_roundings(a, e, units=16)
        guarded = (
            e.numel() if expected[0].numel() and expected[0].shape[-1] > 1 else 0
        )  # one number is its own mean
        assert not guarded or e.abs().max() > 0


def forward_and_backward(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], *, whole: bool
) -> None:
    """Layer norm and RMS norm of one case; unless `whole`, without bias, gradient of the sum, and
    gradients of vectors."""
    x, residual, weight, b = operands(shape, dtypes)
    for name, options, vectors in (
        ("layer_norm", {"eps": 0.125}, (weight, b if whole else None)),
        ("rms_norm", {"eps": 0.125, "offset": 0.5}, (weight,)),
    ):
        if residual is None:
            s, (y, *statistics) = x, getattr(kernels, name)(x, *vectors, **options)
        else:
            y, s, *statistics = getattr(kernels, f"add_{name}")(x, residual, *vectors, **options)
            assert_within_roundings(s, x + residual)
        # From the sum as it was rounded: the interpreter truncates there too.
        assert_alike(
            (y, *statistics), getattr(contract, f"{name}_reference")(s, *vectors, **options)
        )
        dy = torch.randn(shape[::-1], dtype=F64).to(s.dtype).permute(*range(s.dim())[::-1])
        args = (dy, torch.randn_like(s) if whole else None, s, weight, *statistics)
        back = {"weight_grad": whole} | ({"offset": 0.5} if name == "rms_norm" else {})
        assert_alike(
            getattr(kernels, f"{name}_backward")(*args, **back),
            getattr(contract, f"{name}_backward_reference")(*args, **back),
        )


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_dtype(dtypes: tuple[torch.dtype | None, ...]):
    forward_and_backward((2, 3, 5), dtypes, whole=True)


@pytest.mark.parametrize("shape", [(7,), (0, 4), (3, 1), (5, 700), (37, 300)], ids=str)
def test_shapes(shape: tuple[int, ...]):
    """The last has more rows than a program takes together."""
    forward_and_backward(shape, (F32, F32, F32), whole=len(shape) == 2 and shape[1] != 700)


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """Rows wider than registers hold, the last chunk in part; sums over rows by a kernel of their
    own."""
    monkeypatch.setattr(kernels, "WIDEST", 16)
    monkeypatch.setattr(kernels, "COLUMNS", 32)
    monkeypatch.setattr("pyops.ops.triton.column_sum.MOST_BLOCKS", 2)
    for dtypes in ((F32, F32, F32), (BF16, None, F32), (F64, F64, F64)):
        forward_and_backward((21, 43), dtypes, whole=True)
    monkeypatch.setattr(kernels, "TILE", 16)
    forward_and_backward((5, 37), (F32, None, F32), whole=True)


def test_sums_over_rows_that_fit_without_them(monkeypatch: pytest.MonkeyPatch):
    """Rows in registers, sums over rows by a kernel of their own; of 16-bit RMSNorm up to twice the
    width together."""
    monkeypatch.setattr(kernels, "WIDEST_SUMMED", 16)
    for shape in ((21, 43), (37, 30)):
        for dtypes in ((F32, F32, F32), (BF16, BF16, BF16)):
            forward_and_backward(shape, dtypes, whole=True)


@pytest.mark.full
def test_many_row_blocks_add_up_in_order(monkeypatch: pytest.MonkeyPatch):
    """More tiles than blocks: each block walks several tiles, the last ones past the end."""
    monkeypatch.setattr("pyops.ops.triton.column_sum.MOST_BLOCKS", 3)
    monkeypatch.setattr(kernels, "TILE", 8)
    forward_and_backward((29, 5), (F32, F32, F32), whole=True)


def test_rows_on_their_way_while_one_is_summed(monkeypatch: pytest.MonkeyPatch):
    """Blocks of one tile and of several; the weight is kept."""
    monkeypatch.setattr("pyops.ops.triton.column_sum.MOST_BLOCKS", 3)
    monkeypatch.setattr(kernels, "TILE", 8)
    monkeypatch.setattr(kernels, "STAGED", 8)
    for rows in (2, 29):
        forward_and_backward((rows, 7), (BF16, BF16, BF16), whole=True)


@pytest.mark.parametrize("widest", [8192, 64])
def test_a_large_mean_cancels_nothing(widest: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "WIDEST", widest)  # 64: rows in chunks
    x = torch.randn(3, 300, dtype=F64).add(30000.0).float()
    y, mean, rstd = kernels.layer_norm(x, torch.ones(300), None, eps=1e-5)
    wide = x.double()
    assert (y - torch.nn.functional.layer_norm(wide, (300,))).abs().max() < 3e-6
    assert (
        mean.double() - wide.mean(-1)
    ).abs().max() < 0.51 * 2.0**-9  # rounded once: numbers of fp32 are 2^-9 apart there
    torch.testing.assert_close(
        rstd.double(), (wide.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=0
    )


def test_what_is_not_finite_stays_in_its_row():
    x = torch.randn(4, 20)
    x[1, 3], x[2] = torch.inf, torch.nan
    for y in (
        kernels.layer_norm(x, torch.ones(20), None, eps=1e-5)[0],
        kernels.rms_norm(x, torch.ones(20), eps=1e-5, offset=0.0)[0],
    ):
        assert y[1:3].isnan().any(dim=-1).all()
        assert y[[0, 3]].isfinite().all()


def test_refusals():
    """The launchers check what memory they will touch, also where no wrapper did."""
    x, weight, rstd = torch.zeros(2, 4), torch.ones(4), torch.ones(2)
    with pytest.raises(ValueError, match=r"weight and bias must have shape \[4\]"):
        kernels.layer_norm(x, weight[:3], None, eps=1e-5)
    with pytest.raises(ValueError, match="x and residual must have one shape"):
        kernels.add_rms_norm(x, x[:1], weight, eps=1e-5, offset=0.0)
    with pytest.raises(ValueError, match=r"dy must have shape \[2, 4\], got \[1, 4\]"):
        kernels.rms_norm_backward(x[:1], None, x, weight, rstd, offset=0.0, weight_grad=True)
    with pytest.raises(ValueError, match=r"dsum must have shape \[2, 4\], got \[1, 4\]"):
        kernels.rms_norm_backward(x, x[:1], x, weight, rstd, offset=0.0, weight_grad=True)
    with pytest.raises(ValueError, match=r"mean or rstd must have shape \[2\], got \[3\]"):
        kernels.layer_norm_backward(x, None, x, weight, rstd, torch.ones(3), weight_grad=True)
