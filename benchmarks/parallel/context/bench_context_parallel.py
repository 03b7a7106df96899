"""Rows of tokens that 2 ranks share out, one thread each, beside one process that has whole rows.

Causal attention forward and backward by each method and order, and a step of a GPT. "one process"
takes all of it on the first rank, while the other waits: half of its time is what two ranks can
reach at best, and `percent_of_ideal` is how near they come. Beside the time stand the bytes that a
rank receives, and the pairs of tokens that the rank with the most work computes, over the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from pyops.comm import all_reduce
from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.models import GPT, GPTConfig
from pyops.ops.attention import AttentionMask, attention

__all__ = ["run"]

SIZE = 2
HEADS, WIDTH = 8, 64
LENGTHS = (2048, 8192)
METHODS = ("gather", "ulysses", "ring")
MASK = AttentionMask(causal=True)
MODEL = {"vocab_size": 512, "num_layers": 2, "num_heads": 8, "dim": 256, "positions": "rotary"}


def _drawn(length: int, kv_heads: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


class _Attention:
    """Forward and backward of this rank's tokens; gradients in `leaves`."""

    def __init__(self, row: ContextRow, tensors: list[Tensor]) -> None:
        *qkv, self.dy = (row.shard(x) for x in tensors)
        self.row, self.leaves = row, [x.requires_grad_() for x in qkv]

    def __call__(self) -> Tensor:
        for x in self.leaves:
            x.grad = None
        y = self.row.attention(*self.leaves, mask=MASK)
        y.backward(self.dy)
        return y.detach()


class _OneProcess:
    """All of it on the first rank; nothing on others."""

    def __init__(self, tensors: list[Tensor]) -> None:
        *qkv, self.dy = tensors
        self.leaves = [x.clone().requires_grad_() for x in qkv]

    def __call__(self) -> None:
        if dist.get_rank() == 0:
            self.compute()

    def compute(self) -> Tensor:
        for x in self.leaves:
            x.grad = None
        y = attention(*self.leaves, mask=MASK)
        y.backward(self.dy)
        return y.detach()


def _compared(ours: _Attention, theirs: _OneProcess) -> float:
    """The largest difference of the result and the gradients, relative to the largest number."""
    found, whole = [ours()], [theirs.compute()]
    found += [x.grad for x in ours.leaves if x.grad is not None]
    whole += [x.grad for x in theirs.leaves if x.grad is not None]
    worst = 0.0
    for own, all_of_it in zip(found, whole, strict=True):
        expected = ours.row.shard(all_of_it)
        worst = max(worst, float((own - expected).abs().max() / expected.abs().max()))
    if len(found) != 4 or worst > 1e-4:
        raise AssertionError(f"{len(found)} tensors, of which one differs by {worst}")
    return worst


def _facts(ranks: ContextRanks, order: Order, call: Callable[[], object]) -> dict[str, Any]:
    assert ranks.wire is not None
    call()
    before = ranks.wire.bytes_received
    call()
    pairs = order.causal_pairs()
    return {
        "ranks": SIZE,
        "threads": torch.get_num_threads(),
        "received_bytes": ranks.wire.bytes_received - before,
        "most_pairs_over_mean": round(max(pairs) * SIZE / sum(pairs), 3),
    }


def _attention_case(
    length: int, method: str, order: str, kv_heads: int, *, device: torch.device
) -> Case:
    ranks = ContextRanks.of(dist.group.WORLD, method=method)
    row = ContextRow(ranks, Order.of(order, length=length, ranks=SIZE))
    tensors = _drawn(length, kv_heads, device)
    ours, whole = _Attention(row, tensors), _OneProcess(tensors)
    worst = _compared(ours, whole)
    grouped = f", {kv_heads} heads of keys" if kv_heads < HEADS else ""
    return Case(
        bench="context_parallel",
        name=f"attention, cp = {SIZE}, {method}, {order}, {length} tokens{grouped}",
        implementations={"pyops": ours, "one process": whole},
        check=lambda: worst,
        device=device,
        facts={"tokens": length, **_facts(ranks, row.order, ours)},
        observe=_percent_of_ideal,
    )


def _percent_of_ideal(row: Row) -> dict[str, Any]:
    ideal = row["us"]["one process"][1] / SIZE
    return {"percent_of_ideal": round(100 * ideal / row["us"]["pyops"][1], 1)}


class _Step:
    """Loss and gradients of a GPT, summed over the ranks of a row."""

    def __init__(self, length: int, context: ContextRanks | None, device: torch.device) -> None:
        config = GPTConfig(sequence_length=length, **MODEL)  # type: ignore[arg-type]
        self.shared = context is not None
        self.model = GPT(config, context=context, device=device)
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(512, (1, length + 1), generator=generator).to(device)
        self.tokens, self.targets = text[:, :-1], text[:, 1:]

    def compute(self) -> float:
        self.model.zero_grad()
        loss = self.model.loss(self.tokens, self.targets)
        loss.backward()
        if self.shared:
            for p in self.model.parameters():
                assert p.grad is not None
                all_reduce(p.grad)
        return float(loss.detach())

    def __call__(self) -> None:
        if self.shared or dist.get_rank() == 0:
            self.compute()


def _gpt_case(length: int, method: str, *, device: torch.device) -> Case:
    ranks = ContextRanks.of(dist.group.WORLD, method=method)
    ours, whole = _Step(length, ranks, device), _Step(length, None, device)
    error = abs(ours.compute() - whole.compute())
    for (name, own), other in zip(
        ours.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        assert own.grad is not None
        assert other.grad is not None
        far = float((own.grad - other.grad).norm() / other.grad.norm())
        if far > 1e-3:
            raise AssertionError(f"the gradient of {name} differs by {far}")
    order = Order.of("zigzag", length=length, ranks=SIZE)
    return Case(
        bench="context_parallel",
        name=f"GPT step, cp = {SIZE}, {method}, {length} tokens",
        implementations={"pyops": ours, "one process": whole},
        check=lambda: error,
        device=device,
        facts={"tokens": length, **_facts(ranks, order, ours)},
        observe=_percent_of_ideal,
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    for length in LENGTHS:
        made = {
            f"attention {length} {method} {order} {kv}": partial(
                _attention_case, length, method, order, kv, device=device
            )
            for method in METHODS
            for order, kv in (("zigzag", HEADS), ("zigzag", 2), ("contiguous", HEADS))
        }
        made |= {
            f"GPT {length} {method}": partial(_gpt_case, length, method, device=device)
            for method in METHODS
        }
        for name, case in made.items():
            if options.only is None or options.only in name:
                yield case


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return measure_on_ranks(_cases, size=SIZE, options=options)
