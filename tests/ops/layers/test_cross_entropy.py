"""cross_entropy against float64 and torch's own; its statistics and gradient as parts of a larger
vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pyops.ops.layers import cross_entropy as ops
from pyops.ops.layers.cross_entropy import cross_entropy
from tests.tolerance import assert_close_to_reference

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
# Around a register, a run of lanes and a tile of the kernel.
VOCABULARIES = (1, 2, 63, 64, 65, 1000, 1024, 2085)


def plain(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    **options: Any,
) -> torch.Tensor:
    """The same by torch's cross_entropy, and the z-loss written out."""
    reduction = options.pop("reduction", "mean")
    losses = functional.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction="none", **options
    )
    kept = targets != ignore_index
    losses = losses + z_loss * (logits.logsumexp(-1) ** 2).where(kept, logits.new_zeros(()))
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept.sum()}[reduction]


def loss_and_gradient(
    function: Any, z: torch.Tensor, y: torch.Tensor, weight: Any = 1.0, **options: Any
) -> Any:
    z = z.detach().clone().requires_grad_()
    loss = function(z, y, **options)
    (loss * weight).sum().backward()
    assert z.grad is not None
    return loss.detach(), z.grad


def in_long_double(
    z: torch.Tensor,
    y: torch.Tensor,
    weight: Any,
    *,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient) in x87's 64 bits of mantissa: with smoothed labels plain torch's fp64
    gradient is off by some 40 eps."""
    logits, kept = z.cpu().numpy().astype(np.longdouble), (y != -100).cpu().numpy()[:, None]
    largest = logits.max(1, keepdims=True)
    log_sum = largest + np.log(np.exp(logits - largest).sum(1, keepdims=True))
    target = np.full_like(logits, np.longdouble(label_smoothing) / logits.shape[1])
    target[np.arange(len(logits)), y.clamp(min=0).cpu().numpy()] += 1 - np.longdouble(
        label_smoothing
    )
    losses = kept * (log_sum - (target * logits).sum(1, keepdims=True) + z_loss * log_sum**2)
    scale = (weight.cpu().numpy()[:, None] if reduction == "none" else weight) / (
        kept.sum() if reduction == "mean" else 1
    )
    gradient = kept * scale * (np.exp(logits - log_sum) * (1 + 2 * z_loss * log_sum) - target)
    loss = (
        losses[:, 0]
        if reduction == "none"
        else losses.sum() / (kept.sum() if reduction == "mean" else 1)
    )
    return torch.from_numpy(np.asarray(loss, dtype=np.float64)), torch.from_numpy(
        gradient.astype(np.float64)
    )


def data(
    rows: int, words: int, dtype: torch.dtype, device: torch.device, *, scale: float = 3.0
) -> tuple[torch.Tensor, Any]:
    z = (scale * torch.randn(rows, words, device=device, dtype=F64)).to(dtype)
    y = torch.randint(words, (rows,), device=device)
    y[1::4] = -100
    return z, y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option(dtype: torch.dtype, device: torch.device, isa: str):
    for words, (smoothing, z_loss, reduction) in zip(
        itertools.cycle(VOCABULARIES),
        itertools.product((0.0, 0.3), (0.0, 0.02), ("mean", "sum", "none")),
        strict=False,
    ):
        z, y = data(9, words, dtype, device)
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
        weight = torch.randn(9, device=device) if reduction == "none" else 0.7
        before = z.clone()
        loss, gradient = loss_and_gradient(cross_entropy, z, y, weight, **options)
        assert torch.equal(z, before), "the caller's logits were written to"
        if dtype == F64:
            fp64 = ours = in_long_double(z, y, weight, **options)
        else:
            fp64 = loss_and_gradient(plain, z.double(), y, weight, **options)
            ours = loss_and_gradient(plain, z, y, weight, **options)
        assert loss.dtype == (F64 if dtype == F64 else F32)
        assert gradient.dtype == dtype
        # Of fp32, a few units in the last place at the size of the largest: p - 1 and log(sum) - z
        # cancel.
        units = [
            4 * torch.finfo(loss.dtype).eps * float(x.abs().max() if words > 1 else 1) for x in fp64
        ]
        assert_close_to_reference(loss, ours[0].to(loss.dtype), fp64[0], tiny=units[0])
        assert_close_to_reference(
            gradient, ours[1], fp64[1], tiny=units[1] if dtype in (F32, F64) else None
        )
        assert words == 1 or gradient[0].abs().max() > 0
        assert not gradient[1].any()


def test_all_vocabulary_sizes(device: torch.device, isa: str):
    for words in VOCABULARIES:
        z, y = data(5, words, F32, device)
        fp64 = loss_and_gradient(plain, z.double(), y, label_smoothing=0.1)
        ours = loss_and_gradient(cross_entropy, z, y, label_smoothing=0.1)
        torch.testing.assert_close(ours[0].double(), fp64[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours[1].double(), fp64[1], rtol=1e-5, atol=1e-8)


def test_the_gradient_of_a_row_sums_to_zero(device: torch.device, isa: str):
    z, y = data(6, 2085, F32, device)
    for smoothing in (0.0, 0.3):
        _, gradient = loss_and_gradient(
            cross_entropy, z, y, label_smoothing=smoothing, reduction="sum"
        )
        assert gradient.double().sum(1).abs().max() < 1e-5
        assert gradient.abs().sum(1)[0] > 0.5


@pytest.mark.parametrize("scale", [1e3, 1e-3], ids=str)
def test_huge_and_tiny_logits(scale: float, device: torch.device, isa: str):
    """Without the shift by the maximum exp overflows; with an offset its statistics must not lose
    the small differences."""
    z, y = data(8, 1500, F32, device, scale=scale)
    for shifted in (z, z + 1e4):
        options = {"label_smoothing": 0.2, "reduction": "none"}
        fp64 = loss_and_gradient(plain, shifted.double(), y, **options)
        ours, theirs = (loss_and_gradient(f, shifted, y, **options) for f in (cross_entropy, plain))
        for a, p, r in zip(ours, theirs, fp64, strict=True):
            assert_close_to_reference(a, p, r, tiny=2e-6 * float(r.abs().max()))


def test_rising_maxima_rescale_what_was_summed(device: torch.device, isa: str):
    """Each tile's maximum exceeds the one before, and the other way round."""
    z = torch.linspace(-30, 30, 5000, device=device).repeat(2, 1)
    z[1] = z[1].flip(0)
    y = torch.tensor([7, 7], device=device)
    torch.testing.assert_close(
        cross_entropy(z, y, reduction="none").double(),
        plain(z.double(), y, reduction="none"),
        rtol=1e-6,
        atol=1e-6,
    )


