"""LBFGS against torch.optim.LBFGS in float64: the same iterates, from 6 m inner products."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pyops.optim import LBFGS
from pyops.optim.lbfgs.history import History, combination
from pyops.optim.lbfgs.line_search import strong_wolfe

pytestmark = pytest.mark.cpu_only


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network, and a batch for it."""
    random = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 2)
    x = torch.randn(40, 6, generator=random).to(dtype)
    return net, x, torch.randn(40, 4, generator=random).to(dtype)


def closure(net: nn.Module, optimizer, x: Tensor, y: Tensor):
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    return evaluate


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("history", [1, 4, 10])
def test_iterates_are_those_of_torch(history: int, line_search: str | None):
    net, x, y = problem()
    twin = copy.deepcopy(net)
    lr = 1.0 if line_search else 0.2
    options = {"lr": lr, "max_iter": 1, "max_eval": 25, "history_size": history}
    ours = LBFGS(net.parameters(), **options, line_search_fn=line_search)
    theirs = torch.optim.LBFGS(twin.parameters(), **options, line_search_fn=line_search)
    first = flat(net)
    for _ in range(20):
        a = ours.step(closure(net, ours, x, y))
        b = theirs.step(closure(twin, theirs, x, y))
        assert abs(a.item() - b.item()) <= 1e-10 * b.item()
        assert (flat(net) - flat(twin)).abs().max() <= 1e-10
    assert (flat(net) - first).norm() > 0.1
    state, expected = (o.state[o.param_groups[0]["params"][0]] for o in (ours, theirs))
    assert (state["n_iter"], state["func_evals"]) == (expected["n_iter"], expected["func_evals"])


def test_many_iterations_in_one_step_are_those_of_torch():
    net, x, y = problem()
    twin = copy.deepcopy(net)
    options = {"max_iter": 20, "max_eval": 40, "history_size": 7}
    ours = LBFGS(net.parameters(), **options)
    theirs = torch.optim.LBFGS(twin.parameters(), **options, line_search_fn="strong_wolfe")
    ours.step(closure(net, ours, x, y))
    theirs.step(closure(twin, theirs, x, y))
    assert (flat(net) - flat(twin)).abs().max() <= 1e-10
    state = ours.state[ours.param_groups[0]["params"][0]]
    assert state["n_iter"] == 20


def test_an_iteration_takes_six_inner_products_for_each_pair():
    random = torch.Generator().manual_seed(0)
    history = History(50, size=4, dtype=torch.float64, device="cpu")
    seen: list[int] = []

    def reduce(numbers: Tensor) -> Tensor:
        seen.append(len(numbers))
        return numbers

    history.reduce = reduce
    history.begin(torch.randn(50, generator=random).double())
    for _ in range(7):
        s = torch.randn(50, generator=random).double()
        history.add(s, history.gradient + s * torch.rand(50, generator=random).add(0.5).double())
    assert seen == [1, 6, 12, 18, 24, 30, 30, 30]  # the pair that goes is still beside the new one
    assert history.counted == sum(seen)


def test_the_direction_is_that_of_the_plain_recursion_over_parts_of_the_vectors():
    random = torch.Generator().manual_seed(1)
    steps = [torch.randn(30, generator=random).double() for _ in range(5)]
    bends = [s * torch.rand(30, generator=random).add(0.5).double() for s in steps]
    start = torch.randn(30, generator=random).double()
    whole = History(30, size=3, dtype=torch.float64, device="cpu")
    parts = [History(n, size=3, dtype=torch.float64, device="cpu") for n in (11, 19)]
    whole.begin(start)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:11], x[11:]

    gathered: list[Tensor] = []
    for each, x in zip(parts, both(start), strict=True):
        each.begin(x)
    gradient = start
    for s, bend in zip(steps, bends, strict=True):
        gradient = gradient + bend
        whole.add(s, gradient)
        for each, step, g in zip(parts, both(s), both(gradient), strict=True):
            each.add(step, g)
    q = -gradient
    rho = [1 / float(b @ s) for s, b in zip(steps[-3:], bends[-3:], strict=True)]
    a = []
    for s, b, r in reversed(list(zip(steps[-3:], bends[-3:], rho, strict=True))):
        a.append(r * float(s @ q))
        q = q - a[-1] * b
    q = q * float(bends[-1] @ steps[-1]) / float(bends[-1] @ bends[-1])
    for s, b, r in zip(steps[-3:], bends[-3:], rho, strict=True):
        q = q + (a.pop() - r * float(b @ q)) * s
    torch.testing.assert_close(whole.direction(), q, rtol=1e-12, atol=1e-12)
    # the same coefficients from the sums of the parts' inner products
    total = sum(each.products for each in parts)
    assert isinstance(total, Tensor)
    places = [(place, 4 + place) for place in whole.pairs]
    delta = combination(total, places, 8)
    torch.testing.assert_close(delta, whole.coefficients(), rtol=1e-11, atol=1e-12)
    gathered = [delta @ each.rows for each in parts]
    torch.testing.assert_close(torch.cat(gathered), q, rtol=1e-11, atol=1e-11)


