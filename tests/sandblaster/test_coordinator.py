"""Sandblaster in virtual time against torch.optim.LBFGS, whoever computes which portion."""

from __future__ import annotations

import math

import pytest
import torch

from pyops.failure import CommunicationError
from pyops.sandblaster import Coordinator, SandblasterConfig, VirtualCluster, VirtualPace
from pyops.sandblaster.sums import PortionSums
from tests.sandblaster.problems import flat, network, portion_loss

pytestmark = pytest.mark.cpu_only


ALONE = (VirtualPace(),)


def cluster(workers=ALONE, *, shards=1, dtype=torch.float64, **options):
    """A coordinator, and the cluster that it leads."""
    config = SandblasterConfig(**{"portions": 11, **options})
    loss = portion_loss(config.portions, dtype)
    found = VirtualCluster(network(dtype), loss, workers, config=config, shards=shards)
    return Coordinator(found, config), found


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("history", [4, 10])  # at 1, torch differs from itself by 7e-10 where
def test_iterates_are_those_of_torch(shards: int, history: int):  # portions are added otherwise
    twin, portion = network(), portion_loss(11)
    theirs = torch.optim.LBFGS(
        twin.parameters(),
        max_iter=1,
        max_eval=25,
        history_size=history,
        line_search_fn="strong_wolfe",
    )

    def closure():
        theirs.zero_grad()
        losses = [portion(twin, number) for number in range(11)]
        for loss in losses:
            loss.backward()
        return sum(loss.detach() for loss in losses)

    leads, ours = cluster(shards=shards, history_size=history)
    for _ in range(20):
        theirs.step(closure)
        loss = closure().item()
        done = leads.iterate()
        leads.settle()
        ours.parameters()
        assert (flat(ours.gradients.model) - flat(twin)).abs().max() <= 1e-10
        assert abs(done.loss - loss) <= 1e-10
    assert done.number == 20
    state = theirs.state[theirs.param_groups[0]["params"][0]]
    assert done.evaluations == state["func_evals"] - 19  # torch evaluates each first point twice


@pytest.mark.parametrize("shards", [1, 2])
def test_an_iteration_has_one_exchange_of_inner_products(shards: int):
    leads, _ = cluster(shards=shards, history_size=3)
    before = 0
    for number in range(1, 9):
        leads.iterate()
        assert leads.exchanges["take"] == leads.exchanges["direct"] == number
        assert leads.history.counted - before <= 6 * 3 + 6
        before = leads.history.counted


WORKERS = {
    "two": [VirtualPace(), VirtualPace(1.7)],
    "three": [VirtualPace(lambda e, r: 1 + (7 * e + 3 * r) % 5) for _ in range(3)],
    "one is lost": [VirtualPace(), VirtualPace(dies=30.5)],
    "one never answers": [VirtualPace(), VirtualPace(math.inf, dies=0.0)],
    "all twice": [VirtualPace(), VirtualPace(1.0 + 1e-9), VirtualPace(40.0)],
}


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("run", [1, 4])
def test_the_bits_do_not_depend_on_who_computed_what_and_when(name: str, run: int):
    alone, one = cluster(dtype=torch.float32)
    ended = alone.minimize(6)
    leads, many = cluster(WORKERS[name], dtype=torch.float32, run=run)
    assert leads.minimize(6) == ended
    leads.settle(), alone.settle()
    assert torch.equal(one.parameters(), many.parameters())


def test_backups_make_a_slow_worker_hold_up_nobody():
    slow = [VirtualPace(), VirtualPace(), VirtualPace(50.0)]
    times = {}
    for backups in (True, False):
        leads, found = cluster(slow, backups=backups)
        leads.minimize(3)
        times[backups] = found.now / leads.evaluations
    assert times[True] <= 7.0  # two compute 10 of 11 portions, and one of them the last again
    assert times[False] == 50.0


def test_without_workers_a_run_is_lost():
    leads, _ = cluster([VirtualPace(dies=2.5)])
    with pytest.raises(CommunicationError, match="all workers are lost"):
        leads.iterate()


@pytest.mark.parametrize("portions", [1, 2, 5, 8, 13, 64])
def test_few_sums_wait_in_any_order_and_a_repeated_one_changes_nothing(portions: int):
    random = torch.Generator().manual_seed(portions)
    values = torch.randn(portions, generator=random).tolist()
    results = set()
    for _ in range(5):
        sums = PortionSums(portions)
        for number in torch.randperm(portions, generator=random).tolist():
            assert sums.add(0, number, values[number])
            assert not sums.add(0, number, values[number])
        results.add(sums.result())
    assert len(results) == 1
    assert abs(results.pop() - math.fsum(values)) < 1e-12
    sums = PortionSums(portions)
    for number, value in enumerate(values):
        assert (sums.result() is None) == (number < portions)
        sums.add(0, number, value)
    assert sums.most <= 1 + math.log2(portions)  # in order, with nothing outstanding


def test_a_loss_that_is_not_finite_ends_the_run_where_it_is():
    config = SandblasterConfig(portions=1)
    model = network()
    found = VirtualCluster(
        model, lambda m, p: (m[0].weight * math.inf).sum(), [VirtualPace()], config=config
    )
    before = found.parameters()
    ended = Coordinator(found, config).minimize(5)
    assert ended.done == "the loss or its gradient is not finite"
    assert torch.equal(found.parameters(), before)


def test_a_loss_that_is_no_function_of_the_parameters_is_refused():
    calls = iter(range(100))

    def noisy(model, portion):
        return (model[0].weight * (1 + 0.1 * next(calls))).square().sum()

    config = SandblasterConfig(portions=2)
    found = VirtualCluster(network(), noisy, [VirtualPace()], config=config)
    with pytest.raises(ValueError, match=r"portion 0 gave the loss .* set dropout to 0"):
        Coordinator(found, config).iterate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"portions": 0}, "portions is 0"),
        ({"run": 3}, "run is 3; give a power of 2"),
        ({"history_size": 0}, "history_size is 0"),
        ({"trials": True}, "trials is True"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"patience": -1.0}, "patience is -1.0"),
        ({"tolerance_grad": -1.0}, "tolerance_grad is -1.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SandblasterConfig(**options)


def test_a_shard_refuses_the_commands_of_an_older_coordinator():
    leads, found = cluster()
    leads.iterate()
    found.term = 2
    leads.iterate()
    found.term = 1
    with pytest.raises(ValueError, match="command of coordinator 1, and coordinator 2 leads"):
        leads.iterate()


def test_no_workers_and_no_iterations_are_refused():
    with pytest.raises(ValueError, match="there are no workers"):
        VirtualCluster(network(), portion_loss(2), [])
    with pytest.raises(ValueError, match="iterations is 0"):
        cluster()[0].minimize(0)