def test_columns_of_minus_infinity(device: torch.device, isa: str):
    """As torch: such a word has no share; as a target its loss is inf, with smoothing every loss
    is."""
    z, _ = data(4, 1100, F32, device)
    z[:, 100:1090] = -torch.inf
    z[3] = -torch.inf
    y = torch.tensor([5, 1095, 200, 5], device=device)
    for smoothing in (0.0, 0.1):
        ours = loss_and_gradient(cross_entropy, z, y, reduction="none", label_smoothing=smoothing)
        theirs = loss_and_gradient(plain, z, y, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(ours[0], theirs[0], equal_nan=True, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours[1][:2], theirs[1][:2], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_and_infinity_are_seen(dtype: torch.dtype, device: torch.device, isa: str):
    z, y = data(4, 1100, dtype, device)
    y[:] = 3
    z[0, 1099], z[1, 0], z[2, 500] = torch.nan, torch.nan, torch.inf
    loss, gradient = loss_and_gradient(cross_entropy, z, y, reduction="none")
    assert loss.isnan().tolist() == [True, True, True, False]
    assert gradient.isnan().any(1).tolist() == [True, True, True, False]


def test_ignored_rows_are_not_read(device: torch.device, isa: str):
    z, y = data(4, 1100, F32, device)
    z[1] = torch.nan
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.1)):
        loss, gradient = loss_and_gradient(
            cross_entropy, z, y, label_smoothing=smoothing, z_loss=z_loss
        )
        assert loss.isfinite()
        assert not gradient[1].any()
        assert gradient[0].any()


def test_all_rows_ignored(device: torch.device, isa: str):
    """As torch: the mean of nothing is nan, its gradient zero; sums are zero."""
    z = torch.randn(3, 10, device=device)
    y = torch.full((3,), 7, device=device)
    loss, gradient = loss_and_gradient(cross_entropy, z, y, ignore_index=7, z_loss=0.1)
    assert loss.isnan()
    assert gradient.unique().tolist() == [0.0]
    assert loss_and_gradient(cross_entropy, z, y, ignore_index=7, reduction="sum")[0] == 0.0


