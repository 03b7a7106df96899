"""What a rank does in the bench of attention over a slow link: forward and backward by each method,
and the same computation without a message.

Runs within `slow_link.Link.run`; times with a barrier before each sample.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.links.slow_link_ranks import Sample
from pyops.context_parallel import METHODS, ContextRanks, ContextRow, Order
from pyops.ops.attention import AttentionMask, attention

__all__ = ["attention_passes"]

MASK = AttentionMask(causal=True)


def attention_passes(
    *, length: int, num_heads: int, num_kv_heads: int, head_dim: int, rounds: int
) -> dict[str, Any]:
    """{method: {"seconds", "sent", "received_bytes"}} of causal attention forward and backward, the
    methods in turn, in "zigzag" order; "compute": [forward, backward] seconds of this rank's
    queries and all keys, every round; "latency": seconds of an exchange of four bytes."""
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    whole = [torch.randn(1, length, n, head_dim, generator=generator) for n in heads]
    size = dist.get_world_size()
    order = Order.of("zigzag", length=length, ranks=size)
    rows = {
        method: ContextRow(ContextRanks.of(dist.group.WORLD, method=method), order)
        for method in METHODS
        if method != "ulysses" or num_heads >= size
    }
    own = [order.shard(x, rank=dist.get_rank()) for x in whole]
    _check(rows, own)
    found: dict[str, Any] = {method: {"seconds": [], "sent": []} for method in rows}
    found["compute"] = []
    for turn in range(rounds):
        for method in rows if turn % 2 == 0 else reversed(rows):
            wire = rows[method].ranks.wire
            assert wire is not None
            before = wire.bytes_received
            with Sample() as sample:
                _passes(rows[method], own)
            found[method]["seconds"].append(sample.seconds)
            found[method]["sent"].append(sample.sent)
            found[method]["received_bytes"] = wire.bytes_received - before
        dist.barrier()
        found["compute"].append(_computed(own, whole, order))
    found["latency"] = _latency()
    return found


def _passes(row: ContextRow, own: list[Tensor]) -> list[Tensor]:
    *leaves, dy = (x.clone().requires_grad_() for x in own)
    y = row.attention(*leaves, mask=MASK)
    y.backward(dy.detach())
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _check(rows: dict[str, ContextRow], own: list[Tensor]) -> None:
    first, *others = (_passes(row, own) for row in rows.values())
    for other in others:
        for a, b in zip(first, other, strict=True):
            if len(first) != 4 or not torch.allclose(a, b, rtol=1e-3, atol=1e-4):
                raise AssertionError("the methods do not agree")


def _computed(own: list[Tensor], whole: list[Tensor], order: Order) -> tuple[float, float]:
    """Seconds of this rank's queries and all keys, forward and backward."""
    q, k, v = (x.clone().requires_grad_() for x in (own[0], *whole[1:3]))
    places = order.index(dist.get_rank()), torch.arange(order.length)
    start = time.perf_counter()
    y = attention(q, k, v, mask=AttentionMask(causal=True, places=places))
    middle = time.perf_counter()
    y.backward(own[3])
    return middle - start, time.perf_counter() - middle


def _latency() -> float:
    x = torch.zeros(1)
    dist.all_reduce(x)
    start = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(x)
    return (time.perf_counter() - start) / 20
