"""States, replicas that die and join, and exchanges that do not come about."""

from __future__ import annotations

import copy

import pytest
import torch

from pyops.comm import CommunicationError
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import run_replicas
from tests.local_sgd.replicas import adam, model, train, values

pytestmark = pytest.mark.cpu_only

STREAMING = LocalSGDConfig(every=4, fragments=2, delay=1, codec="int8", keep_local=0.25)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def copies(outer):
    """Of the global values and the outer momenta."""
    parts = [part for of in outer.fragments for part in of]
    found = [part.weights.detach().clone() for part in parts]
    found += [part.momentum.clone() for part in parts if part.momentum is not None]
    return found


def made(replica, config=STREAMING):
    net = model(seed=replica.number)
    optimizer = adam(net)
    return net, optimizer, LocalSGD(net, optimizer, config, group=replica.exchange)


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_resumed_run_goes_on_bit_for_bit_also_with_an_exchange_on_its_way(stop):
    def whole(replica):
        net, optimizer, outer = made(replica)
        for step in range(1, 11):
            train(net, optimizer, replica.number, step)
            outer.step()
        return values(net), outer.rounds

    def first(replica):
        net, optimizer, outer = made(replica)
        for step in range(1, stop + 1):
            train(net, optimizer, replica.number, step)
            outer.step()
        return copy.deepcopy((net.state_dict(), optimizer.state_dict(), outer.state_dict()))

    saved = run_replicas(2, first)

    def second(replica):
        net, optimizer, outer = made(replica)
        of_net, of_optimizer, of_outer = saved[replica.number]
        net.load_state_dict(of_net)
        optimizer.load_state_dict(of_optimizer)
        outer.load_state_dict(of_outer)
        for step in range(stop + 1, 11):
            train(net, optimizer, replica.number, step)
            outer.step()
        return values(net), outer.rounds

    for (mine, rounds), (theirs, others) in zip(
        run_replicas(2, second), run_replicas(2, whole), strict=True
    ):
        assert same(mine, theirs)
        assert rounds == others == 4


def test_a_replica_that_dies_leaves_everything_as_it_was_and_the_rest_go_on():
    def body(replica):
        net, optimizer, outer = made(replica)
        for step in range(1, 13):
            train(net, optimizer, replica.number, step)
            if replica.number == 1 and step == 6:
                replica.die()  # just before the exchange of which the others hear at step 7
            if step != 7:
                outer.step()
                continue
            mine, left = values(net), copies(outer)
            with pytest.raises(CommunicationError, match="replica 1 died") as caught:
                outer.step()
            assert caught.value.ranks == (1,)
            with pytest.raises(RuntimeError, match="call regroup"):
                outer.step()
            assert same(mine, values(net))
            assert same(left, copies(outer))
            assert outer.rounds == 2
            outer.regroup(replica.regroup({0, 2}))
            assert outer.rounds == 3
        return [p.weights.detach() for of in outer.fragments for p in of], outer.rounds

    first, lost, last = run_replicas(3, body)
    assert lost is None
    assert same(first[0], last[0])
    assert first[1] == last[1] == 5  # each fragment of the first two periods, one of the third


def test_who_joins_while_a_failed_exchange_is_done_again_has_no_say_in_it():
    config = LocalSGDConfig(method="local_sgd", every=2)

    def body(replica):
        net = model(seed=replica.number)
        optimizer = adam(net)
        late = replica.number == 3
        outer = LocalSGD(net, optimizer, config, group=replica.regroup({3} if late else {0, 1, 2}))
        own = []
        if not late:
            for step in (1, 2):
                train(net, optimizer, replica.number, step)
                if replica.number == 1 and step == 2:
                    replica.die()
                own = values(net)
                if step == 1:
                    outer.step()
            with pytest.raises(CommunicationError):
                outer.step()
        outer.regroup(replica.regroup({0, 2, 3}))
        return own, values(net)

    first, _, third, last = run_replicas(4, body)
    for a, b, mean, *others in zip(first[0], third[0], first[1], third[1], last[1], strict=True):
        torch.testing.assert_close(mean, (a + b) / 2, rtol=1e-5, atol=1e-7)
        assert all(torch.equal(mean, other) for other in others)


