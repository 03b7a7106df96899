"""EASGD on a quadratic: where its replicas and center diverge, against the eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import VirtualReplica, run_replicas
from tests.grids import full

pytestmark = pytest.mark.cpu_only


def growth(rate: float, alpha: float, replicas: int = 1) -> float:
    """Of |x| over 50 rounds of x^2 / 2, once the faster mode has died out."""

    def body(me: VirtualReplica) -> float:
        net = nn.Module()
        net.x = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        config = LocalSGDConfig(method="easgd", every=1, alpha=alpha)
        outer = LocalSGD(net, optimizer, config, group=me.exchange)
        sizes = []
        for _ in range(200):
            optimizer.zero_grad()
            (0.5 * net.x.square().sum()).backward()
            optimizer.step()
            outer.step()
            sizes.append(abs(net.x.item()))
        return sizes[-1] / max(sizes[-51], 1e-300)

    found = run_replicas(replicas, body)[0]
    assert found is not None
    return found


@pytest.mark.parametrize(("replicas", "rate"), [(1, 2.1), full(1, 2.9), full(2, 2.1), (2, 2.9)])
def test_easgd_diverges_at_the_elasticity_that_theory_says(rate: float, replicas: int):
    """x <- (1 - a) q x + a c, c <- R a q x + (1 - R a) c with q = 1 - rate has an eigenvalue of -1
    at a = (2 + 2 q) / (2 q + R q + R): beyond a rate of 2, which is unstable alone, the center
    keeps replicas together where a is larger. Within one percent."""
    q = 1 - rate
    bound = (2 + 2 * q) / (2 * q + replicas * q + replicas)
    assert growth(rate, 0.99 * bound, replicas) > 1 > growth(rate, 1.01 * bound, replicas)


@pytest.mark.parametrize("rate", [0.1, full(1.0), 1.9])
def test_easgd_is_stable_at_every_elasticity_that_is_allowed(rate: float):
    """The paper's bound, (4 - 2 rate) / (4 - rate), is of elastic steps beside the gradient's;
    behind it, as here, alpha <= 1 / R is enough."""
    for alpha in (0.05, 0.5, 1.0):
        assert growth(rate, alpha) < 1