def test_any_shape_and_strides(device: torch.device, isa: str):
    for z in (
        torch.randn(2, 3, 70, device=device),
        torch.randn(2, 3, 80, device=device)[..., 5:75],
        torch.randn(70, 3, 2, device=device).mT.mT.permute(2, 1, 0),
        torch.randn(6, device=device).expand(2, 3, 6),
        torch.randn(0, 5, device=device),
        torch.randn(9, device=device),
    ):
        y = torch.randint(z.shape[-1], z.shape[:-1], device=device)
        options = {"reduction": "none", "label_smoothing": 0.1}
        ours = loss_and_gradient(cross_entropy, z, y, **options)
        theirs = loss_and_gradient(
            lambda z, y, **o: plain(z.reshape(-1, z.shape[-1]), y.reshape(-1), **o).view(y.shape),
            z,
            y,
            **options,
        )
        assert ours[0].shape == y.shape
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_in_place_writes_the_gradient_over_the_logits(device: torch.device, isa: str):
    x, y = (
        torch.randn(6, 40, device=device, requires_grad=True),
        torch.tensor([1, -100, 3, 4, 5, 39], device=device),
    )
    gradients, memory = [], []
    for in_place in (False, True):
        logits = x * 2
        logits.retain_grad()
        loss = cross_entropy(logits, y, in_place=in_place)
        before = logits.detach().clone()
        gradients.append(torch.autograd.grad(loss, [logits, x], retain_graph=in_place))
        memory.append(torch.equal(before, logits))
    assert memory == [True, False]
    assert torch.equal(logits, gradients[0][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation"
    ):  # the logits are gone: a second time is refused
        loss.backward()
    with pytest.raises(ValueError, match="over a leaf tensor"):
        cross_entropy(x, y, in_place=True)


def test_threads_do_not_change_bits(device: torch.device):
    z, y = data(50, 3000, F32, device)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(loss_and_gradient(cross_entropy, z, y, label_smoothing=0.1))
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=str)
def test_parts_of_a_vocabulary_merge_into_the_whole(
    dtype: torch.dtype, device: torch.device, isa: str
):
    """Statistics of [0, 700) and of [700, 1100) and three columns of padding, and their gradients,
    side by side."""
    z, y = data(8, 1100, dtype, device)
    whole = ops.cross_entropy_statistics(z, y, ignore_index=-100, with_sum=True)
    padded = torch.cat(
        [z[:, 700:], torch.full((8, 3), torch.inf, device=device, dtype=dtype)], dim=1
    )
    parts = [(z[:, :700], 0, 700), (padded, 700, 400)]
    options = [{"ignore_index": -100, "first_column": start, "columns": n} for _, start, n in parts]
    found = [
        ops.cross_entropy_statistics(p, y, with_sum=True, **o)
        for (p, _, _), o in zip(parts, options, strict=True)
    ]
    maximum = torch.maximum(found[0][:, 0], found[1][:, 0])
    assert torch.equal(maximum, whole[:, 0])
    kept = y != -100
    for statistics in (whole, *found):
        assert statistics[~kept].tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2  # of an ignored row
    total = sum(s[:, 1] * (s[:, 0] - maximum).exp() for s in found)
    torch.testing.assert_close(total[kept], whole[kept, 1])
    assert torch.equal(found[0][:, 2] + found[1][:, 2], whole[:, 2])
    shifted = sum(
        s[:, 3] + n * (s[:, 0] - maximum) for s, (_, _, n) in zip(found, parts, strict=True)
    )
    torch.testing.assert_close(shifted[kept], whole[kept, 3])
    coefficients = torch.rand(8, 3, device=device, dtype=whole.dtype)
    expected = ops.cross_entropy_gradient(z, y, maximum, coefficients, ignore_index=-100)
    got = [
        ops.cross_entropy_gradient(p, y, maximum, coefficients, **o)
        for (p, _, _), o in zip(parts, options, strict=True)
    ]
    torch.testing.assert_close(torch.cat([got[0], got[1][:, :400]], dim=1), expected)
    assert got[1][:, 400:].unique().tolist() == [0.0]
    assert expected.abs().max() > 0


@pytest.mark.real_device
def test_autocast_and_compile(device: torch.device):
    z, y = data(6, 90, BF16, device)
    function = torch.compile(
        lambda z, y: cross_entropy(z * 2, y, label_smoothing=0.1, in_place=True),
        fullgraph=True,
        backend="aot_eager",
    )
    eager = loss_and_gradient(lambda z, y: cross_entropy(z * 2, y, label_smoothing=0.1), z, y)
    for a, b in zip(loss_and_gradient(function, z, y), eager, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast(device.type, torch.bfloat16):
        assert cross_entropy(z, y).dtype == F32


def test_refusals(device: torch.device):
    z, y = torch.zeros(4, 10, device=device), torch.zeros(4, device=device, dtype=torch.int64)
    for kind, match, call in (
        (
            TypeError,
            "int64, the indices of words, got torch.int32",
            lambda: cross_entropy(z, y.int()),
        ),
        (TypeError, "got torch.int64", lambda: cross_entropy(z.long(), y)),
        (ValueError, r"logits \(4, 10\) on .* targets \(3,\)", lambda: cross_entropy(z, y[:3])),
        (ValueError, "label_smoothing is 1.5", lambda: cross_entropy(z, y, label_smoothing=1.5)),
        (ValueError, "z_loss is -1", lambda: cross_entropy(z, y, z_loss=-1.0)),
        (
            ValueError,
            "reduction is 'avg'; choose one of mean, sum, none",
            lambda: cross_entropy(z, y, reduction="avg"),
        ),
    ):
        with pytest.raises(kind, match=match):
            call()


def test_a_target_that_is_no_word(device: torch.device):
    z, y = torch.randn(2, 3, 10, device=device), torch.zeros(2, 3, device=device, dtype=torch.int64)
    for word in (10, -1):
        y[1, 2] = word
        if device.type == "cpu":
            with pytest.raises(
                ValueError, match=rf"target {word} at \[1, 2\] is no word of a vocabulary of 10"
            ):
                cross_entropy(z, y)
        else:
            assert cross_entropy(z, y, reduction="none").isnan().nonzero().tolist() == [[1, 2]]
    assert cross_entropy(z, y, ignore_index=-1).isfinite()
