"""Sandblaster L-BFGS beside torch.optim.LBFGS in float64, and over workers that are slow, die or
hang."""

from __future__ import annotations

import pytest
import torch

from pyops.failure import CommunicationError
from pyops.sandblaster import SandblasterConfig, TreeSum, VirtualMember
from tests.sandblaster.problem import batch, begin, network, parameters_of

pytestmark = pytest.mark.cpu_only

ITERATIONS = 20


@pytest.fixture(scope="module")
def torchs() -> tuple[torch.Tensor, float, int]:
    """Parameters, loss and evaluations of torch after the same iterations."""
    net, (x, y) = network(), batch()
    optimizer = torch.optim.LBFGS(
        net.parameters(),
        max_iter=ITERATIONS,
        max_eval=1000,
        history_size=7,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[next(net.parameters())]
    values = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return values, closure().item(), state["func_evals"]


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_iterates_are_those_of_torch(shards: int, torchs) -> None:
    config = SandblasterConfig(portions=5, history_size=7)
    coordinator, held, _ = begin(config, shards=shards)
    report = coordinator.run(ITERATIONS)
    values, loss, evaluations = torchs
    assert (parameters_of(held) - values).abs().max() <= 1e-10
    assert report.loss == pytest.approx(loss, rel=1e-10)
    assert report.iterations == ITERATIONS
    assert report.evaluations == evaluations + 1, "the first point is looked at twice"
    # The gradient's own, then 6 for each pair that is in use or new.
    pairs = [min(n, 8) for n in range(1, ITERATIONS)]
    assert report.products == 1 + sum(6 * n for n in pairs)


SLOW = VirtualMember(seconds=50.0)
CREWS = {
    "one": (VirtualMember(),),
    "two": (VirtualMember(), VirtualMember(seconds=1.7)),
    "three": (VirtualMember(seconds=2.0), VirtualMember(seconds=0.3), VirtualMember()),
    "one is slow": (VirtualMember(), SLOW),
    "one dies": (VirtualMember(), VirtualMember(seconds=1.3, dies=11.0)),
    "one hangs": (VirtualMember(), VirtualMember(seconds=1.3, hangs=1.0)),
}


@pytest.mark.parametrize("run", [1, 2, 4])
@pytest.mark.parametrize("crew", CREWS)
def test_no_crew_changes_a_bit(crew: str, run: int) -> None:
    expected = begin(SandblasterConfig(portions=11), shards=2)
    expected[0].run(4)
    config = SandblasterConfig(portions=11, portions_per_message=run)
    coordinator, held, evaluate = begin(config, shards=2, workers=CREWS[crew])
    coordinator.run(4)
    assert torch.equal(parameters_of(held), parameters_of(expected[1]))
    assert not torch.equal(
        parameters_of(held), torch.cat([p.reshape(-1) for p in network().parameters()])
    )
    if crew in ("one is slow", "one dies", "one hangs"):
        assert evaluate.again > 0
    if crew == "three" and run == 1:
        assert min(evaluate.answered) > 0


def test_backup_copies_take_the_place_of_a_slow_worker() -> None:
    times = {}
    for backups in (True, False):
        config = SandblasterConfig(portions=16, backups=backups)
        workers = (*(VirtualMember(),) * 3, SLOW)
        coordinator, _, evaluate = begin(config, workers=workers)
        coordinator.run(2)
        times[backups] = evaluate.now
    assert times[True] < 0.2 * times[False]


def test_nobody_is_left() -> None:
    workers = (VirtualMember(dies=3.0), VirtualMember(hangs=5.0))
    coordinator, _, _ = begin(SandblasterConfig(portions=4), workers=workers)
    with pytest.raises(CommunicationError, match="portions are left and no worker is: 2 died"):
        coordinator.run(50)


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 13])
def test_a_sum_is_that_of_the_tree_in_any_order(leaves: int) -> None:
    terms = torch.randn(leaves, 50, generator=torch.Generator().manual_seed(leaves))
    expected = None
    for seed in range(4):
        order = torch.randperm(leaves, generator=torch.Generator().manual_seed(seed))
        found = TreeSum(leaves)
        for place, index in enumerate(order.tolist()):
            assert found.complete == (place == leaves)
            found.add(terms[index].clone(), index=index)
        assert expected is None or torch.equal(found.total, expected)
        expected = found.total
    torch.testing.assert_close(expected, terms.sum(0))
    in_turn = TreeSum(leaves)
    for index, term in enumerate(terms):
        in_turn.add(term.clone(), index=index)
    assert in_turn.most <= leaves.bit_length() + 1
    with pytest.raises(ValueError, match="asked for before all are there"):
        _ = TreeSum(2).total


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"portions": 0}, ValueError, "portions is 0; give a whole number, 1 or more"),
        ({"portions": 2.0}, TypeError, "portions is 2.0"),
        ({"portions": 8, "portions_per_message": 3}, ValueError, "is 3; give a power of two"),
        ({"portions": 8, "history_size": 0}, ValueError, "history_size is 0"),
        ({"portions": 8, "lr": 0.0}, ValueError, "lr is 0.0; give more than 0"),
        ({"portions": 8, "tolerance_grad": -1.0}, ValueError, "tolerance_grad is -1.0"),
    ],
)
def test_options_that_are_none(options, error, words: str) -> None:
    with pytest.raises(error, match=words):
        SandblasterConfig(**options)


def test_a_loss_that_is_no_function_of_the_parameters() -> None:
    coordinator, _, evaluate = begin(SandblasterConfig(portions=3))
    plain, calls = evaluate.__call__, iter(range(100))
    coordinator._portions = lambda: plain() * (1 + 0.01 * next(calls))
    with pytest.raises(ValueError, match="at the same parameters; it must be a function of them"):
        coordinator.run(1)
    coordinator, held, evaluate = begin(SandblasterConfig(portions=3))
    held.shards[0].point.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"the loss is nan .* at the first point"):
        coordinator.run(1)


def test_it_ends_at_a_minimum() -> None:
    coordinator, _, _ = begin(SandblasterConfig(portions=3, tolerance_grad=1e-3))
    report = coordinator.run(500)
    assert report.iterations < 500
    assert report.ended == "no component of the gradient is above 0.001"
    assert coordinator.run(5) == report, "nothing follows"
