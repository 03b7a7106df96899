"""Attention over ranks is attention of one process: values, gradients, dropped weights, bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.ops.attention import AttentionMask
from tests.context_parallel.rows import B, Case, K, alone, on_rank, put_together
from tests.grids import cut, full

pytestmark = pytest.mark.cpu_only

# name: what is asked of a row of T tokens
CASES = {
    "causal": Case(T=24),
    "to all": Case(T=24, causal=False),
    "one key head": Case(T=24, G=1),
    "two key heads": Case(T=24, G=2, p=0.2),
    "dropout": Case(T=24, p=0.3),
    "documents": Case(T=24, documents=(7, 1, 12), p=0.1),
    "a document to the border": Case(T=24, documents=(6, 6, 6, 3), G=2),
    "window": Case(T=24, window=(4, None)),
    "window to both sides": Case(T=24, causal=False, window=(3, 2), keys=True),
    "bias": Case(T=24, scores=()),
    "one bias of all heads": Case(T=24, scores=(0, 1), G=2),
    "one bias of all queries": Case(T=24, scores=(1, 2), causal=False),
    "table": Case(T=24, table=True, p=0.1),
    "everything": Case(
        T=24,
        G=2,
        window=(9, None),
        documents=(13, 10),
        keys=True,
        p=0.25,
        scores=(0,),
        table=True,
        slopes=True,
        soft_cap=3.0,
    ),
}
TEAMS = [
    (2, "gather", None),
    (2, "ulysses", None),
    (2, "ring", None),
    (3, "gather", None),
    (3, "ulysses", None),
    (3, "ring", None),
    (4, "gather", None),
    (4, "ulysses", None),
    (4, "ring", None),
    (4, "ring", 2),
    (4, "gather", 2),
]
ORDERS = ("zigzag", "contiguous", "striped")


def compared(found: dict[str, Any], expected: dict[str, Any], *, bitwise: tuple[str, ...]) -> None:
    """Everything is the same, relative to its own size."""
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        if name in bitwise:
            assert torch.equal(found[name], whole), f"{name} has other bits"
        size = float(whole.norm())
        assert size > 0, f"{name} is zero, and would be so whatever happened"
        far = float((found[name] - whole).norm()) / size
        assert far < 1e-12, f"{name} is off by {far:.1e} of its size"


def every_case_by_every_method() -> list[tuple[str, int, str, int | None]]:
    """Each case by each method, in the teams of the method by turns; everything in every team."""
    kept = [("everything", *team) for team in TEAMS]
    for turn, name in enumerate(CASES):
        for method in ("gather", "ulysses", "ring"):
            teams = [team for team in TEAMS if team[1] == method]
            kept.append((name, *teams[turn % len(teams)]))
    return kept


@pytest.mark.parametrize(
    ("name", "size", "method", "heads"),
    cut([(name, *team) for name in CASES for team in TEAMS], keep=every_case_by_every_method()),
)
def test_ranks_find_what_one_process_finds(
    name: str, size: int, method: str, heads: int | None
) -> None:
    case = CASES[name]
    order = ORDERS[(size + list(CASES).index(name)) % 3]
    found = run_virtual(
        size, lambda transport: on_rank(transport, case, method=method, heads=heads, order=order)
    )
    bitwise = {"gather": ("y", "dq"), "ulysses": ("y", "dq"), "ring": ()}[method]
    if method == "ulysses" and case.G % size == 0:
        bitwise = ("y", "dq", "dk", "dv")
    compared(put_together(found), alone(case), bitwise=bitwise)


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize(("size", "each"), [(2, 1), (2, 16), (3, 3), (4, 16), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_and_short_rows_of_less_precision(
    method: str, size: int, each: int, dtype: torch.dtype
) -> None:
    causal = size < 8
    case = Case(T=2 * size * each, H=8, G=2, causal=causal, p=0.2, dtype=dtype, rounded=dtype)
    found = run_virtual(
        size, lambda transport: on_rank(transport, case, method=method, heads=None, order="zigzag")
    )
    expected = alone(case)
    whole = put_together(found)
    exact = alone(replace(case, dtype=torch.float64))
    for name, x in expected.items():
        if method != "ring" and name in ("y", "dq"):
            assert torch.equal(whole[name], x)
        tiny = 1e-6 * float(exact[name].norm())
        own = float((x.double() - exact[name]).norm())
        assert float((whole[name].double() - exact[name]).norm()) <= 2 * own + tiny


def numbers(method: str, size: int, heads: int, H: int, G: int, T: int) -> tuple[int, int]:
    """Numbers that each rank receives, forward and backward; T tokens, of width K, in B rows."""
    h, g = H * K, G * K
    c = size // heads
    held = B * T // size
    inner = (2 * h + 2 * max(g, heads * K)) * held * (heads - 1) // heads
    block = 2 * B * (T // c) * (max(g, heads * K) // heads)
    if method == "ring":
        return inner + block * (c - 1), inner + block * (c - 1) + block * (c if c > 1 else 0)
    return inner + block * (c - 1), inner + 2 * block * (c - 1)


@pytest.mark.parametrize(("size", "method", "heads"), [t for t in TEAMS if t[0] != 3])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_each_rank_receives_what_the_formulas_say(
    size: int, method: str, heads: int | None, G: int
) -> None:
    case = Case(T=16, H=8, G=G)
    found = run_virtual(
        size, lambda transport: on_rank(transport, case, method=method, heads=heads, order="zigzag")
    )
    u = heads or (size if method == "ulysses" else 1)
    expected = tuple(8 * n for n in numbers(method, size, u, 8, G, 16))
    assert [each["bytes"] for each in found] == [expected] * size


def test_gradients_of_the_ring_travel_in_float32() -> None:
    case = Case(T=16, H=8, G=2, dtype=torch.bfloat16)
    forward = B * 2 * 2 * K * 16 // 2  # keys and values of the other half
    for size, method, backward in (
        (2, "ring", 2 * forward + 4 * 2 * forward),
        (2, "gather", 4 * forward),
    ):
        found = run_virtual(
            size,
            lambda transport, m=method: on_rank(
                transport, case, method=m, heads=None, order="zigzag"
            ),
        )
        assert [each["bytes"] for each in found] == [(2 * forward, backward)] * 2


def test_parts_that_see_nothing_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyops.context_parallel.ring as ring

    made: list[int] = []
    whole = ring.attention_with_lse
    monkeypatch.setattr(
        ring, "attention_with_lse", lambda *args, **kwargs: made.append(1) or whole(*args, **kwargs)
    )

    def parts(case: Case, order: str) -> int:
        made.clear()
        run_virtual(
            4, lambda transport: on_rank(transport, case, method="ring", heads=None, order=order)
        )
        return len(made)

    assert parts(Case(T=24), "contiguous") == 4 * 5 // 2
    assert parts(Case(T=24), "zigzag") == 16
    assert parts(Case(T=24, causal=False), "contiguous") == 16
    assert parts(Case(T=24, window=(1, None)), "contiguous") == 4 + 3
    assert parts(Case(T=24, causal=False, window=(0, 1)), "contiguous") == 4 + 3
    assert parts(Case(T=24, causal=False, window=(0, 0)), "contiguous") == 4
    assert parts(Case(T=24, causal=False, documents=(6, 6, 6, 6)), "contiguous") == 4


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_the_tiles_that_each_rank_computes(method: str) -> None:
    """A tile of 64 values is not a number in a column of its own: where a tile of queries meets it,
    seen or masked, the result is none either."""
    tiles, size = 8, 4
    case = Case(T=64 * tiles, H=1, G=1, dtype=torch.float32)

    def counted(transport: Any, order: str) -> int:
        row = ContextRow(
            ContextRanks.of(transport, method=method), Order.of(order, length=case.T, ranks=size)
        )
        tensors = case.tensors()
        for tile in range(tiles):
            tensors["v"][:, 64 * tile : 64 * (tile + 1), :, tile] = torch.nan
        q, k, v = (row.shard(tensors[name]) for name in "qkv")
        y = row.attention(q, k, v, mask=AttentionMask(causal=True))
        return int(y[0, :, 0].unflatten(0, (-1, 64)).isnan().any(1).sum())

    found = {
        order: run_virtual(size, lambda t, o=order: counted(t, o))
        for order in ("contiguous", "zigzag")
    }
    assert tiles == K
    assert found == {"contiguous": [3, 7, 11, 15], "zigzag": [9, 9, 9, 9]}
    assert max(found["contiguous"]) >= 1.3 * max(found["zigzag"])


@pytest.mark.parametrize("seed", [*range(10), *(full(seed) for seed in range(10, 300))])
def test_any_row_over_any_ranks(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([1, 2, 3, 4, 6])
    method = draw.choice(["gather", "ulysses", "ring"])
    divisors = [u for u in range(1, size + 1) if size % u == 0]
    heads = None if method == "ulysses" else draw.choice(divisors)
    G = draw.choice([1, 2, 3])
    H = G * draw.choice([n for n in (2, 3, 4, 6) if G * n >= size])
    T = size * draw.randint(1, 6)
    lengths, left = [], T
    while left > 0 and draw.random() < 0.9:
        lengths.append(draw.randint(1, left))
        left -= lengths[-1]
    case = Case(
        T=T,
        H=H,
        G=G,
        causal=draw.random() < 0.7,
        window=draw.choice([None, None, (draw.randint(0, T), draw.choice([None, 0, 2]))]),
        documents=tuple(lengths) if draw.random() < 0.6 else (),
        p=draw.choice([0.0, 0.2]),
        scores=draw.choice([None, (0,), (1, 2)]),
        table=draw.random() < 0.3,
        slopes=draw.random() < 0.3,
        soft_cap=draw.choice([None, 2.0]),
    )
    places = torch.randperm(T, generator=torch.Generator().manual_seed(seed)).view(size, -1)
    order = Order(places if draw.random() < 0.5 else places.sort(1).values)
    found = put_together(
        run_virtual(size, lambda t: on_rank(t, case, method=method, heads=heads, order=order))
    )
    for name, whole in alone(case).items():
        far = float((found[name] - whole).norm())
        assert far <= 1e-11 * max(float(whole.norm()), 1.0), (name, far, case, method, heads)


def test_one_rank_alone_in_any_order() -> None:
    case = CASES["everything"]
    expected = alone(case)
    row = ContextRow(ContextRanks.of(), Order(torch.randperm(case.T)[None]))
    tensors = {
        n: (row.shard(x) if n in "qkv" else x).requires_grad_() for n, x in case.tensors().items()
    }
    y = row.attention(tensors["q"], tensors["k"], tensors["v"], **case.options(tensors))
    y.backward(row.shard(case.weights()))
    found = {"y": row.order.unshard([y.detach()])}
    for name, x in tensors.items():
        found[f"d{name}"] = row.order.unshard([x.grad]) if name in "qkv" else x.grad
    compared(found, expected, bitwise=())


def test_two_rows_of_other_heads_and_uneven_ones() -> None:
    for H, G in ((5, 1), (6, 2), (6, 3), (3, 3), (7, 7)):
        case = Case(T=12, H=H, G=G, p=0.2, table=True)
        found = run_virtual(
            3,
            lambda transport, c=case: on_rank(
                transport, c, method="ulysses", heads=None, order="zigzag"
            ),
        )
        compared(put_together(found), alone(case), bitwise=("y", "dq"))
