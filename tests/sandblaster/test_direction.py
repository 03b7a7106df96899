"""The direction of L-BFGS over shards: that of the plain recursion, from inner products that are
never out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.optim.lbfgs.history import combination
from pyops.sandblaster import SandblasterConfig
from tests.grids import cut
from tests.sandblaster.problem import begin

pytestmark = pytest.mark.cpu_only

ITERATIONS, HISTORY = 20, 4


def two_loops(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """-H g by Nocedal's recursion on whole vectors, the oldest pair first."""
    q, weights = -gradient, []
    for s, y in reversed(pairs):
        weights.append(float(s @ q) / float(y @ s))
        q = q - weights[-1] * y
    if pairs:
        s, y = pairs[-1]
        q = q * (float(s @ y) / float(y @ y))
    for s, y in pairs:
        q = q + (weights.pop() - float(y @ q) / float(y @ s)) * s
    return q


@pytest.mark.parametrize("shards", cut([(1,), (2,), (3,), (4,)], keep=[(3,)]))
def test_the_direction_of_every_iteration_is_that_of_the_plain_recursion(shards: int) -> None:
    """Also: the inner products are those of the vectors as they are, H y = s for the newest pair,
    and the loss falls along the direction."""
    config = SandblasterConfig(portions=5, history_size=HISTORY)
    coordinator, held, _ = begin(config, shards=shards)
    plain, table, lengths = held.call, coordinator._table, []

    def call(operation: str, *arguments: Any) -> list[Any]:
        found = plain(operation, *arguments)
        if operation == "turn":
            rows = torch.cat([shard.rows for shard in held.shards], 1)
            places = [tuple(table.places(pair)[:2]) for pair in table.pairs]
            used = [place for pair in places for place in pair] + [table.last]
            fresh = rows[used] @ rows[used].T
            sizes = fresh.diagonal().sqrt()
            error = (table.products[used][:, used] - fresh).abs() / sizes.outer(sizes)
            assert error.max() <= 1e-12
            direction = torch.cat([shard.direction for shard in held.shards])
            pairs = [(rows[s], rows[y]) for s, y in places]
            expected = two_loops(pairs, rows[-1])
            assert (direction - expected).norm() <= 1e-10 * expected.norm()
            assert direction @ rows[-1] < 0
            if places:
                s, y = places[-1]
                back = combination(table.products, places, y) @ rows
                assert (back + rows[s]).norm() <= 1e-10 * rows[s].norm()
            lengths.append(len(places))
        return found

    held.call = call  # type: ignore[method-assign]
    assert coordinator.run(ITERATIONS).iterations == ITERATIONS
    assert lengths == [min(n, HISTORY) for n in range(ITERATIONS)]
