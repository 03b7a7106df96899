"""The update rules, bit for bit against plain loops over the replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.local_sgd import LocalSGDConfig
from tests.local_sgd.replicas import adam, model, run, sgd, train, values

pytestmark = pytest.mark.cpu_only


def mean(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total * (1.0 / len(rows))


def set_values(net, tensors) -> None:
    with torch.no_grad():
        for p, t in zip(net.parameters(), tensors, strict=True):
            p.copy_(t)


def torch_adam(net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def plainly(size, steps, *, make, every, meet, dtype=torch.float32):
    """A loop over replicas; meet(old global values, the replicas' values) -> (new global values,
    those of each replica)."""
    nets = [model(dtype=dtype) for _ in range(size)]
    optimizers = [make(net) for net in nets]
    center = values(nets[0])
    for step in range(1, steps + 1):
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train(net, optimizer, number, step)
        if step % every == 0:
            center, own = meet(center, [values(net) for net in nets])
            for net, mine in zip(nets, own, strict=True):
                set_values(net, mine)
    return [values(net) for net in nets]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("make", [sgd, adam])
def test_diloco_with_one_inner_step_and_a_plain_outer_step_is_the_mean_of_plain_steps(make):
    config = LocalSGDConfig(every=1, outer_lr=1.0, outer_momentum=0.0)
    found = run(3, config, 4, make=make)

    def meet(center, rows):
        new = [mean(list(of_replicas)) for of_replicas in zip(*rows, strict=True)]
        return new, [new] * 3

    expected = plainly(3, 4, make=make, every=1, meet=meet)
    for (mine, _), theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert not torch.equal(found[0][0][0], model().state_dict()["0.weight"])


def test_one_replica_with_a_plain_outer_step_is_the_plain_optimizer():
    config = LocalSGDConfig(every=1, outer_lr=1.0, outer_momentum=0.0)
    ((mine, outer),) = run(1, config, 4)
    net = model()
    optimizer = adam(net)
    for step in range(1, 5):
        train(net, optimizer, 0, step)
    assert_same(mine, values(net))
    assert outer.rounds == 4


def test_diloco_with_a_plain_outer_step_is_local_sgd():
    one = run(2, LocalSGDConfig(every=3, outer_lr=1.0, outer_momentum=0.0), 7)
    other = run(2, LocalSGDConfig(method="local_sgd", every=3), 7)
    for (mine, _), (theirs, _) in zip(one, other, strict=True):
        assert_same(mine, theirs)
    assert not torch.equal(one[0][0][0], one[1][0][0])  # the seventh step is each one's own


@pytest.mark.parametrize(
    ("size", "momentum", "dtype"),
    [(2, 0.9, torch.float32), (3, 0.0, torch.float32), (2, 0.9, torch.float64)],
)
def test_diloco_takes_nesterov_steps_along_the_mean_of_what_replicas_moved(size, momentum, dtype):
    lr = 0.6
    make = adam if dtype == torch.float32 else torch_adam
    config = LocalSGDConfig(every=2, outer_lr=lr, outer_momentum=momentum)
    found = run(size, config, 6, make=make, dtype=dtype)
    outer = [torch.nn.Parameter(v.clone()) for v in values(model(dtype=dtype))]
    stepper = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def meet(center, rows):
        for place, p in enumerate(outer):
            p.grad = mean([center[place] - row[place] for row in rows])
        stepper.step()
        new = [p.detach().clone() for p in outer]
        return new, [new] * size

    expected = plainly(size, 6, make=make, every=2, meet=meet, dtype=dtype)
    bounds = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-12}
    for (mine, _), theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, **bounds)


@pytest.mark.parametrize("alpha", [0.25, 0.0])
def test_easgd_attracts_replicas_and_center_by_old_values_of_both(alpha):
    found = run(3, LocalSGDConfig(method="easgd", every=2, alpha=alpha), 5, make=sgd)
    a = alpha or 0.3

    def meet(center, rows):
        new = [c + a * sum(row[place] - c for row in rows) for place, c in enumerate(center)]
        return new, [[x - a * (x - c) for x, c in zip(row, center, strict=True)] for row in rows]

    expected = plainly(3, 5, make=sgd, every=2, meet=meet)
    for (mine, _), theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0][0][0], found[1][0][0])


def test_local_sgd_at_every_step_is_synchronous_sgd_to_rounding():
    found = run(2, LocalSGDConfig(method="local_sgd", every=1), 5, make=sgd)
    net = model()
    optimizer = sgd(net)
    for step in range(1, 6):
        gradients = []
        for number in range(2):
            twin = model()
            set_values(twin, values(net))
            stepper = torch.optim.SGD(twin.parameters(), lr=0.0)
            train(twin, stepper, number, step)
            gradients.append([p.grad for p in twin.parameters()])
        for p, *g in zip(net.parameters(), *gradients, strict=True):
            p.grad = mean(g)
        optimizer.step()
    for mine, _ in found:
        for a, b in zip(mine, values(net), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_post_local_sgd_meets_at_each_of_the_first_steps():
    rounds = []

    def look(replica, outer, step):
        rounds.append((replica.number, outer.rounds))

    run(2, LocalSGDConfig(method="local_sgd", every=3, after=2), 8, each=look)
    assert [n for number, n in rounds if number == 0] == [1, 2, 2, 2, 3, 3, 3, 4]


def test_diloco_takes_the_mean_as_it_is_in_the_first_steps_and_outer_steps_afterwards():
    """Steps 1 to 3 end with a mean; steps 5 and 7 with an outer step, whose momentum is new."""
    config = LocalSGDConfig(every=2, after=3, outer_lr=0.6, outer_momentum=0.9)
    momenta = []

    def look(replica, outer, step):
        if replica.number == 0:
            momenta.append(outer.fragments[0][0].momentum is not None)

    found = run(2, config, 7, each=look)
    assert momenta == [False] * 4 + [True] * 3
    outer = [torch.nn.Parameter(v.clone()) for v in values(model())]
    stepper = torch.optim.SGD(outer, lr=0.6, momentum=0.9, nesterov=True)
    steps = iter(range(1, 8))

    def meet(center, rows):
        step = next(steps)
        if step in (4, 6):
            return center, rows
        means = [mean(list(of_replicas)) for of_replicas in zip(*rows, strict=True)]
        if step > 3:
            for p, old, new in zip(outer, center, means, strict=True):
                p.grad = old - new
            stepper.step()
            means = [p.detach().clone() for p in outer]
        with torch.no_grad():
            for p, new in zip(outer, means, strict=True):
                p.copy_(new)
        return means, [means] * 2

    expected = plainly(2, 7, make=adam, every=1, meet=meet)
    for (mine, _), theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_states_are_forgotten_at_a_meeting_where_that_is_wanted():
    left: list[tuple[int, bool]] = []

    def look(replica, outer, step):
        states = [v for state in outer.optimizer.state.values() for v in state.values()]
        left.append((step, any(bool(torch.as_tensor(v).any()) for v in states)))

    run(2, LocalSGDConfig(every=3, states="reset"), 4, each=look)
    assert {step for step, some in left if not some} == {3}
    left.clear()
    run(2, LocalSGDConfig(every=3), 4, each=look)
    assert all(some for _, some in left)


def test_the_global_values_are_lent_to_the_model_and_taken_back():
    def look(replica, outer, step):
        if step != 3:
            return
        own = values(outer.model)
        with outer.global_values():
            lent = values(outer.model)
        weights = [v for part in outer.fragments[0] for v in part.views(part.weights)]
        assert all(torch.equal(a, b) for a, b in zip(lent, weights, strict=True))
        assert not torch.equal(lent[0], own[0])
        assert all(torch.equal(a, b) for a, b in zip(own, values(outer.model), strict=True))

    run(2, LocalSGDConfig(every=2), 3, each=look)
