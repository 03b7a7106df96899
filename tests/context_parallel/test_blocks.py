"""Sparse patterns over ranks: each rank visits the blocks of its queries, the ring those of its
queries and of the keys at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.attention import BigBird, Fixed, Longformer, SlidingWindow
from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, Order
from pyops.context_parallel.layout_parts import common_block, layout_part
from pyops.models import BERT, GPT, BERTConfig, GPTConfig
from tests.context_parallel.rows import Case, alone, on_rank, put_together
from tests.context_parallel.test_attention import compared
from tests.grids import cut

pytestmark = pytest.mark.cpu_only

T = 256


def _case(pattern: Any, *, block: int = 32, causal: bool = True, **options: Any) -> Case:
    layout = pattern.layout(T, heads=4, block=block, causal=causal)
    return Case(T=T, causal=causal, layout=layout, **options)


CASES = {
    "BigBird": _case(BigBird(num_random_blocks=1, seed=2), p=0.2),
    "heads apart": _case(
        BigBird(num_random_blocks=1, seed=2, different_layout_per_head=True), G=2, causal=False
    ),
    "window": _case(SlidingWindow(3), block=16, causal=False, documents=(100, 60, 90)),
    "Longformer and Fixed": _case(Longformer() | Fixed(num_local_blocks=4), table=True),
    "blocks cut up": _case(BigBird(num_random_blocks=1, seed=2), block=128, p=0.1),
}
TEAMS = [
    (2, "gather", None, "zigzag"),
    (2, "ring", None, "zigzag"),
    (2, "ulysses", None, "striped"),
    (4, "gather", None, "contiguous"),
    (4, "ring", None, "contiguous"),
    (4, "ring", 2, "zigzag"),
    (4, "gather", 2, "zigzag"),
]
KEPT = [
    (*TEAMS[0], "BigBird"),
    (*TEAMS[1], "heads apart"),
    (*TEAMS[2], "heads apart"),
    (*TEAMS[3], "window"),
    (*TEAMS[4], "window"),
    (*TEAMS[5], "Longformer and Fixed"),
    (*TEAMS[6], "heads apart"),
    (*TEAMS[1], "blocks cut up"),
    (*TEAMS[0], "blocks cut up"),
]


@pytest.mark.parametrize(
    ("size", "method", "heads", "order", "name"),
    cut([(*team, name) for team in TEAMS for name in CASES], keep=KEPT),
)
def test_patterns_find_what_one_process_finds(
    size: int, method: str, heads: int | None, order: str, name: str
) -> None:
    case = CASES[name]
    found = run_virtual(size, lambda t: on_rank(t, case, method=method, heads=heads, order=order))
    bitwise = () if method == "ring" else ("y", "dq")
    compared(put_together(found), alone(case), bitwise=bitwise)


def test_parts_of_the_ring_without_a_block_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pyops.context_parallel.ring as ring

    made: list[int] = []
    whole = ring.attention_with_lse
    monkeypatch.setattr(
        ring, "attention_with_lse", lambda *args, **kwargs: made.append(1) or whole(*args, **kwargs)
    )

    def parts(case: Case, order: str) -> int:
        made.clear()
        run_virtual(4, lambda t: on_rank(t, case, method="ring", heads=None, order=order))
        return len(made)

    window = _case(SlidingWindow(3), block=16, causal=False)
    assert parts(window, "contiguous") == 4 + 3 + 3
    assert parts(_case(SlidingWindow(3), block=16), "contiguous") == 4 + 3
    assert parts(_case(SlidingWindow(1), block=16, causal=False), "contiguous") == 4
    assert parts(_case(Longformer(), block=16), "contiguous") == 4 + 3 + 2


def test_a_part_has_the_blocks_of_the_whole() -> None:
    layout = BigBird(num_random_blocks=2, seed=3).layout(T, heads=1, block=32)
    seen = layout.tokens()[0]
    order = Order.of("zigzag", length=T, ranks=2)
    for causal in (False, True):
        for queries in order.places:
            for keys in order.places:
                part = layout_part(layout, queries, keys, causal=causal)
                expected = seen[queries][:, keys]
                later = keys[None] > queries[:, None]
                if causal:
                    assert torch.equal(part.tokens()[0] & ~later, expected & ~later)
                    assert (
                        part.counts.sum()
                        < layout_part(layout, queries, keys, causal=False).counts.sum()
                    )
                else:
                    assert torch.equal(part.tokens()[0], expected)


@pytest.mark.parametrize(
    ("name", "length", "ranks", "block", "found"),
    [
        ("contiguous", 256, 2, 64, 64),
        ("zigzag", 256, 2, 64, 64),
        ("zigzag", 256, 4, 64, 32),
        ("zigzag", 192, 2, 64, 16),
        ("zigzag", 192, 2, 48, 48),
        ("contiguous", 40, 2, 16, None),
        ("striped", 256, 2, 16, None),
    ],
)
def test_blocks_that_ranks_hold_whole(
    name: str, length: int, ranks: int, block: int, found: int | None
) -> None:
    assert common_block(block, Order.of(name, length=length, ranks=ranks).places) == found


SIZES: dict[str, Any] = {"vocab_size": 11, "sequence_length": 64, "num_layers": 2, "dim": 16}
PATTERN: dict[str, Any] = {"pattern": BigBird(num_random_blocks=1, seed=2), "pattern_block": 16}


@pytest.mark.parametrize(("method", "order"), [("gather", "zigzag"), ("ring", "contiguous")])
@pytest.mark.parametrize("kind", [GPT, BERT])
def test_models_with_a_pattern_are_those_of_one_rank(kind: Any, method: str, order: str) -> None:
    config = (GPTConfig if kind is GPT else BERTConfig)(
        **SIZES, **PATTERN, num_heads=4, dropout=0.1, attention_dropout=0.2
    )
    tokens = torch.randint(11, (2, 64), generator=torch.Generator().manual_seed(5))

    def gradients(context: ContextRanks | None) -> list[Tensor]:
        model = kind(config, context=context, order=order, dtype=torch.float64)
        model.set_dropout((2, 64), seed=3, step=4)
        total = model.loss(tokens, tokens.roll(1, 1), reduction="sum")
        total.backward()
        return [total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(None)
    found = run_virtual(2, lambda t: gradients(ContextRanks.of(t, method=method)))
    dense = kind(
        type(config)(**SIZES, num_heads=4, dropout=0.1, attention_dropout=0.2), dtype=torch.float64
    )
    dense.set_dropout((2, 64), seed=3, step=4)
    other = dense.loss(tokens, tokens.roll(1, 1), reduction="sum")
    assert abs(float(other.detach() - expected[0])) > 1e-6, "the pattern hides nothing"
    for number, whole in enumerate(expected):
        far = float((sum(each[number] for each in found) - whole).norm())
        assert float(whole.norm()) > 0
        assert far < 1e-10 * float(whole.norm()), number
