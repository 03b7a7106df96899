"""The k-th largest magnitude by counting, against torch.kthvalue, and masks applied in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.sparse.radix_count import (
    BINS,
    keep_bits_,
    keep_bits_reference,
    kth_magnitude,
    radix_count_,
    select_bin,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, many equal ones, zeros of both signs, subnormals, inf."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    x[::3] = (x[::3] * 2).round() / 2
    x[1::7] = 0.0
    x[2::7] = -0.0
    x[3::11] *= 1e-40
    x[4::97] = -torch.inf
    return x.to(dtype).to(device)


def expected(tensors: list[Tensor], k: int) -> tuple[float, int, int]:
    whole = torch.cat([t.flatten().float().abs() for t in tensors])
    value = torch.kthvalue(whole, len(whole) - k + 1).values
    return float(value), int((whole > value).sum()), int((whole == value).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kth_is_that_of_torch(dtype: torch.dtype, device: torch.device, isa: str):
    tensors = [numbers(n, dtype, device) for n in (1, 0, 77, 70_001)]
    tensors.append(numbers(90, dtype, device).view(9, 10).t())  # dense, of other strides
    total = sum(t.numel() for t in tensors)
    for k in (1, 2, 700, total // 2, total - 9000, total):
        found = kth_magnitude(tensors, k)
        assert (found.value, found.above, found.equal) == expected(tensors, k)
    assert found.value == 0.0, "the smallest are zeros"


def test_mixed_dtypes_count_as_float32(device: torch.device):
    tensors = [numbers(500, dtype, device) for dtype in DTYPES]
    for k in (1, 300, 1200):
        found = kth_magnitude(tensors, k)
        assert (found.value, found.above, found.equal) == expected(tensors, k)


def test_parts_of_several_ranks_add_up(device: torch.device):
    whole = numbers(5000, torch.float32, device)
    whole[whole.isinf()] = 3.0
    others = [whole[3000:4000], whole[4000:]]
    value, above, equal = expected([whole], 1234)
    prefixes = [None, int(torch.tensor(value).view(torch.int32)) >> 16]

    def reduce(counts: Tensor) -> None:
        radix_count_(others, counts, prefix=prefixes.pop(0))

    found = kth_magnitude([whole[:3000]], 1234, reduce=reduce)
    assert (found.value, found.above, found.equal) == (value, above, equal)
    assert prefixes == []


def test_a_counter_beyond_32_bits_of_threads(device: torch.device):
    """Counts add to what is there, whatever the number of threads."""
    x = torch.full((300_000,), -1.5, device=device)
    counts = torch.full((BINS,), 5, dtype=torch.int64, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        radix_count_([x, x[:7]], counts)
    finally:
        torch.set_num_threads(threads)
    assert int(counts[0x3FC0]) == 300_012
    assert int(counts.sum()) == 5 * BINS + 300_007


def test_bits_are_kept(device: torch.device, isa: str):
    """Every length around a register, a start within a thread's part, nan at what goes."""
    for n in (0, 1, 7, 8, 9, 63, 64, 65, 129, 70_003):
        for dtype in (*DTYPES, torch.float64):
            x = numbers(n, torch.float32, device).to(dtype)
            alive = torch.rand(n, generator=torch.Generator().manual_seed(1)) < 0.4
            alive[:200] |= torch.arange(n)[:200] >= 64  # a stretch that is all kept
            x[~alive.to(device)] += torch.nan
            bits = _packed(alive).to(device)
            ours, plain = x.clone(), x.clone()
            keep_bits_([ours, ours[:0]], [bits, bits[:0]])
            keep_bits_reference([plain], [bits])
            _same_bits(ours, plain)
            assert torch.equal(ours != 0, (x != 0) & alive.to(device))


def _packed(alive: Tensor) -> Tensor:
    found = [0] * (-(-len(alive) // 8))
    for i, kept in enumerate(alive.tolist()):
        found[i // 8] |= int(kept) << (i % 8)
    return torch.tensor(found, dtype=torch.uint8)


def _same_bits(a: Tensor, b: Tensor) -> None:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.view(whole), b.view(whole))


def test_what_is_refused(device: torch.device):
    x, counts = torch.ones(3, device=device), torch.zeros(BINS, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="at least one tensor"):
        kth_magnitude([], 1)
    for k in (0, 4, -1):
        with pytest.raises(ValueError, match=rf"k is {k} of 3 numbers; give one from 1 to 3"):
            kth_magnitude([x], k)
    for nan in (torch.nan, -torch.nan):
        with pytest.raises(ValueError, match="1 of the numbers are nan"):
            kth_magnitude([torch.cat([x, torch.full((1,), nan, device=device)])], 2)
    quiet = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32).to(device)
    with pytest.raises(ValueError, match="nan"):
        kth_magnitude([x, quiet], 1)
    with pytest.raises(ValueError, match="nan"):
        kth_magnitude([x, quiet], 3)
    with pytest.raises(ValueError, match="k is 9 of 2"):
        select_bin(torch.tensor([1] * 2 + [0] * (BINS - 2)), 9)
    for bad, words in (
        (([x], counts[:5]), "counts must be"),
        (([x.double()], counts), "float32, bfloat16 or float16"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
            radix_count_(*bad)
    with pytest.raises((RuntimeError, ValueError), match="prefix must be None or"):
        radix_count_([x], counts, prefix=40_000)
    assert not counts.any()
    with pytest.raises((RuntimeError, ValueError), match=r"bits\[0\] must be"):
        keep_bits_([x], [torch.zeros(2, dtype=torch.uint8, device=device)])
    with pytest.raises((RuntimeError, ValueError), match="1 tensors and 0 masks"):
        keep_bits_([x], [])
    assert bool(x.all())
