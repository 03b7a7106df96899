"""What attention holds bit for bit: for any part of the whole, any number of threads, any way to
say what is not seen; and what never reaches a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import attention as ops
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, BlockLayout
from tests.ops.attention.cases import explicit, heads, state_at
from tests.ops.conftest import ISAS, isa  # noqa: F401 - a fixture, found by name

pytestmark = pytest.mark.cpu_only  # of CUDA: tests/ops/triton/interpret_attention.py

FP32 = torch.float32


def qkv_of(
    T: int,
    S: int,
    *,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    K: int = 32,
    dtype: torch.dtype = FP32,
    device: torch.device,
) -> list[Tensor]:
    counts = ((T, H), (S, G), (S, G))
    return [
        heads(B, n, h, K, dtype=dtype, device=device, seed=i) for i, (n, h) in enumerate(counts)
    ]


def results(qkv: list[Tensor], *more: Tensor, dy: Tensor | None = None, **kwargs: Any):
    """y, lse, dq, dk, dv, and the gradients of `more`."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    y, lse = ops.attention_with_lse(*leaves, **kwargs)
    seed = torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype)
    seed = seed if dy is None else dy
    return [y.detach(), lse.detach(), *torch.autograd.grad(y, [*leaves, *more], seed)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), n


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=str)
def test_heads_and_rows_of_a_whole(dtype: torch.dtype, device: torch.device, isa: str):  # noqa: F811
    """Heads 2 and 3, rows 1 and 2, of 6 heads and 3 rows: as a rank of tensor parallelism has
    them."""
    B, T, S, H = 3, 70, 90, 6
    q, k, v = qkv_of(T, S, B=B, H=H, G=3, dtype=dtype, device=device)
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    dropout = AttentionDropout(0.3, state_at(7, device))
    mask = AttentionMask(causal=True)
    whole = results([q, k, v], dy=dy, mask=mask, dropout=dropout)
    part = AttentionDropout(0.3, state_at(7, device), first_row=1, first_head=2, num_heads=H)
    own = [q[1:, :, 2:4], k[1:, :, 1:2], v[1:, :, 1:2]]
    found = results(own, dy=dy[1:, :, 2:4], mask=mask, dropout=part)
    cut = [x[1:, :, 2:4] if n in (0, 2) else x[1:, :, 1:2] for n, x in enumerate(whole)]
    cut[1] = whole[1][1:, 2:4]
    assert_equal(found, cut)


@pytest.mark.cpu_only
def test_the_bits_depend_on_no_number_of_threads(isa: str):  # noqa: F811
    device, before = torch.device("cpu"), torch.get_num_threads()
    # Pieces of work of one head go on for long enough to overtake each other
    long = 2200 if isa == ISAS[-1] else 330
    for H, G, T, S in ((1, 1, long, long - 100), (4, 2, 330, 300)):
        qkv = qkv_of(T, S, B=1, H=H, G=G, device=device)
        found = []
        for threads in (1, 2, 4, 4):
            torch.set_num_threads(threads)
            try:
                scores = torch.linspace(-1, 1, S).view(1, 1, 1, S).requires_grad_()
                table = torch.linspace(-1, 1, 8 * H).view(8, H).requires_grad_()
                bias = AttentionBias(scores=scores, table=table)
                dropout = AttentionDropout(0.2, state_at(1))
                mask = AttentionMask(causal=True)
                found.append(results(qkv, scores, table, mask=mask, bias=bias, dropout=dropout))
            finally:
                torch.set_num_threads(before)
        for other in found[1:]:
            assert_equal(other, found[0])


def test_tiles_that_are_skipped_or_masked_give_the_same_bits(
    device: torch.device,
    isa: str,  # noqa: F811
):
    """One set of pairs said in four ways: by places, by documents, by a layout, and by a bias of
    -inf, with which every tile is visited."""
    T = 256
    qkv = qkv_of(T, T, device=device)
    ids = (torch.arange(T, device=device) // 128).int().expand(2, T)
    blocks = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool, device=device)
    layout = BlockLayout.from_dense(blocks, block=128, num_queries=T, num_keys=T)
    fine = BlockLayout.from_dense(
        blocks.repeat_interleave(8, 0).repeat_interleave(8, 1),
        block=16,
        num_queries=T,
        num_keys=T,
    )
    hidden = torch.zeros(T, T, device=device).masked_fill(ids[0][:, None] != ids[0], -torch.inf)
    ways: list[dict[str, Any]] = [
        {"mask": AttentionMask(documents=ids)},
        {"mask": AttentionMask(layout=layout)},
        {"mask": AttentionMask(layout=fine)},
        {"mask": AttentionMask(), "bias": hidden},
    ]
    found = [results(qkv, **way) for way in ways]
    for other in found[1:]:
        assert_equal(other, found[0])
    # The same with causality: by places, and by -inf in every tile.
    later = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    causal = results(qkv, mask=AttentionMask(causal=True))
    assert_equal(
        causal, results(qkv, bias=torch.zeros(T, T, device=device).masked_fill(later, -torch.inf))
    )


