"""Counts of numbers by their bit patterns: what they say of quantiles and of ranges, and that it
does not depend on who counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyops.quantized import Int8, IntN, decode
from pyops.quantized.calibration import Histogram
from pyops.quantized.formats import scales_of, to_codes
from pyops.tensor_parallel import Ranks
from tests.grids import full

pytestmark = pytest.mark.cpu_only


def counted(x: Tensor) -> Histogram:
    histogram = Histogram()
    histogram.update(x)
    return histogram


def numbers(n: int = 20000) -> Tensor:
    """Of both signs, of many sizes, zeros of both signs among them."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(3)) ** 3
    x[:3] = torch.tensor([0.0, -0.0, 1e-30])
    return x


def test_bins_by_hand():
    """1.0 is the pattern 3F80 0000; 1 + 2^-7 begins the next bin, and -2 is in a bin of its own."""
    counts = counted(torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 2**-7, -2.0, 0.0])).counts
    assert counts.nonzero().flatten().tolist() == [0, 0x3F80, 0x3F81, 0xC000]
    assert counts[[0, 0x3F80, 0x3F81, 0xC000]].tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("q", [0.0, 0.001, 0.3, 0.5, 0.9, 0.999, 0.9999, 1.0])
def test_quantiles_within_one_bin(q: float):
    x = numbers()
    histogram = counted(x)
    for found, values in ((histogram.quantile(q), x), (histogram.magnitude_quantile(q), x.abs())):
        exact = float(torch.quantile(values, q, interpolation="higher"))
        below = float(torch.quantile(values, q, interpolation="lower"))
        tiny = 1e-38  # 0 is in one bin with the smallest subnormal numbers
        assert below - abs(below) * 2**-7 <= found <= exact + abs(exact) * 2**-7 + tiny
    assert histogram.quantile(1.0) == float(x.max())
    assert histogram.magnitude() == float(x.abs().max())


def test_counting_again_adds():
    x = numbers()
    parts = Histogram()
    for part in x.split(777):
        parts.update(part)
    whole = counted(x)
    assert torch.equal(parts.counts, whole.counts)
    assert len(parts) == len(x)
    assert (parts.lowest, parts.highest) == (whole.lowest, whole.highest)
    sixteen = counted(x.bfloat16())
    assert len(sixteen) == len(x)
    assert not torch.equal(sixteen.counts, whole.counts)


@pytest.mark.parametrize(
    "format",
    [Int8(per="tensor"), IntN(3, per="tensor"), IntN(4, per="tensor", symmetric=False)],
    ids=str,
)
def test_the_clip_of_least_error(format: Int8 | IntN):
    """That of the numbers themselves, or one whose error is hardly larger."""
    x = torch.cat([numbers(), torch.tensor([40.0])])
    histogram = counted(x)

    def error(fraction: float) -> float:
        ends = (torch.tensor(end) for end in histogram.range(format, fraction))
        return float(
            (decode(to_codes(x, *scales_of(*ends, format), format)) - x).double().square().sum()
        )

    found = histogram.clip_of_least_error(format)
    errors = {h / 100: error(h / 100) for h in range(20, 101)}
    assert errors[found] <= 1.002 * min(errors.values())
    assert error(1.0) > (1.0 if format.bits == 8 else 1.05) * errors[found]


def test_entropy_clips_a_far_end():
    """Of normal numbers with one that is far away hardly anything is worth its range; of uniform
    ones all is."""
    normal = torch.randn(50000, generator=torch.Generator().manual_seed(0))
    far = counted(torch.cat([normal, torch.tensor([60.0])]))
    kept = far.clip_of_least_divergence(128) * 60
    assert 3.0 < kept < 12.0
    uniform = counted(torch.rand(50000, generator=torch.Generator().manual_seed(0)))
    assert uniform.clip_of_least_divergence(128) > 0.95
    assert math.isclose(float(far._equal_bins().sum()), 50001, rel_tol=1e-9)


def test_what_is_refused():
    histogram = counted(torch.ones(3))
    with pytest.raises(ValueError, match=r"x of shape \[2\] has a number that is not finite"):
        histogram.update(torch.tensor([1.0, torch.nan]))
    assert len(histogram) == 3
    with pytest.raises(ValueError, match=r"q is 1\.5"):
        histogram.quantile(1.5)
    with pytest.raises(ValueError, match="nothing was counted"):
        Histogram().quantile(0.5)


def _on_ranks(rank: int, group: object, ranks: int) -> tuple[Tensor, float, float, float]:
    histogram = counted(numbers().tensor_split(ranks)[rank])
    histogram.reduce(Ranks.of(group))
    return (
        histogram.counts,
        histogram.magnitude(),
        histogram.quantile(0.99),
        histogram.clip_of_least_error(Int8(per="tensor")),
    )


@pytest.mark.parametrize("ranks", [2, full(3)])
def test_the_same_on_any_number_of_ranks(world, ranks: int):
    counts, *rest = _alone()
    for found in world(ranks).run(_on_ranks, ranks):
        assert torch.equal(found[0], counts)
        assert list(found[1:]) == rest


def _alone() -> tuple[Tensor, float, float, float]:
    histogram = counted(numbers())
    return (
        histogram.counts,
        histogram.magnitude(),
        histogram.quantile(0.99),
        histogram.clip_of_least_error(Int8(per="tensor")),
    )
