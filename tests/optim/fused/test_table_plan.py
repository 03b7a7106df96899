"""Whatever is exchanged between steps is noticed: a table of pointers must never be stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pyops.ops.library import native
from pyops.optim import AdamW
from tests.optim.pairs import (
    HYPER,
    assert_as_torch,
    assert_equal,
    give_gradients,
    parameters,
    run,
    twins,
)

SHAPES = ((6, 6), (17,), (3, 4))


class Sides:
    """Ours, torch's and torch's in float64, stepped together; the same change is made to all
    three."""

    def __init__(self, device, **options):
        self.lists = [parameters(SHAPES, device=device)]
        self.lists += [twins(self.lists[0]), twins(self.lists[0], torch.float64)]
        kinds = (AdamW, torch.optim.AdamW, torch.optim.AdamW)
        self.optimizers = [
            kind(ps, **HYPER, **options) for kind, ps in zip(kinds, self.lists, strict=True)
        ]
        self.steps = 0

    def step(self, n=2):
        run(self.optimizers, self.lists, steps=n, first=self.steps)
        self.steps += n

    def change(self, function):
        for optimizer, params in zip(self.optimizers, self.lists, strict=True):
            function(optimizer, params)

    def check(self):
        assert_as_torch(*self.lists, steps=self.steps)


def new_memory(optimizer, params):
    params[0].data = params[0].data.clone() + 1


def new_layout(optimizer, params):
    params[0].data = params[0].data.t()


def new_moment(optimizer, params):
    optimizer.state[params[1]]["exp_avg"] = torch.full_like(params[1], 0.25)


def new_step(optimizer, params):
    optimizer.state[params[1]]["step"] = torch.tensor(
        40.0, device=params[1].device if type(optimizer) is AdamW else "cpu"
    )


def new_dictionary(optimizer, params):
    optimizer.state[params[2]] = {
        key: value.clone() for key, value in optimizer.state[params[2]].items()
    }
    optimizer.state[params[2]]["exp_avg_sq"].fill_(0.5)


def no_state(optimizer, params):
    optimizer.state.clear()


def one_state_less(optimizer, params):
    del optimizer.state[params[0]]


def more_parameters(optimizer, params):
    extra = torch.nn.Parameter(torch.ones(5, device=params[0].device, dtype=params[0].dtype))
    params.append(extra)
    optimizer.add_param_group({"params": [extra], "lr": 0.3})


def one_parameter_less(optimizer, params):
    optimizer.param_groups[0]["params"].pop()


def its_own_state_again(optimizer, params):
    optimizer.load_state_dict({**optimizer.state_dict()})


def other_hyperparameters(optimizer, params):
    optimizer.param_groups[0].update(
        lr=0.2, betas=(0.3, 0.4), eps=1e-3, weight_decay=0.5, maximize=True
    )


CHANGES = [
    new_memory,
    new_layout,
    new_moment,
    new_step,
    new_dictionary,
    no_state,
    one_state_less,
    more_parameters,
    one_parameter_less,
    its_own_state_again,
    other_hyperparameters,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_noticed(change, device):
    sides = Sides(device)
    sides.step()
    sides.change(change)
    sides.step()
    sides.check()


@pytest.mark.parametrize(
    "change", [new_memory, new_moment, no_state, other_hyperparameters], ids=lambda f: f.__name__
)
def test_the_comparison_sees_a_change_that_only_one_side_makes(change, device):
    sides = Sides(device)
    sides.step()
    for optimizer, params in zip(sides.optimizers[1:], sides.lists[1:], strict=True):
        change(optimizer, params)
    sides.step()
    with pytest.raises(AssertionError):
        sides.check()


@pytest.mark.skipif(native() is None, reason="there is no table without kernels")
def test_a_stale_table_would_be_seen(monkeypatch, device):
    """The mutant: a plan that never looks. Fresh gradients and new memory must then give wrong
    results."""
    from pyops.optim.fused.table_plan import TablePlan

    sides = Sides(device)
    keep = []  # so that the stale pointers lead to memory that still is ours
    sides.step()
    monkeypatch.setattr(TablePlan, "still_holds", lambda self, params, key: True)
    keep.append([p.grad for p in sides.lists[0]])
    run(sides.optimizers, sides.lists, steps=1, first=sides.steps)
    sides.steps += 1
    with pytest.raises(AssertionError):
        sides.check()


@pytest.mark.parametrize("fresh", [True, False], ids=["new gradients", "same gradients"])
def test_many_steps_with_new_or_the_same_gradients(fresh, device):
    sides = Sides(device)
    for step in range(40):  # more than the scan's patience with strangers
        if fresh:
            for params in sides.lists:
                for p in params:
                    p.grad = None
        elif step:
            new = [torch.randn(p.shape, device=device) for p in sides.lists[0]]
            for params in sides.lists:
                for p, g in zip(params, new, strict=True):
                    p.grad.copy_(g)
        if fresh or step == 0:
            give_gradients(*sides.lists, seed=step)
        for optimizer in sides.optimizers:
            optimizer.step()
    sides.steps = 40
    sides.check()


@pytest.mark.parametrize("other", ["dtype", "strides", "both views of one memory"])
def test_another_gradient_at_the_same_address(other, device):
    """An address says nothing: the new gradient there may be of another dtype or laid out
    otherwise."""
    a = parameters(((6, 6),), device=device)
    b = twins(a)
    mine, plain = AdamW(a, **HYPER), AdamW(b, **HYPER)
    memory = torch.randn(6, 6, device=device)
    a[0].grad, b[0].grad = memory, memory.clone()
    for optimizer in (mine, plain):
        optimizer.step()
    if other == "dtype":
        if not hasattr(a[0], "grad_dtype"):
            pytest.skip("this torch allows no gradient of another dtype")
        narrow = memory.view(torch.bfloat16)[:, :6].contiguous()
        for params in (a, b):
            params[0].grad_dtype = None
        memory.view(torch.bfloat16).view(-1)[:36].copy_(narrow.view(-1))
        a[0].grad = memory.view(torch.bfloat16).view(-1)[:36].view(6, 6)
        b[0].grad = narrow.clone()
    else:
        a[0].grad = memory.t()
        b[0].grad = memory.t().clone(memory_format=torch.contiguous_format)
    for optimizer in (mine, plain):
        optimizer.step()
    assert_equal(a, b)


def test_gradients_are_not_kept_alive(device):
    a = parameters(SHAPES, device=device)
    optimizer = AdamW(a, **HYPER)
    give_gradients(a, seed=0)
    optimizer.step()
    watched = [weakref.ref(p.grad) for p in a]
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert all(reference() is None for reference in watched)


# On the pretended device an op is given host tensors, so that gradients never are on the device
# that the plan was made for.
@pytest.mark.real_device
@pytest.mark.skipif(native() is None, reason="there is no table without kernels")
def test_steady_steps_reuse_the_table(device):
    a = parameters(SHAPES, device=device)
    optimizer = AdamW(a, **HYPER)
    run([optimizer], [a], steps=1)
    plan = optimizer._plans[0][0]
    run([optimizer], [a], steps=3, first=1)
    assert optimizer._plans[0][0] is plan


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.skipif(native() is None, reason="there is no table without kernels")
def test_a_captured_step_leaves_plans_alone(options, device, monkeypatch):
    """A graph replays its own addresses, and a plan knows of none of them: each step takes the
    gradients that it is given."""
    a = parameters(SHAPES, device=device)
    b = twins(a)
    mine, other = AdamW(a, **HYPER, **options), AdamW(b, **HYPER, **options)
    run([mine, other], [a, b], steps=1)
    plan, own, captured = mine._plans[0][0], [p.grad for p in a], False
    table = plan.table.clone()
    monkeypatch.setattr(mine, "_captured", lambda: captured)
    for step, captured in enumerate((True, False, True, True, False), start=1):
        give_gradients(a, b, seed=step)
        if not captured:  # those of the plan, at their old addresses
            for p, gradient in zip(a, own, strict=True):
                p.grad = gradient.copy_(p.grad)
        mine.step()
        other.step()
        assert mine._plans[0] == [plan]
        assert torch.equal(plan.table, table)
    assert_equal(a, b)


def test_in_place_steps_are_seen_by_autograd(device):
    """A step between forward and backward would give a wrong gradient: autograd must refuse."""
    weight = torch.nn.Parameter(torch.randn(3, 3, device=device))
    optimizer = AdamW([weight], **HYPER)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