def test_documents_are_rows_of_their_own(device: torch.device, isa: str):  # noqa: F811
    """Bit for bit where a document begins with a tile; padding gives 0 and nothing reaches it."""
    lengths = (64, 150, 42, 30)  # the last is padding
    T = sum(lengths)
    qkv = qkv_of(T, T, device=device)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    ids[-30:] = -1
    found = results(
        qkv, mask=AttentionMask(causal=True, documents=ids.int().expand(2, T).to(device))
    )
    seed = torch.cos(torch.arange(qkv[0].numel(), device=device)).view(qkv[0].shape)
    for first, last in ((0, 64), (64, 214), (214, 256)):
        own = [x[:, first:last] for x in qkv]
        alone = results(own, dy=seed[:, first:last], mask=AttentionMask(causal=True))
        for n, (part, whole) in enumerate(zip(alone, found, strict=True)):
            cut = whole[:, :, first:last] if n == 1 else whole[:, first:last]
            if first % 64 == 0:
                assert torch.equal(part, cut), n
            else:
                torch.testing.assert_close(part, cut, rtol=1e-5, atol=1e-5)
    assert not any(x[:, -30:].any() for n, x in enumerate(found) if n != 1)
    assert (found[1][:, :, -30:] == -torch.inf).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_seen_never_reaches_a_result(
    bad: float,
    device: torch.device,
    isa: str,  # noqa: F811
):
    """Keys behind the mask, later keys, and queries that see nothing hold nan; so does dy there."""
    T = 150
    qkv = qkv_of(T, T, B=1, device=device)
    ids = torch.zeros(1, T, dtype=torch.int32, device=device)
    ids[:, 20:40] = -1
    keys = torch.ones(1, T, dtype=torch.bool, device=device)
    keys[:, 60:70] = False
    mask = AttentionMask(causal=True, keys=keys, documents=ids)
    dy = torch.cos(torch.arange(qkv[0].numel(), device=device)).view(qkv[0].shape)
    expected = results(qkv, dy=dy, mask=mask)
    unseen = torch.zeros(T, dtype=torch.bool, device=device)
    unseen[20:40] = True
    dirty = [x.clone() for x in qkv]
    dirty[0][:, unseen] = bad
    for x in dirty[1:]:
        x[:, unseen] = bad
        x[:, 60:70] = bad
    dirty_dy = dy.clone()
    dirty_dy[:, unseen] = bad
    found = results(dirty, dy=dirty_dy, mask=mask)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        finite = b.isfinite()
        torch.testing.assert_close(a[finite], b[finite], rtol=1e-4, atol=1e-5)
    assert not found[0][:, unseen].any()
    assert (found[1][..., unseen] == -torch.inf).all()
    assert not any(x[:, unseen].any() for x in found[2:])


def test_a_later_key_changes_nothing(device: torch.device, isa: str):  # noqa: F811
    qkv = qkv_of(140, 140, device=device)
    for t in (5, 63, 64, 100):
        changed = [x.clone() for x in qkv]
        for x in changed[1:]:
            x[:, t + 1 :] = torch.nan
        whole = ops.attention_with_lse(*qkv, mask=AttentionMask(causal=True))
        found = ops.attention_with_lse(*changed, mask=AttentionMask(causal=True))
        torch.testing.assert_close(found[0][:, : t + 1], whole[0][:, : t + 1], rtol=1e-5, atol=1e-6)
        assert torch.equal(found[1][..., : t + 1], whole[1][..., : t + 1])
        changed = [x.clone() for x in qkv]
        for x in changed[1:]:
            x[:, t + 1 :] = 1e4
        found = ops.attention_with_lse(*changed, mask=AttentionMask(causal=True))
        assert torch.equal(found[0][:, : t + 1], whole[0][:, : t + 1])


