"""One token of a row on every rank, and what is computed of it counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, ContextRow, Order

pytestmark = pytest.mark.cpu_only

T = 12


@pytest.mark.parametrize("place", [0, 5, 11])
def test_gradients_are_summands(place: int) -> None:
    x = torch.randn(2, T, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.arange(1.0, 4.0, dtype=torch.float64)

    def body(transport: Any) -> tuple[Tensor, Tensor, Tensor, ContextRow]:
        ranks = ContextRanks.of(transport)
        row = ContextRow(ranks, Order.of("zigzag", length=T, ranks=ranks.size))
        own, w = row.shard(x).requires_grad_(), weight.clone().requires_grad_()
        y = row.once(row.on_every_rank(own, place=place) * w, place=place)
        y.sum().backward()
        return y.detach(), own.grad, w.grad, row

    for size in (1, 3):
        found = run_virtual(size, body)
        for y, *_ in found:
            assert torch.equal(y, x[:, place] * weight)
        whole = found[0][3].order.unshard([own for _, own, *_ in found])
        expected = torch.zeros_like(x)
        expected[:, place] = weight
        assert torch.equal(whole, expected)
        assert torch.equal(sum(each[2] for each in found), x[:, place].sum(0))
        assert sum(row.holds(place) for *_, row in found) == 1


def test_a_place_that_is_none() -> None:
    row = ContextRow(ContextRanks.of(), Order.of("striped", length=T, ranks=1))
    with pytest.raises(ValueError, match="place 12 is not one of a row of 12 tokens; give one fr"):
        row.on_every_rank(torch.zeros(1, T, 2), place=T)
