"""The search for an order of columns: as good as all orders of 8, never worse than none, and the
same on every machine."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from pyops.ops.sparse.stripe_search import (
    kept_magnitude,
    stripe_search,
    stripe_search_reference,
)

pytestmark = pytest.mark.cpu_only


def uneven(rows: int, columns: int) -> Tensor:
    """Magnitudes whose columns differ in size."""
    scale = torch.randn(columns, dtype=torch.float64).mul(0.7).exp()
    return (torch.randn(rows, columns, dtype=torch.float64) * scale).abs()


def plain_kept(magnitudes: Tensor) -> float:
    """Number by number."""
    total = 0.0
    for row in magnitudes.tolist():
        for at in range(0, len(row), 4):
            total += sum(sorted(row[at : at + 4])[2:])
    return total


def test_eight_columns_are_divided_as_well_as_they_can_be(isa: str):
    for rows in (1, 5, 70):
        magnitudes = uneven(rows, 8)
        order = stripe_search(magnitudes)
        found = plain_kept(magnitudes[:, order])
        divisions = [[*s, *sorted(set(range(8)) - set(s))] for s in combinations(range(8), 4)]
        best = max(plain_kept(magnitudes[:, division]) for division in divisions)
        assert found == pytest.approx(best, rel=1e-14)
        assert kept_magnitude(magnitudes[:, order]) == pytest.approx(found, rel=1e-14)
    assert best > plain_kept(magnitudes) * 1.001


def test_the_kernel_has_the_order_of_the_reference(isa: str):
    for rows, columns, escapes in ((6, 24, 4), (65, 16, 3)):
        magnitudes = uneven(rows, columns)
        order = stripe_search(magnitudes, escapes=escapes, seed=11)
        reference = stripe_search_reference(magnitudes, escapes=escapes, seed=11)
        assert torch.equal(order, reference)
        assert order.sort().values.equal(torch.arange(columns))


def test_more_is_kept_and_escapes_never_lose(isa: str):
    """Of 32 x 64 normal numbers with uneven columns: between plain 2:4 and the larger half."""
    magnitudes = uneven(32, 64)
    total = float(magnitudes.sum())
    half = float(magnitudes.flatten().topk(magnitudes.numel() // 2).values.sum()) / total
    plain = kept_magnitude(magnitudes) / total
    kept = [
        kept_magnitude(magnitudes[:, stripe_search(magnitudes, escapes=escapes)]) / total
        for escapes in (0, 10, 60)
    ]
    assert plain + 0.015 < kept[0] <= kept[1] <= kept[2] < half
    assert kept[2] > kept[0]
    again = magnitudes[:, stripe_search(magnitudes, escapes=0)]
    assert torch.equal(stripe_search(again, escapes=0), torch.arange(64))  # nothing is left


def test_the_same_order_for_any_number_of_threads(isa: str):
    magnitudes, threads = uneven(130, 96), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(stripe_search(magnitudes, escapes=2, seed=5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], torch.arange(96))
    # Not the stripe, but what is in it, depends on the seed
    assert not torch.equal(found[0], stripe_search(magnitudes, escapes=40, seed=6))


def test_equal_columns_stay_where_they_are(isa: str):
    assert torch.equal(stripe_search(torch.ones(3, 16).double()), torch.arange(16))
    assert torch.equal(stripe_search(torch.zeros(0, 8).double()), torch.arange(8))
    assert stripe_search(torch.zeros(3, 0).double()).shape == (0,)


@pytest.mark.parametrize(
    ("magnitudes", "escapes", "message"),
    [
        (torch.ones(3, 6).double(), 0, r"multiple of 4 columns; got \[3, 6\]"),
        (torch.ones(8).double(), 0, r"got \[8\]"),
        (torch.ones(3, 8), 0, r"float64; got torch.float32: call .double\(\)"),
        (-torch.ones(3, 8).double(), 0, r"negative or nan: give w.abs\(\)"),
        (torch.full((3, 8), torch.nan).double(), 0, r"negative or nan"),
        (torch.ones(3, 8).double(), -1, r"escapes must be 0 or more; got -1"),
    ],
)
def test_what_is_refused(magnitudes: Tensor, escapes: int, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        stripe_search(magnitudes, escapes=escapes)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="stripe_search"):
        torch.ops.pyops.stripe_search.default(magnitudes, escapes=escapes, seed=0)