def test_a_replica_that_joins_begins_with_the_global_values_and_the_outer_momentum():
    config = LocalSGDConfig(every=2)

    def body(replica):
        net = model(seed=replica.number)
        optimizer = adam(net)
        late = replica.number == 2
        group = replica.regroup({2} if late else {0, 1})
        outer = LocalSGD(net, optimizer, config, group=group)
        if not late:
            for step in range(1, 5):
                train(net, optimizer, replica.number, step)
                outer.step()
        outer.regroup(replica.regroup({0, 1, 2}))
        joined = values(net)
        for step in range(5, 9):
            train(net, optimizer, replica.number, step)
            outer.step()
        part = outer.fragments[0][0]
        assert part.momentum is not None
        return joined, part.weights.detach(), part.momentum.clone(), outer.steps

    first, second, third = run_replicas(3, body)
    assert same(first[0], third[0])
    assert same([*first[1:3]], [*third[1:3]])
    assert same([*second[1:3]], [*third[1:3]])
    assert first[3] == third[3] == 8


def test_values_that_are_not_finite_change_nothing_anywhere_and_are_counted():
    def body(replica):
        net, optimizer, outer = made(replica, LocalSGDConfig(every=2, codec="bf16"))
        for step in range(1, 5):
            train(net, optimizer, replica.number, step)
            if replica.number == 1 and step == 2:
                with torch.no_grad():
                    net[0].weight[0, 0] = torch.nan
            before = values(net)
            outer.step()
            if step == 2:
                weights = [v for p in outer.fragments[0] for v in p.views(p.weights)]
                assert same(weights, values(model()))
                assert same(values(net), weights if replica.number == 1 else before)
                memory = outer.fragments[0][0].memory
                assert memory is not None
                assert not memory.worker.any()  # as if nothing had been sent
                assert not memory.overflowed.any()
        assert memory.worker.any()
        return outer.skipped, outer.rounds

    assert run_replicas(2, body) == [(1, 1), (1, 1)]


def test_a_state_goes_to_another_number_of_replicas():
    config = LocalSGDConfig(every=2, codec="onebit")

    def first(replica):
        net, optimizer, outer = made(replica, config)
        for step in range(1, 5):
            train(net, optimizer, replica.number, step)
            outer.step()
        return copy.deepcopy(outer.state_dict())

    saved = run_replicas(2, first)

    def second(replica):
        outer = made(replica, config)[2]
        outer.load_state_dict(saved[min(replica.number, 1)])
        part = outer.fragments[0][0]
        assert part.memory is not None
        return part.weights.detach().clone(), part.memory.worker.clone(), outer.steps

    found = run_replicas(4, second)
    assert all(torch.equal(found[0][0], each[0]) for each in found)
    assert [each[2] for each in found] == [4] * 4
    # what replica 0 left out, and its part of the mean, in which it now counts a fourth
    left = saved[0]["left_out"][0][0]
    expected = left["worker"].clone()
    expected[: left["server"].numel()] += 4 * left["server"]
    assert left["server"].abs().max() > 0
    assert torch.equal(found[0][1], expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (LocalSGDConfig(method="local_sgd", every=4), "saved with method 'diloco'"),
        (LocalSGDConfig(every=4, fragments=2), "saved with fragments 1"),
        (LocalSGDConfig(every=4, codec="bf16"), "saved with codec 'none'"),
    ],
)
def test_the_state_of_another_configuration_is_refused(other, message):
    def body(replica):
        saved = made(replica, LocalSGDConfig(every=4))[2].state_dict()
        with pytest.raises(ValueError, match=message):
            made(replica, other)[2].load_state_dict(saved)

    run_replicas(1, body)
