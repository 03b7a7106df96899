"""Parameters that are moved, cast or replaced after `recompute.apply`: what is computed again is
what the model has now."""

from __future__ import annotations

import pytest
import torch

from pyops import recompute
from tests.test_moved import HARMLESS, MOVES, network, x_of

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("name", [*MOVES, *HARMLESS])
def test_gradients_are_those_without_recomputation(name):
    call = (MOVES | HARMLESS)[name]
    plain, again = network(), network()
    recompute.apply(again, ["0", "2"])
    for model in (plain, again):
        model(x_of(model)).square().mean().backward()
        model.zero_grad()
        call(model)
        model(x_of(model)).float().square().mean().backward()
    pairs = list(zip(plain.parameters(), again.parameters(), strict=True))
    assert len(pairs) == 6
    for p, q in pairs:
        if p.grad is None:
            assert name == "frozen"
            assert q.grad is None
            continue
        assert p.grad.abs().sum() > 0
        assert torch.equal(p.grad, q.grad), name
        assert p.grad.dtype == q.dtype