def test_strides_of_every_kind(device: torch.device, isa: str):  # noqa: F811
    """[B, H, T, K], a packed qkv, an expanded row, and a last dimension with gaps."""
    B, T, H, K = 2, 40, 3, 16
    packed = torch.randn(B, T, 3, H, K, device=device)
    plain = [packed[:, :, i].contiguous() for i in range(3)]
    expected = results(plain)
    kinds = {
        "packed": [packed[:, :, i] for i in range(3)],
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain],
        "gaps": [torch.stack([x, x], dim=-1)[..., 0] for x in plain],
    }
    for name, qkv in kinds.items():
        found = results(qkv)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
    row = plain[0][:1].expand(B, T, H, K)
    dy = torch.ones(1, device=device).expand(B, T, H, K)
    assert_equal(
        results([row, *plain[1:]], dy=dy), results([row.clone(), *plain[1:]], dy=dy.clone())
    )


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
def test_merged_parts_are_the_whole(dtype: torch.dtype, device: torch.device, isa: str):  # noqa: F811
    """Keys in three parts, by places; one sees nothing for some queries; with gradients, also of
    lse."""
    T, S = 70, 150
    qkv = qkv_of(T, S, dtype=dtype, device=device)
    parts = [torch.arange(S, device=device)[n::3] for n in (2, 0, 1)]
    queries = torch.arange(T, device=device)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention_with_lse(q, k, v, mask=AttentionMask(causal=True))

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = lse = None
        for part in parts:
            mask = AttentionMask(causal=True, places=(queries, part))
            other = ops.attention_with_lse(q, k[:, part], v[:, part], mask=mask)
            y, lse = other if y is None else ops.merge(y, lse, *other)
        return y, lse

    found = []
    for call in (whole, merged):
        leaves = [x.detach().requires_grad_() for x in qkv]
        y, lse = call(*leaves)
        loss = (y * y.detach().cos()).sum() + lse.sin().sum()
        found.append([y.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_merge_of_nothing(device: torch.device):
    y = torch.randn(1, 4, 2, 8, device=device, requires_grad=True)
    lse = torch.randn(1, 2, 4, device=device, requires_grad=True)
    nothing, none = torch.zeros_like(y), torch.full_like(lse, -torch.inf)
    for pair in ((y, lse, nothing, none), (nothing, none, y, lse)):
        found = ops.merge(*pair)
        assert torch.equal(found[0], y)
        assert torch.equal(found[1], lse)
        dy, dlse = torch.autograd.grad(found[0].sum() + found[1].sum(), (y, lse))
        assert (dy == 1).all()
        assert (dlse == 1).all()
    found = ops.merge(nothing, none, nothing, none)
    assert not found[0].any()
    assert (found[1] == -torch.inf).all()
    with pytest.raises(ValueError, match=r"merge: need y and other_y of one shape"):
        ops.merge(y, lse.transpose(1, 2), y, lse)


def test_sizes_of_zero(device: torch.device, isa: str):  # noqa: F811
    for B, T, S in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        y, lse, dq, dk, dv = results(qkv_of(T, S, B=B, K=8, device=device))
        assert (y.shape, dq.shape, dk.shape) == ((B, T, 4, 8), (B, T, 4, 8), (B, S, 2, 8))
        assert not any(x.any() for x in (y, dq, dk, dv))
        assert (lse == -torch.inf).all()


@pytest.mark.cpu_only
def test_errors_of_16_bit_gradients_do_not_grow_with_the_length():
    """Sums are kept in float32: no worse than explicit scores with weights in 16 bits and sums in
    32."""
    T = 2048
    q, k, v = qkv_of(T, T, B=1, H=1, G=1, dtype=torch.bfloat16, device=torch.device("cpu"))
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = 32**-0.5
    mask, bias = AttentionMask(causal=True), AttentionBias()
    found = results([q, k, v], dy=dy, mask=mask, scale=scale)[3:]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    y, _ = explicit(*wide, scale=scale, mask=mask, bias=bias)
    exact = torch.autograd.grad(y, wide, dy.double())[1:]
    # dS and P in 16 bits, products of 16 bits summed in float32
    scores = (q[0, :, 0].float() @ k[0, :, 0].float().t() * scale).masked_fill(
        torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf
    )
    weights, dy1 = scores.softmax(-1), dy[0, :, 0].float()
    dp = dy1 @ v[0, :, 0].float().t()
    ds = (weights * (dp - (weights * dp).sum(-1, keepdim=True))).bfloat16().float()
    plain = [ds.t() @ q[0, :, 0].float() * scale, weights.bfloat16().float().t() @ dy1]
    for a, b, e in zip(found, plain, exact, strict=True):
        e = e[0, :, 0]
        ours = (a[0, :, 0].double() - e).norm() / e.norm()
        theirs = (b.bfloat16().double() - e).norm() / e.norm()
        assert ours <= 1.1 * theirs
