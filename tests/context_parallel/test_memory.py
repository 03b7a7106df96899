"""Cross-attention over ranks: queries and keys are of rows of other lengths, both shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.ops.attention import AttentionDropout, AttentionMask
from tests.context_parallel.rows import B, Case, K, alone, on_rank, put_together
from tests.context_parallel.test_attention import TEAMS, compared
from tests.grids import cut

pytestmark = pytest.mark.cpu_only

CASES = {
    "longer keys": Case(T=12, S=36, causal=False, p=0.3),
    "shorter keys": Case(T=36, S=12, causal=False, G=2, keys=True),
    "equal": Case(T=24, S=24, causal=False, p=0.2, keys=True),
    "documents and a bias": Case(T=24, S=12, causal=False, documents=(5, 4, 9), scores=(0,), p=0.1),
    "a bias of all queries": Case(T=12, S=24, causal=False, scores=(1, 2), soft_cap=2.0),
}
KEPT = [
    (2, "ring", None, "longer keys"),
    (2, "ulysses", None, "shorter keys"),
    (3, "gather", None, "documents and a bias"),
    (3, "ring", None, "equal"),
    (4, "ring", 2, "longer keys"),
    (4, "gather", 2, "a bias of all queries"),
    (3, "ulysses", None, "documents and a bias"),
]


@pytest.mark.parametrize(
    ("size", "method", "heads", "name"),
    cut([(*team, name) for team in TEAMS for name in CASES], keep=KEPT),
)
def test_cross_attention_finds_what_one_process_finds(
    size: int, method: str, heads: int | None, name: str
) -> None:
    case = CASES[name]
    found = run_virtual(
        size, lambda t: on_rank(t, case, method=method, heads=heads, order="striped")
    )
    bitwise = {"gather": ("y", "dq"), "ulysses": ("y", "dq"), "ring": ()}[method]
    compared(put_together(found), alone(case), bitwise=bitwise)


def test_padding_at_the_end_has_no_counters() -> None:
    """Ten tokens in rows of twelve drop what ten alone do."""
    case = Case(T=10, causal=False, p=0.3)
    expected = alone(case)
    whole = {name: torch.cat([x, x[:, :2]], 1) for name, x in case.tensors().items()}
    weights = torch.nn.functional.pad(case.weights(), (0, 0, 0, 0, 0, 2))
    documents = torch.tensor([[0] * 10 + [-1] * 2], dtype=torch.int32).expand(B, 12)

    def options(counted: int) -> dict[str, Any]:
        dropout = replace(case.options({})["dropout"], num_queries=counted, num_keys=counted)
        return {"mask": AttentionMask(documents=documents), "dropout": dropout}

    def body(transport: Any, method: str) -> dict[str, Any]:
        ranks = ContextRanks.of(transport, method=method)
        row = ContextRow(ranks, Order.of("contiguous", length=12, ranks=ranks.size))
        leaves = {name: row.shard(x).requires_grad_() for name, x in whole.items()}
        with pytest.raises(ValueError, match=r"num_keys|num_queries"):
            row.attention(**leaves, **options(9))
        y = row.attention(**leaves, **options(10))
        y.backward(row.shard(weights))
        grads = {f"d{name}": x.grad for name, x in leaves.items()}
        return {"y": y.detach(), **grads, "orders": row.orders}

    for method in ("gather", "ulysses", "ring"):
        found = put_together(run_virtual(2, lambda t, m=method: body(t, m)))
        for name in ("y", "dq", "dk", "dv"):
            assert not found[name][:, 10:].any(), name
        compared({n: x[:, :10] for n, x in found.items()}, expected, bitwise=())


def test_memory_that_does_not_fit() -> None:
    q, k = torch.randn(1, 8, 2, K), torch.randn(1, 6, 2, K)
    one = ContextRanks.of()
    order = Order.of("contiguous", length=8, ranks=1)
    with pytest.raises(ValueError, match=r"k has 6 tokens, and a rank's part of 8 is 8; .*memory="):
        ContextRow(one, order).attention(q, k, k)
    other = Order.of("contiguous", length=6, ranks=2)
    with pytest.raises(ValueError, match="the order is for 2 ranks, and the group has 1"):
        ContextRow(one, order, other).attention(q, k, k)
    with pytest.raises(ValueError, match="num_keys of the dropout is 8, and the row has 6 tokens"):
        ContextRow(one, order, Order.of("striped", length=6, ranks=1)).attention(
            q, k, k, dropout=AttentionDropout(p=0.1, state=torch.tensor([1, 0]), num_keys=8)
        )

    def body(transport: Any) -> str:
        ranks = ContextRanks.of(transport)
        name = "striped" if ranks.rank else "contiguous"
        memory = Order.of(name, length=12, ranks=2)
        row = ContextRow(ranks, Order.of("zigzag", length=16, ranks=2), memory)
        with pytest.raises(RuntimeError) as caught:
            row.attention(q, k, k)
        return str(caught.value)

    for text in run_virtual(2, body):
        assert "the order of keys is of 12 tokens" in text
