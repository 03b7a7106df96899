"""What the cost model says is received, is received; and which method it takes for the fastest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import AttentionShape, context_cost
from tests.context_parallel.rows import B, Case, K, on_rank
from tests.context_parallel.test_attention import TEAMS
from tests.grids import cut

pytestmark = pytest.mark.cpu_only

SIZES = ((8, 8, None), (8, 2, None), (8, 1, 36), (5, 1, None), (6, 3, 12))  # H, G, S
KEPT = [
    (2, "ring", None, SIZES[0]),
    (3, "ulysses", None, SIZES[3]),
    (3, "gather", None, SIZES[2]),
    (4, "ring", 2, SIZES[1]),
    (4, "ulysses", None, SIZES[4]),
    (4, "gather", 2, SIZES[2]),
]


@pytest.mark.parametrize(
    ("size", "method", "heads", "sizes"),
    cut([(*team, sizes) for team in TEAMS for sizes in SIZES], keep=KEPT),
)
def test_bytes_and_messages_are_those_of_the_model(
    size: int, method: str, heads: int | None, sizes: tuple[int, int, int | None]
) -> None:
    H, G, S = sizes
    case = Case(T=24, S=S, H=H, G=G, causal=False, dtype=torch.float32)
    found = run_virtual(
        size, lambda t: on_rank(t, case, method=method, heads=heads, order="striped")
    )
    shape = AttentionShape(24, H, K, num_kv_heads=G, num_keys=S or 0, rows=B, dtype=torch.float32)
    cost = context_cost(shape, ranks=size, method=method, heads=heads)
    for number, one_pass in enumerate((cost.forward, cost.backward)):
        received = [each["bytes"][number] for each in found]
        if H % size == 0:
            assert set(received) == {one_pass.received_bytes}
        assert max(received) == one_pass.received_bytes
        assert {each["messages"][number] for each in found} == {one_pass.messages}
        assert sum(one_pass.hidden) <= one_pass.received_bytes


def _order(shape: AttentionShape, *, ranks: int, compute: float, bandwidth: float) -> list[str]:
    seconds = {
        method: context_cost(shape, ranks=ranks, method=method).seconds(
            bandwidth=bandwidth, compute=(compute, 2 * compute)
        )
        for method in ("gather", "ulysses", "ring")
    }
    return sorted(seconds, key=lambda method: seconds[method])


def test_the_fastest_method_follows_from_heads_ranks_and_the_link() -> None:
    many = AttentionShape(8192, 16, 64, dtype=torch.float32)
    few = AttentionShape(8192, 16, 64, num_kv_heads=2, dtype=torch.float32)
    slow: dict[str, Any] = {"compute": 0.0, "bandwidth": 1e6}
    assert _order(many, ranks=8, **slow) == ["ulysses", "gather", "ring"]
    assert _order(few, ranks=2, **slow)[0] == "gather"
    hides: dict[str, Any] = {"compute": 10.0, "bandwidth": 1e9}
    assert _order(few, ranks=4, **hides)[0] == "ring"


def test_a_pass_waits_for_what_it_does_not_hide() -> None:
    shape = AttentionShape(100, 1, 5, dtype=torch.float32)  # 4 kB of keys and values
    ring = context_cost(shape, ranks=2, method="ring")
    assert (ring.forward.received_bytes, ring.backward.received_bytes) == (2000, 2000 + 4000)
    assert ring.forward.seconds(bandwidth=1000.0, latency=0.5) == pytest.approx(2.5)
    assert ring.forward.seconds(bandwidth=1000.0, compute=8.0) == pytest.approx(8.0)
    assert ring.forward.seconds(bandwidth=1000.0, compute=2.0) == pytest.approx(2.0 + 1.0)
    assert ring.backward.seconds(bandwidth=1000.0, latency=0.5, compute=6.0) == pytest.approx(
        3.0 + 3.0 + 2.5
    )
    gather = context_cost(shape, ranks=2, method="gather")
    assert gather.seconds(bandwidth=1000.0, latency=0.5, compute=(1.0, 2.0)) == pytest.approx(
        (2.0 + 0.5 + 1.0) + (4.0 + 1.0 + 2.0)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AttentionShape(0, 1, 1), "length is 0; it must be 1 or more"),
        (lambda: AttentionShape(8, 4, 1, num_kv_heads=3), "num_kv_heads is 3, which does not div"),
        (
            lambda: context_cost(AttentionShape(8, 4, 1), ranks=2, method="all"),
            "method is 'all'; choose one of gather, ulysses, ring",
        ),
        (
            lambda: context_cost(AttentionShape(8, 2, 1), ranks=4, method="ulysses"),
            "heads is 4 of 4 ranks and 2 heads",
        ),
        (
            lambda: context_cost(AttentionShape(9, 2, 1), ranks=2, method="ring"),
            "length is 9, which 2 ranks do not divide",
        ),
    ],
)
def test_refusals(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
