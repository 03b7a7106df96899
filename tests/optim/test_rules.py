"""SGD, Lion and Adagrad against torch's own (Lion: its authors' code) in float64, and everything
around the step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pyops.optim import SGD, Adagrad, Lion, fuse_into_backward
from tests.grids import full
from tests.optim.pairs import (
    assert_as_torch,
    assert_equal,
    assert_moved,
    give_gradients,
    parameters,
    run,
    twins,
)
from tests.optim.rules import RULES, names

STEPS = 6
EVERY = pytest.mark.parametrize("name", names())
OF_TORCH = pytest.mark.parametrize("name", names(torch_has=True))


@EVERY
@pytest.mark.parametrize("maximize", [False, True])
def test_as_torch(name, maximize, device):
    ours, theirs, options, states = RULES[name]
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    before = [p.detach().clone() for p in a]
    mine, plain, exact = (
        make(ps, **options, maximize=maximize) for make, ps in ((ours, a), (theirs, b), (theirs, c))
    )
    run([mine, plain, exact], [a, b, c], steps=STEPS)
    assert_moved(before, a)
    assert_as_torch(a, b, c, steps=STEPS)
    for state in states:
        assert_as_torch(
            *([o.state[p][state] for p in ps] for o, ps in ((mine, a), (plain, b), (exact, c))),
            steps=STEPS,
        )
    assert all(mine.state[p]["step"].item() == STEPS for p in a)


MUTATIONS = {
    "momentum": [
        {"lr": 0.01},
        {"weight_decay": 0.0},
        {"momentum": 0.7},
        {"dampening": 0.0},
        {"maximize": True},
    ],
    "nesterov": [{"nesterov": False}],
    "lion": [{"lr": 0.01}, {"weight_decay": 0.0}, {"betas": (0.952, 0.77)}, {"maximize": True}],
    "adagrad": [
        {"lr": 0.1},
        {"lr_decay": 0.0},
        {"weight_decay": 0.0},
        {"initial_accumulator_value": 0.0},
        {"eps": 1e-2},
    ],
}


@pytest.mark.parametrize(
    ("name", "mutation"), [(n, m) for n, each in MUTATIONS.items() for m in each], ids=str
)
def test_the_comparison_sees_a_wrong_option(name, mutation):
    ours, theirs, options, _ = RULES[name]
    a = parameters()
    b, c = twins(a), twins(a, torch.float64)
    run(
        [ours(a, **{**options, **mutation}), theirs(b, **options), theirs(c, **options)],
        [a, b, c],
        steps=STEPS,
    )
    with pytest.raises(AssertionError):
        assert_as_torch(a, b, c, steps=STEPS)


def test_defaults_are_those_of_torch():
    for ours, theirs in ((SGD, torch.optim.SGD), (Adagrad, torch.optim.Adagrad)):
        mine, plain = ours(parameters()).param_groups[0], theirs(parameters()).param_groups[0]
        assert {k: v for k, v in mine.items() if k in plain and k != "params"} == {
            k: v for k, v in plain.items() if k != "params"
        }
    lion = Lion(parameters()).param_groups[0]
    assert (lion["lr"], lion["betas"], lion["weight_decay"]) == (1e-4, (0.9, 0.99), 0.0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_step_as_float32(name, dtype, device):
    ours, _, options, _ = RULES[name]
    a = parameters(dtype=dtype, device=device)
    b = twins(a, torch.float32)
    mine, full = ours(a, **options, master_weights=True), ours(b, **options)
    run([mine, full], [a, b], steps=STEPS)
    assert_equal([mine.state[p]["master"] for p in a], b)
    assert_equal(a, [p.to(dtype) for p in b])


@EVERY
def test_clip_copies_and_zeroed_gradients(name, device):
    """In one pass what torch does in four."""
    ours, theirs, options, _ = RULES[name]
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in a]
    mine = ours([{"params": a, "copies": copies}], **options, max_grad_norm=0.7, zero_grad=True)
    plain, exact = theirs(b, **options), theirs(c, **options)
    for step in range(3):
        give_gradients(a, b, c, seed=step)
        norm = nn.utils.clip_grad_norm_(b, 0.7)
        nn.utils.clip_grad_norm_(c, 0.7)
        for optimizer in (mine, plain, exact):
            optimizer.step()
        assert mine.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        assert not any(p.grad.any() for p in a)
    # The factor is rounded once more than in torch.
    assert_as_torch(a, b, c, steps=3 * STEPS)
    assert all(torch.equal(x, p.detach().bfloat16()) for x, p in zip(copies, a, strict=True))


@EVERY
def test_a_gradient_that_is_not_finite_skips_the_step(name, device):
    ours, _, options, _ = RULES[name]
    a = parameters(device=device)
    b = twins(a)
    mine, plain = ours(a, **options, max_grad_norm=1e6), ours(b, **options)
    run([mine, plain], [a, b], steps=1)
    give_gradients(a, seed=7)
    a[0].grad[2, 3] = torch.inf
    before = [p.detach().clone() for p in a]
    mine.step()
    assert_equal(a, before)
    run([mine, plain], [a, b], steps=2, first=1)
    assert_equal(a, b)


@EVERY
def test_a_nan_is_seen_in_the_parameter(name, device):
    ours, _, options, _ = RULES[name]
    a = parameters(((40,),), device=device)
    give_gradients(a, seed=0)
    a[0].grad[[3, 39]] = torch.nan
    ours(a, **options).step()
    assert a[0].isnan().nonzero().flatten().tolist() == [3, 39]


@EVERY
def test_lr_as_a_tensor_is_read_every_step(name, device):
    ours, _, options, _ = RULES[name]
    a = parameters(device=device)
    b = twins(a)
    lr = torch.tensor(options["lr"], device=device)
    rest = {key: value for key, value in options.items() if key != "lr"}
    mine, plain = ours(a, lr=lr, **rest), ours(b, lr=lr.item(), **rest)
    for rate in (0.013, 0.5):
        lr.fill_(rate)
        plain.param_groups[0]["lr"] = lr.item()
        run([mine, plain], [a, b], steps=2)
        assert_equal(a, b)


@EVERY
def test_resumed_bit_for_bit_with_stochastic_rounding(name, device):
    ours, _, options, _ = RULES[name]
    narrow = {"state_dtype": torch.bfloat16, "stochastic_rounding": True}
    a = parameters(dtype=torch.bfloat16, device=device)
    first = ours(a, **options, **narrow, seed=77)
    run([first], [a], steps=3)
    b = twins(a)
    second = ours(b, **narrow)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run([first, second], [a, b], steps=3, first=3)
    assert_equal(a, b)
    to_nearest = twins(parameters(dtype=torch.bfloat16, device=device))
    run([ours(to_nearest, **options, state_dtype=torch.bfloat16)], [to_nearest], steps=6)
    assert any(not torch.equal(x.detach(), y.detach()) for x, y in zip(a, to_nearest, strict=True))


@OF_TORCH
def test_torch_to_ours_to_torch(name, device):
    """Two steps each, against six steps of one optimizer."""
    ours, theirs, options, _ = RULES[name]
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    run([theirs(b, **options), theirs(c, **options)], [b, c], steps=6)
    optimizers = [theirs(a, **options), ours(a), theirs(a)]
    for turn, optimizer in enumerate(optimizers):
        if turn:
            optimizer.load_state_dict(copy.deepcopy(optimizers[turn - 1].state_dict()))
        run([optimizer], [a], steps=2, first=2 * turn)
    assert_as_torch(a, b, c, steps=6)


def test_momentum_that_is_turned_on_and_off_in_mid_run():
    """As in torch: a new buffer begins with the whole gradient, one that was there before goes
    on."""
    a = parameters()
    b, c = twins(a), twins(a, torch.float64)
    optimizers = [
        make(ps, lr=0.1, momentum=0.0, dampening=0.4)
        for make, ps in ((SGD, a), (torch.optim.SGD, b), (torch.optim.SGD, c))
    ]
    for first, momentum in ((0, 0.0), (2, 0.9), (4, 0.0), (6, 0.8)):
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        run(optimizers, [a, b, c], steps=2, first=first)
        assert_as_torch(a, b, c, steps=first + 2)


def test_a_buffer_without_a_value_is_none():
    """Old state_dicts of torch say so."""
    a = parameters(((4,),))
    optimizer = SGD(a, lr=0.1, momentum=0.9, dampening=0.5)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(saved)
    give_gradients(a, seed=0)
    optimizer.step()
    assert_equal([optimizer.state[a[0]]["momentum_buffer"]], [a[0].grad])


def test_the_sums_of_adagrad_are_there_from_the_start():
    a = parameters(dtype=torch.bfloat16)
    optimizer = Adagrad(a, initial_accumulator_value=0.25, master_weights=True)
    assert all(
        (optimizer.state[p]["sum"] == 0.25).all() and "master" not in optimizer.state[p] for p in a
    )
    with torch.no_grad():
        a[0].fill_(3.0)
    run([optimizer], [a], steps=1)
    torch.testing.assert_close(
        optimizer.state[a[0]]["master"], torch.full((5, 7), 3.0), rtol=0.01, atol=0.0
    )
    later = parameters(((3,),), dtype=torch.bfloat16)
    optimizer.add_param_group({"params": later})
    run([optimizer], [later], steps=1)
    assert (optimizer.state[later[0]]["sum"] > 0.25).all()


# The step is one piece of code for all rules: one whose first step is another, and one other.
COMPILED = ("momentum", "adagrad")


@pytest.mark.full  # that of the fused optimizer stands in the suite
@pytest.mark.real_device
@pytest.mark.parametrize("name", [name if name in COMPILED else full(name) for name in names()])
def test_compiled_step(name):
    ours, _, options, _ = RULES[name]
    a = parameters(((5, 7), (3,)))
    b = twins(a)
    mine, plain = ours(a, **options), ours(b, **options)
    compiled = torch.compile(mine.step, backend="aot_eager", fullgraph=True)
    give_gradients(a, b, seed=0)
    for _ in range(3):
        compiled()
        plain.step()
    assert_equal(a, b)
    torch._dynamo.reset()


@EVERY
def test_in_the_backward_pass(name, device):
    ours, _, options, _ = RULES[name]
    model, twin = (nn.Linear(7, 5).to(device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    mine, plain = ours(model.parameters(), **options), ours(twin.parameters(), **options)
    x = torch.randn(3, 7, device=device)
    with fuse_into_backward(model, mine):
        for _ in range(3):
            model(x).square().sum().backward()
            plain.zero_grad()
            twin(x).square().sum().backward()
            plain.step()
    assert_equal(list(model.parameters()), list(twin.parameters()))


@EVERY
def test_odd_layouts_are_exact(name, device):
    """A block of columns with a transposed gradient, in the middle of a matrix whose other columns
    stay."""
    ours, _, options, _ = RULES[name]
    base = torch.randn(6, 9, device=device)
    rest = base[:, 4:].clone()
    strided, plain = nn.Parameter(base[:, :4]), nn.Parameter(base[:, :4].clone())
    optimizers = ours([strided], **options), ours([plain], **options)
    for step in range(3):
        give_gradients([strided], [plain], seed=step)
        strided.grad = strided.grad.t().contiguous().t()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(base[:, :4], plain.detach())
    assert torch.equal(base[:, 4:], rest)


BAD = [
    (SGD, {"momentum": -0.1}, ValueError, "momentum=-0.1"),
    (SGD, {"nesterov": True}, ValueError, "needs momentum > 0"),
    (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "dampening=0.1"),
    (SGD, {"dampening": "much"}, TypeError, "dampening='much'"),
    (SGD, {"lr": -1.0}, ValueError, "lr=-1.0"),
    (Lion, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0"),
    (Lion, {"differentiable": True}, ValueError, "plain torch"),
    (Adagrad, {"lr_decay": -1.0}, ValueError, "lr_decay=-1.0"),
    (Adagrad, {"eps": float("nan")}, ValueError, "eps=nan"),
    (Adagrad, {"initial_accumulator_value": -2.0}, ValueError, "initial_accumulator_value=-2.0"),
    (Adagrad, {"foreach": True, "fused": True}, ValueError, "can't both"),
]


@pytest.mark.parametrize(("ours", "options", "error", "says"), BAD, ids=str)
def test_what_is_refused(ours, options, error, says):
    with pytest.raises(error, match=says):
        ours(parameters(), **options)
    good = ours(parameters())
    before = [p.detach().clone() for p in good.param_groups[0]["params"]]
    give_gradients(good.param_groups[0]["params"], seed=0)
    good.param_groups[0].update(options)
    with pytest.raises(error, match=says):
        good.step()
    assert_equal(good.param_groups[0]["params"], before)


@EVERY
def test_sparse_and_integer_parameters_are_refused(name):
    ours, _, options, _ = RULES[name]
    a = parameters(((4, 4),))
    optimizer = ours(a, **options)
    a[0].grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    with pytest.raises(TypeError, match="integers"):
        ours([nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)], **options)
