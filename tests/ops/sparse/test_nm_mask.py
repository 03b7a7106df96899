"""N of M by magnitude: every kernel has the bits of a stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.sparse.nm_mask import nm_mask, nm_mask_reference
from pyops.pruning import unpack_bits

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def kept_by_sorting(w: Tensor, n: int, m: int, dim: int) -> Tensor:
    """bool, of w's shape: the first n of each group after a stable sort, largest first."""
    groups = w.double().abs().unflatten(dim, (-1, m)).movedim(dim + 1, -1)
    groups = torch.where(groups.isnan(), torch.inf, groups)
    order = groups.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    kept = torch.zeros(groups.shape, dtype=torch.bool).scatter_(-1, order, True)
    return kept.movedim(-1, dim + 1).flatten(dim, dim + 1)


def odd_weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Many equal magnitudes of both signs, zeros of both signs, subnormals, an infinity."""
    w = torch.randint(-3, 4, shape).to(dtype)
    w = torch.where(torch.rand(shape) < 0.5, torch.randn(shape).to(dtype), w)
    w = torch.where(torch.rand(shape) < 0.2, torch.tensor(-0.0, dtype=dtype), w)
    least = torch.finfo(dtype).tiny / 4
    w = torch.where(torch.rand(shape) < 0.1, torch.tensor(least, dtype=dtype), w)
    if w.numel():
        w.view(-1)[-1] = -torch.inf
    return w


def test_by_hand(isa: str):
    w = torch.tensor([[0.3, -0.9, 0.1, 0.5, -2.0, 1.0, -2.0, 2.0]])
    masked, bits = nm_mask(w, 2, 4)
    assert torch.equal(masked, torch.tensor([[0.0, -0.9, 0.0, 0.5, -2.0, 0.0, -2.0, 0.0]]))
    assert bits.tolist() == [0b01011010]
    nan = torch.tensor([[0.0, torch.nan, torch.inf, -0.0]])
    assert nm_mask(nan, 1, 4)[1].tolist() == [0b0010]
    assert nm_mask(nan, 3, 4)[1].tolist() == [0b0111]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_against_a_stable_sort(dtype: torch.dtype, isa: str):
    for shape, dim, (n, m) in (
        ((5, 132), 1, (2, 4)),
        ((3, 64), 1, (1, 4)),
        ((7, 36), 1, (3, 4)),
        ((2, 8), 1, (4, 4)),
        ((12, 70), 0, (2, 4)),
        ((3, 8, 3, 3), 1, (2, 4)),
        ((2, 3, 24), 2, (2, 8)),
        ((9, 48), 1, (5, 16)),
        ((4, 66), 1, (2, 3)),
        ((64, 33), 0, (31, 32)),
        ((0, 8), 1, (2, 4)),
    ):
        w = odd_weights(shape, dtype)
        masked, bits = nm_mask(w, n, m, dim=dim)
        kept = kept_by_sorting(w, n, m, dim)
        found = unpack_bits(bits, w.numel()).view(shape)
        assert torch.equal(found, kept), (shape, dim, n, m)
        assert torch.equal(masked, torch.where(kept, w, torch.zeros_like(w)))
        assert len(bits) == -(-w.numel() // 8)
        if w.numel():
            groups = found.unflatten(dim, (-1, m)).sum(dim + 1)
            assert bool((groups == n).all())
            assert not masked[~kept].signbit().any()  # +0
        for a, b in zip((masked, bits), nm_mask_reference(w, n=n, m=m, dim=dim), strict=True):
            assert torch.equal(a, b)


@pytest.mark.cpu_only
def test_the_same_bits_for_any_number_of_threads_and_any_strides(isa: str):
    w, threads = torch.randn(192, 1028), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((*nm_mask(w, 2, 4), *nm_mask(w, 2, 4, dim=0)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    turned = nm_mask(w.t(), 2, 4, dim=0)
    assert torch.equal(turned[0], found[0][0].t())
    assert not turned[1].equal(found[0][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 5}, r"1 <= n <= m <= 32; got 5 of 4"),
        ({"n": 0}, r"got 0 of 4"),
        ({"m": 64}, r"got 2 of 64"),
        ({"dim": 2}, r"dim must be one of \[3, 8\]; got 2"),
        ({"dim": 0}, r"dim 0 of \[3, 8\] must be a multiple of m = 4.*or make it 4 wide"),
        ({"dtype": torch.int8}, r"got torch.int8: prune before quantizing"),
    ],
)
def test_what_is_refused(change: dict, message: str):
    options = {"n": 2, "m": 4, "dim": 1} | change
    w = torch.ones(3, 8).to(options.pop("dtype", F32))
    with pytest.raises((ValueError, TypeError), match=message):
        nm_mask(w, options["n"], options["m"], dim=options["dim"])
    if w.dtype == F32:
        with pytest.raises((ValueError, RuntimeError), match="nm_mask"):
            torch.ops.pyops.nm_mask.default(w, **options)
