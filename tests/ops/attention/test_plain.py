"""Which attention goes to torch's kernel: plain attention alone, where the table says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops.attention import attention_table
from pyops.ops import attention as ops
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, contract, plain
from pyops.ops.attention.plain_table import FASTER
from tests.ops.attention.cases import state_at

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
CAUSAL = AttentionMask(causal=True)


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of calls that went to torch, of a table of causal fp32 of 20 to 40 tokens."""
    kind = plain.kind_of(CPU)
    monkeypatch.setitem(FASTER, kind, {("torch.float32", 64, True): ((20, 40), (60, 60))})
    seen: list[int] = []

    def record(q: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        seen.append(q.shape[1])
        return torch_attention(q, *others, **kwargs)

    # Not torch's function itself: torch.compile keeps the set of torch's functions that a
    # TorchFunctionMode may replace, as it finds them at the process's first compilation.
    torch_attention = contract.torch_attention
    monkeypatch.setattr(contract, "torch_attention", record)
    return seen


def qkv_of(T: int, S: int | None = None, K: int = 16, **how: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = ((1, T, 4, K), (1, S or T, 2, K), (1, S or T, 2, K))
    return [torch.randn(s, generator=generator).to(**how).requires_grad_() for s in shapes]


def test_plain_attention_of_the_tables_lengths_is_torchs(torchs: list[int]):
    for T in (19, 20, 40, 41, 59, 60, 61):
        leaves = qkv_of(T)
        y = ops.attention(*leaves, scale=0.3, mask=CAUSAL)
        own, _ = ops.attention_with_lse(*leaves, scale=0.3, mask=CAUSAL)
        for a, b in zip(
            torch.autograd.grad(y.cos().sum(), leaves),
            torch.autograd.grad(own.cos().sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y, own, rtol=1e-5, atol=1e-5)
        assert y.is_contiguous()
    assert torchs == [20, 40, 60]


def test_all_else_is_ours(torchs: list[int]):
    T = 30
    ids = torch.zeros(1, T, dtype=torch.int32)
    places = (torch.arange(T), torch.arange(T))
    hides: list[dict[str, Any]] = [
        {"window": (3, None)},
        {"keys": torch.ones(1, T, dtype=torch.bool)},
        {"documents": ids},
        {"places": places},
    ]
    for more in hides:
        ops.attention(*qkv_of(T), mask=AttentionMask(causal=True, **more))
    adds: list[dict[str, Any]] = [
        {"bias": torch.zeros(T, T)},
        {"bias": AttentionBias(table=torch.zeros(8, 4), max_distance=9)},
        {"bias": AttentionBias(slopes=torch.zeros(4))},
        {"soft_cap": 3.0},
        {"dropout": AttentionDropout(0.1, state_at(0))},
    ]
    for more in adds:
        ops.attention(*qkv_of(T), mask=CAUSAL, **more)
    ops.attention(*qkv_of(T))  # not causal
    ops.attention(*qkv_of(T, 35), mask=CAUSAL)
    ops.attention(*qkv_of(T, K=80), mask=CAUSAL)  # wider than what was measured
    for dtype in (torch.bfloat16, torch.float64):
        ops.attention(*qkv_of(T, dtype=dtype), mask=CAUSAL)
    assert not torchs
    ops.attention(*qkv_of(T), mask=CAUSAL, dropout=AttentionDropout(0.0))
    assert torchs == [T]


def test_a_cpu_that_was_not_measured_uses_ours(torchs: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain, "FASTER", {"another": FASTER[plain.kind_of(CPU)]})
    ops.attention(*qkv_of(30), mask=CAUSAL)
    assert not torchs


def test_compiled_without_a_break(torchs: list[int]):
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, mask=CAUSAL)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=False)
    for T in (30, 41):
        leaves = [x.detach() for x in qkv_of(T)]
        torch.testing.assert_close(compiled(*leaves), call(*leaves))
    assert torchs.count(30) == 2
    assert not torchs.count(41)


def test_lengths_become_ranges():
    no, yes = False, True
    end = attention_table.BEYOND
    for taken, expected in (
        ((no, no, no, no), ()),
        ((yes, no, no, yes), ((1, 1), (4, end))),
        ((no, yes, yes, no), ((2, 3),)),
        ((yes, yes, yes, yes), ((1, end),)),
    ):
        faster = [(n, each) for n, each in enumerate(taken, start=1)]
        assert attention_table.ranges_of(faster) == expected


def test_the_tables_text_is_the_table():
    table = {"CPU": {("torch.float32", 64, True): ((1, 5),), ("torch.bfloat16", 64, False): ()}}
    found: dict[str, Any] = {}
    exec(attention_table.written(table), found)
    assert found["FASTER"] == table
    exec(attention_table.written(FASTER), found)
    assert found["FASTER"] == FASTER
