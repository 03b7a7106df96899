"""Attention on 1 to 4 ranks against one rank in float64, for every way that heads, groups, masks
and positions come."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops.comm import Communicator
from pyops.tensor_parallel import ParallelAttention, RelativeBias, rotary_tables, set_dropout
from pyops.tensor_parallel.layers.head_groups import check_heads
from tests.grids import full
from tests.tensor_parallel.shared_layers import Case, configured, errors_on_rank, randomise

pytestmark = pytest.mark.on_device

Shape = tuple[int, int]


def plain(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    return layer(x, shape=shape)


def masked(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    """The last key of every sequence but the first is padding."""
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1:, -1] = False
    return layer(x, shape=shape, mask=mask)


def turned(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    return layer(x, shape=shape, rotary=rotary_tables(shape[1], 2))


def dropped(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    set_dropout(layer, seed=3, step=7, shape=shape, first_row=2)
    return layer(x, shape=shape)


class Biased(nn.Module):
    """Attention with T5's bias by distance."""

    def __init__(self, *, causal: bool, heads: int, **shared: Any) -> None:
        super().__init__()
        self.attention = configured(
            ParallelAttention, 8, heads, head_dim=2, causal=causal, bias=False, scale=1.0, **shared
        )
        self.bias = configured(
            RelativeBias,
            heads,
            num_buckets=8,
            max_distance=6,
            bidirectional=not causal,
            group=shared.get("group"),
        )

    def forward(self, x: Tensor, shape: Shape) -> Tensor:
        return self.attention(x, shape=shape, bias=self.bias())


class Crossed(nn.Module):
    """Cross-attention whose memory comes from the same x, so that its gradient is in dx."""

    def __init__(self, *, kv_heads: int, **shared: Any) -> None:
        super().__init__()
        self.attention = configured(
            ParallelAttention, 8, 4, num_kv_heads=kv_heads, cross=True, **shared
        )

    def forward(self, x: Tensor, shape: Shape) -> Tensor:
        return self.attention(x, memory=torch.tanh(x), shape=shape, memory_shape=shape)


def attention(*args: Any, **options: Any) -> Any:
    return partial(configured, ParallelAttention, *args, **options)


CASES = {
    "4 heads": Case(attention(8, 4), 8, plain),
    "4 heads, causal, no bias": Case(attention(8, 4, causal=True, bias=False), 8, plain),
    "5 heads of 2 in 8": Case(attention(8, 5, head_dim=2, causal=True), 8, plain),
    "4 heads, 2 groups": Case(attention(8, 4, num_kv_heads=2, causal=True), 8, plain),
    "6 heads, 3 groups": Case(attention(6, 6, num_kv_heads=3), 6, plain),
    "12 heads, 1 group": Case(attention(12, 12, num_kv_heads=1, causal=True), 12, plain),
    "padding": Case(attention(8, 4), 8, masked),
    "padding, causal, groups": Case(attention(8, 4, num_kv_heads=2, causal=True), 8, masked),
    "rotary": Case(attention(8, 4, head_dim=4, causal=True), 8, turned),
    "rotary, interleaved, groups": Case(
        attention(8, 4, num_kv_heads=2, interleaved=True), 8, turned
    ),
    "bias by distance": Case(partial(Biased, causal=False, heads=4), 8, plain),
    "bias by distance, causal, 5 heads": Case(partial(Biased, causal=True, heads=5), 8, plain),
    "memory": Case(partial(Crossed, kv_heads=4), 8, plain),
    "memory, groups": Case(partial(Crossed, kv_heads=2), 8, plain),
    "dropout": Case(attention(8, 4, causal=True, dropout=0.4), 8, dropped),
    "dropout, groups": Case(attention(8, 4, num_kv_heads=2, dropout=0.4), 8, dropped),
    "dropout, 5 heads": Case(attention(8, 5, head_dim=2, dropout=0.4), 8, dropped),
}
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}


def can_split(name: str, size: int) -> bool:
    return not (
        size == 3 and "group" in name and "12" not in name and "6 heads" not in name
    ) and not (size == 4 and "6 heads" in name)


def errors(
    rank: int, group: dist.ProcessGroup | None, size: int, dtype: torch.dtype
) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        for sp in (False, True)[: 1 if size == 1 else 2]:
            if can_split(name, size):
                key = f"{name}, sequence_parallel={sp}"
                found[key] = errors_on_rank(
                    group, case, shape=(2, 5), dtype=dtype, sequence_parallel=sp
                )
    return found


# Bounds of fp32 are those of the CPU's way to compute attention. Where the gradient of a bias is a
# difference of larger sums, the error of one rank is a draw of its own, which another library of
# products changes by a factor of two.
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.float64) for size in (1, 3)),
        # float64 shows what is added where; float32 that sums of parts lose nothing
        *(full(size, torch.float64) for size in (2, 4)),
        pytest.param(2, torch.float32, marks=pytest.mark.cpu_only),
        *(
            pytest.param(size, torch.float32, marks=[pytest.mark.cpu_only, pytest.mark.full])
            for size in (1, 3, 4)
        ),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_one_rank(world, size: int, dtype: torch.dtype):
    results = world(size).run(errors, size, dtype) if size > 1 else [errors(0, None, 1, dtype)]
    for found in results:
        assert len(found) >= (len(CASES) if size == 1 else 20)
        for name, (shared, alone) in found.items():
            for what, error in shared.items():
                assert error <= max(
                    BOUND[dtype], 4 * alone[what] if dtype == torch.float32 else 0
                ), (name, what, error)