def test_a_pair_without_curvature_is_left_out_whatever_its_length():
    for scale in (1e-6, 1.0):
        history = History(3, size=2, dtype=torch.float64, device="cpu")
        history.begin(torch.zeros(3, dtype=torch.float64))
        step = torch.tensor([scale, 0.0, 0.0], dtype=torch.float64)
        assert history.add(step, step)  # torch drops the short one: 1e-12 is less than 1e-10
        assert not history.add(step, step * 0.5)  # bends down
        assert len(history.pairs) == 1


def test_a_state_goes_on_bit_for_bit():
    net, x, y = problem(torch.float32)
    ours = LBFGS(net.parameters(), max_iter=3, history_size=4)
    for _ in range(3):
        ours.step(closure(net, ours, x, y))
    twin = copy.deepcopy(net)
    again = LBFGS(twin.parameters(), max_iter=1, history_size=4)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    for _ in range(2):
        ours.step(closure(net, ours, x, y))
        again.step(closure(twin, again, x, y))
    assert torch.equal(flat(net), flat(twin))
    with pytest.raises(ValueError, match="the state's history has shape"):
        LBFGS([nn.Parameter(torch.zeros(3))]).load_state_dict(ours.state_dict())


def test_a_loss_that_is_not_finite_changes_nothing_and_one_on_the_way_is_stepped_back_from():
    p = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    optimizer = LBFGS([p])

    def undefined() -> Tensor:
        optimizer.zero_grad()
        loss = (p - 1).log().sum()
        loss.backward()
        return loss

    optimizer.step(undefined)
    assert p.item() == 0.5

    def wall() -> Tensor:  # not a number beyond 0, which the first trial crosses
        optimizer.zero_grad()
        loss = (p - p.log()).sum() * 3
        loss.backward()
        return loss

    optimizer = LBFGS([p], max_iter=10, lr=5.0)
    with torch.no_grad():
        p.fill_(3.0)
    optimizer.step(wall)
    assert abs(p.item() - 1) < 1e-6


def test_the_strong_wolfe_conditions_hold_at_what_the_search_finds():
    def loss(t: float) -> tuple[float, float]:
        return -t / (t * t + 2), (t * t - 2) / (t * t + 2) ** 2  # More and Thuente, 1994, (5.1)

    for first in (1e-3, 1e-1, 10.0, 1e3):
        start, slope = loss(0.0)
        search = strong_wolfe(start, slope, first=first, largest=1.0, trials=25)
        trial = next(search)
        try:
            while True:
                trial = search.send(loss(trial.step))
        except StopIteration as end:
            step = end.value
        found, there = loss(step)
        assert found <= start + 1e-4 * step * slope
        assert abs(there) <= 0.9 * abs(slope)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_size": 0}, "history_size is 0"),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"tolerance_grad": -1.0}, "tolerance_grad is -1.0"),
        ({"line_search_fn": "armijo"}, "line_search_fn is 'armijo'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LBFGS([nn.Parameter(torch.zeros(2))], **options)


def test_parameters_and_closures_that_do_not_go_with_it_are_refused():
    with pytest.raises(TypeError, match=r"parameter 0 is torch.bfloat16.* use float32 or float64"):
        LBFGS([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="all form one vector"):
        LBFGS([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())])
    with pytest.raises(ValueError, match="takes one param group, got 2"):
        LBFGS([{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(2)])
    p = nn.Parameter(torch.ones(2))
    optimizer = LBFGS([p])
    calls = iter(range(10))

    def noisy() -> Tensor:
        optimizer.zero_grad()
        loss = (p * (1 + 0.1 * next(calls))).square().sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"gave 2.0 and then 2.4.* set dropout to 0"):
        optimizer.step(noisy)
    assert torch.equal(p, torch.ones(2))
