"""attention within torch: gradcheck, torch.compile, autocast, memory, counted FLOPs, and every
refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pyops.ops import attention as ops
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, BlockLayout
from tests.ops.attention.cases import state_at

pytestmark = pytest.mark.cpu_only  # of CUDA: tests/ops/triton/interpret_attention.py

B, T, S, H, G, K = 2, 5, 7, 4, 2, 3


def tensors(device: torch.device, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((B, T, H, K), (B, S, G, K), (B, S, G, K), (1, H, T, S), (6, H))
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.full
def test_gradcheck(device: torch.device):
    def call(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        y, lse = ops.attention_with_lse(
            q,
            k,
            v,
            scale=0.7,
            mask=AttentionMask(causal=True, window=(3, None)),
            bias=AttentionBias(scores=scores, table=table, max_distance=6),
            soft_cap=2.0,
            dropout=AttentionDropout(0.3, state_at(2, device)),
        )
        return y, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(call, tensors(device))


def test_gradients_that_are_not_asked_for(device: torch.device):
    """Only the bias is learned; only lse is used; y of a frozen model has no graph."""
    q, k, v, scores, _ = (x.detach() for x in tensors(device))
    scores.requires_grad_()
    ops.attention(q, k, v, bias=scores).sum().backward()
    assert scores.grad is not None
    assert scores.grad.shape == scores.shape
    assert not ops.attention(q, k, v).requires_grad
    q.requires_grad_()
    _, lse = ops.attention_with_lse(q, k, v)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    keys = k.repeat_interleave(2, dim=2)
    weights = (torch.einsum("bthk,bshk->bhts", q, keys) * K**-0.5).softmax(-1)
    torch.testing.assert_close(dq, torch.einsum("bhts,bshk->bthk", weights, keys) * K**-0.5)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (grad,) = torch.autograd.grad(ops.attention(q, k, v).sum(), q, create_graph=True)
        grad.sum().backward()


@pytest.mark.real_device
def test_compiled_without_a_break(device: torch.device):
    torch.manual_seed(0)
    layout = BlockLayout.from_dense(
        torch.ones(1, 1, dtype=torch.bool, device=device), block=16, num_queries=T, num_keys=T
    )

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, state: Tensor) -> Tensor:
        mask = AttentionMask(causal=True, documents=ids, layout=layout)
        return ops.attention(q, k, v, mask=mask, dropout=AttentionDropout(0.3, state)).square()

    ids = torch.zeros(B, T, dtype=torch.int32, device=device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for offset in (0, 8):
        q, k, v = (torch.randn(B, T, 2, K, device=device).requires_grad_() for _ in range(3))
        found = []
        for function in (call, compiled):
            y = function(q, k, v, ids, state_at(offset, device))
            found.append([y, *torch.autograd.grad(y.sum(), (q, k, v))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_autocast_is_that_of_torchs_attention(device: torch.device):
    q, k, v = (x.detach().float() for x in tensors(device)[:3])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, lse = ops.attention_with_lse(q, k, v, bias=torch.zeros(T, S, device=device))
    expected = ops.attention_with_lse(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert (y.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, expected[0])
    assert torch.equal(lse, expected[1])


def test_counted_flops(device: torch.device):
    q, k, v = tensors(device)[:3]
    with FlopCounterMode(display=False) as counter:
        ops.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 2 * 7 * B * H * T * S * K


def test_nothing_of_queries_times_keys_is_saved(device: torch.device):
    n = 512
    q, k, v = (torch.randn(1, n, 1, 8, device=device, requires_grad=True) for _ in range(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.attention(q, k, v, dropout=AttentionDropout(0.1, state_at(0, device)))
    assert sum(t.numel() for t in saved) <= 4 * q.numel() + n + 2


def with_mask(**fields: Any) -> dict[str, Any]:
    return {"mask": AttentionMask(**fields)}


def with_bias(**fields: Any) -> dict[str, Any]:
    return {"bias": AttentionBias(**fields)}


STATE = state_at(0)
IDS = torch.zeros(B, S, dtype=torch.int32)
PLACES = torch.arange(S)
LAYOUT = BlockLayout.from_dense(
    torch.ones(3, 1, 1, dtype=torch.bool), block=16, num_queries=T, num_keys=S
)
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (
        ValueError,
        r"multiple of that of k's.*got 4 and 3 heads",
        {"k": [B, S, 3, K], "v": [B, S, 3, K]},
    ),
    (ValueError, r"k and v \[B, S, G, K\]", {"k": [B, S, G, K + 1]}),
    (ValueError, r"k and v \[B, S, G, K\]", {"v": [B, S + 1, G, K]}),
    (ValueError, r"k and v \[B, S, G, K\]", {"q": [B, T, H]}),
    (TypeError, r"one dtype.*torch.float16", {"v": torch.zeros(B, S, G, K).half()}),
    (ValueError, r"scale is 0", {"scale": 0.0}),
    (ValueError, r"scale is nan", {"scale": float("nan")}),
    (ValueError, r"soft_cap is -1", {"soft_cap": -1.0}),
    (TypeError, r"mask must be an AttentionMask", {"mask": torch.ones(B, S, dtype=torch.bool)}),
    (ValueError, r"window is \(-1, 0\)", with_mask(window=(-1, 0))),
    (
        TypeError,
        r"mask.keys must be torch.bool \[2, 7\]; got.*float32",
        with_mask(keys=torch.ones(B, S)),
    ),
    (ValueError, r"mask.keys must be \[2, 7\]", with_mask(keys=torch.ones(B, T, dtype=torch.bool))),
    (ValueError, r"5 queries and 7 keys need documents of both", with_mask(documents=IDS)),
    (
        TypeError,
        r"queries' documents must be torch.int32",
        with_mask(documents=(IDS[:, :T].long(), IDS)),
    ),
    (
        ValueError,
        r"keys' documents must be \[2, 7\]",
        with_mask(documents=(IDS[:, :T], IDS[:, 1:])),
    ),
    (ValueError, r"keys' documents hold -2", with_mask(documents=(IDS[:, :T], IDS - 2))),
    (
        TypeError,
        r"places of keys must be torch.int64",
        with_mask(places=(PLACES[:T], PLACES.int())),
    ),
    (ValueError, r"places of queries must be \[5\]", with_mask(places=(PLACES, PLACES))),
    (ValueError, r"places of keys hold -1", with_mask(places=(PLACES[:T], PLACES - 1))),
    (
        ValueError,
        r"place 3 stands twice in the places of keys",
        with_mask(places=(PLACES[:T], PLACES.clamp(max=3))),
    ),
    (TypeError, r"layout must be a BlockLayout", with_mask(layout=IDS)),
    (ValueError, r"the layout has 3 heads and q has 4", with_mask(layout=LAYOUT)),
    (
        ValueError,
        r"the layout is for 5 queries and 7 keys",
        {"k": [B, S + 1, G, K], "v": [B, S + 1, G, K], **with_mask(layout=LAYOUT)},
    ),
    (
        TypeError,
        r"bias must be torch.float32, as q, or float32; got",
        {"bias": torch.ones(T, S, dtype=torch.bool)},
    ),
    (TypeError, r"bias must be", {"bias": torch.ones(T, S, dtype=torch.float64)}),
    (
        ValueError,
        r"broadcastable to \[B, H, T, S\] = \[2, 4, 5, 7\]",
        {"bias": torch.ones(T, S - 1)},
    ),
    (ValueError, r"broadcastable", {"bias": torch.ones(1, B, H, T, S)}),
    (ValueError, r"relative biases must be \[num_buckets, 4\]", with_bias(table=torch.ones(8, 3))),
    (ValueError, r"of 4 buckets or more", with_bias(table=torch.ones(3, H))),
    (
        ValueError,
        r"max_distance is 8 and 8 distances",
        with_bias(table=torch.ones(32, H), max_distance=8),
    ),
    (ValueError, r"slopes must be \[4\]", with_bias(slopes=torch.ones(3))),
    (ValueError, r"slopes have no gradient", with_bias(slopes=torch.ones(H, requires_grad=True))),
    (ValueError, r"p is 1.0", {"dropout": AttentionDropout(1.0, STATE)}),
    (ValueError, r"p is -0.1", {"dropout": AttentionDropout(-0.1, STATE)}),
    (ValueError, r"dropout of p = 0.1 needs a state", {"dropout": AttentionDropout(0.1)}),
    (
        TypeError,
        r"state must be torch.int64 \[2\]",
        {"dropout": AttentionDropout(0.1, STATE.int())},
    ),
    (ValueError, r"state must be \[2\]", {"dropout": AttentionDropout(0.1, PLACES)}),
    (
        ValueError,
        r"counter, 0 or more; got -1",
        {"dropout": AttentionDropout(0.1, STATE - STATE - 1)},
    ),
    (ValueError, r"heads 1 to 5 of 4", {"dropout": AttentionDropout(0.1, STATE, first_head=1)}),
    (ValueError, r"row_stride is -1", {"dropout": AttentionDropout(0.1, STATE, row_stride=-1)}),
    (ValueError, r"num_keys is 6", {"dropout": AttentionDropout(0.1, STATE, num_keys=6)}),
    (
        ValueError,
        r"dropout by places needs num_queries",
        {"dropout": AttentionDropout(0.1, STATE), **with_mask(places=(PLACES[:T], PLACES))},
    ),
    (
        ValueError,
        r"num_queries is 5, and the counters of 7",
        {
            "dropout": AttentionDropout(0.1, STATE, num_queries=5, num_keys=S),
            **with_mask(places=(PLACES[2:], PLACES)),
        },
    ),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("error", "words", "change"), REFUSED, ids=[w for _, w, _ in REFUSED])
def test_refused(error: type[Exception], words: str, change: dict[str, Any]):
    given: dict[str, Any] = {"q": [B, T, H, K], "k": [B, S, G, K], "v": [B, S, G, K], **change}
    q, k, v = (
        torch.zeros(x) if isinstance(x, list) else x for x in map(given.pop, ("q", "k", "v"))
    )
    with pytest.raises(error, match=words):
        ops.attention(q, k, v, **given)


@pytest.mark.cpu_only
def test_a_layout_whose_lists_do_not_ascend():
    counts = torch.tensor([[2]], dtype=torch.int32)
    rows = torch.tensor([[[1, 0]]], dtype=torch.int32)
    full = torch.zeros(1, 1, 2, dtype=torch.bool)
    columns = (torch.ones(1, 2, dtype=torch.int32), torch.zeros(1, 2, 1, dtype=torch.int32))
    layout = BlockLayout(
        16, 9, 32, False, counts, rows, full, *columns, torch.zeros(1, 2, 1, dtype=torch.bool)
    )
    q, k = torch.zeros(1, 9, 1, 8), torch.zeros(1, 32, 1, 8)
    with pytest.raises(ValueError, match="does not ascend within 2 blocks"):
        ops.attention(q, k, k, mask=AttentionMask(layout=layout))