def test_one_rank_is_the_formula():
    """Against scores and softmax written out, with queries, keys and values cut from the weights by
    the documented layout."""
    B, T, H, G, K, D = 2, 4, 6, 2, 4, 8
    x = torch.randn(B, T, D, dtype=torch.float64)
    layer = randomise(
        configured(ParallelAttention, D, H, num_kv_heads=G, head_dim=K, causal=True).double()
    )
    q = (x @ layer.q.weight.t() + layer.q.bias).view(B, T, H, K)
    kv = (x @ layer.kv.weight.t() + layer.kv.bias).view(B, T, G, 2, K)
    y = torch.zeros(B, T, H, K, dtype=torch.float64)
    for h in range(H):
        k, v = kv[:, :, h // (H // G), 0], kv[:, :, h // (H // G), 1]
        scores = torch.einsum("btk,bsk->bts", q[:, :, h], k) / K**0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        y[:, :, h] = scores.softmax(-1) @ v
    expected = y.flatten(2) @ layer.output.weight.t() + layer.output.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    merged = randomise(configured(ParallelAttention, D, H, head_dim=K).double())
    qkv = (x @ merged.qkv.weight.t() + merged.qkv.bias).view(B, T, H, 3, K).permute(3, 0, 2, 1, 4)
    y = functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    expected = y @ merged.output.weight.t() + merged.output.bias
    torch.testing.assert_close(merged(x), expected, rtol=1e-12, atol=1e-12)


def test_bias_by_distance_falls_into_the_buckets_of_t5():
    """Literals from T5's rule: 4 exact buckets a side, then by logarithm up to distance 20."""
    layer = configured(RelativeBias, 1, num_buckets=16, max_distance=20)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(16.0)[:, None])
    assert layer.scores(1, 25)[0, 0, 0].tolist() == [
        0,
        9,
        10,
        11,
        12,
        12,
        13,
        13,
        13,
        14,
        14,
        14,
        14,
        14,
        *[15] * 11,
    ]
    assert layer.scores(4, 1)[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    layer = configured(RelativeBias, 1, num_buckets=8, max_distance=20, bidirectional=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(8.0)[:, None])
    assert layer.scores(10, 3)[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 5, 6]
    assert layer.scores(1, 3)[0, 0, 0].tolist() == [0, 0, 0]


def one_of_each(rank: int, group: dist.ProcessGroup, sp: bool) -> list[tuple[int, int]]:
    """Collectives forward and backward of attention with shared groups, once what only a first call
    does is done."""
    layer = configured(ParallelAttention, 8, 4, num_kv_heads=1, group=group, sequence_parallel=sp)
    comm, found = Communicator.of(group), []
    for _ in range(2):
        x = torch.randn(*((4, 8) if sp else (1, 8, 8)), requires_grad=True)
        before = comm.sequence
        y = layer(x, shape=(1, 8))
        forward = comm.sequence - before
        y.sum().backward()
        found.append((forward, comm.sequence - before - forward))
    return found[1:]


def test_separate_queries_and_keys_share_one_gather_and_one_sum(world):
    assert world(2).run(one_of_each, False) == [[(1, 1)]] * 2
    assert world(2).run(one_of_each, True) == [[(2, 3)]] * 2


def refused(rank: int, group: dist.ProcessGroup, heads: int, groups: int) -> str:
    with pytest.raises(ValueError) as caught:
        configured(ParallelAttention, heads * 2, heads, num_kv_heads=groups, group=group)
    return str(caught.value)


def test_heads_that_cannot_be_split(world):
    for text in world(3).run(refused, 4, 2):
        assert "4 heads in 2 groups can't be split over 3 ranks; 1, 2, 4 ranks can" in text
    for text in world(4).run(refused, 3, 3):
        assert "3 heads in 3 groups can't be split over 4 ranks; 1, 2, 3 ranks can" in text
    for make, words in (
        (
            lambda: configured(ParallelAttention, 8, 4, num_kv_heads=3),
            "3, which does not divide num_heads = 4; choose one of 1, 2, 4",
        ),
        (lambda: ParallelAttention(8, 3), "dim is 8, which num_heads = 3 does not divide"),
        (lambda: configured(ParallelAttention, 8, 2, causal=True, cross=True), "causal"),
        (lambda: configured(ParallelAttention, 8, 2, dropout=1.0), "dropout is 1.0"),
        (
            lambda: configured(ParallelAttention, 8, 2, cross=True)(torch.ones(1, 2, 8)),
            "needs memory=",
        ),
        (
            lambda: ParallelAttention(8, 2)(torch.ones(1, 2, 8), memory=torch.ones(1, 2, 8)),
            "cross=True",
        ),
        (lambda: ParallelAttention(8, 2)(torch.ones(2, 8)), "takes [B, T, dim]"),
        (
            lambda: ParallelAttention(8, 2)(torch.ones(1, 2, 8), mask=torch.ones(1, 2)),
            "mask must be bool",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert words in str(caught.value)


@pytest.mark.cpu_only
def test_a_message_lists_no_more_sizes_than_a_person_reads():
    """Once they were looked for up to the number of heads, which took hours, and all were named."""
    with pytest.raises(
        ValueError, match=r"num_heads = 2147483648; choose one of 1, 2, 4, 8, .*, 4096 and others$"
    ):
        configured(ParallelAttention, 2**31, 2**31, num_kv_heads=3)
    with pytest.raises(
        ValueError, match=r"over 6442450944 ranks; 1, 2, 3, .* 31, 32 and others ranks can"
    ):
        check_heads(2**31, 2**31, 3 * 2**31)
