"""A caller's mistake: one error that names it and the fix, and nothing is changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pyops.optim import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Lion
from pyops.optim.fused.input_checks import check_gradient
from tests.optim.pairs import assert_equal, give_gradients, parameters


def param(*shape, **kwargs):
    return nn.Parameter(
        torch.ones(*shape, **kwargs),
        requires_grad=kwargs.get("dtype") not in (torch.int32, torch.bool),
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.inf}, "lr=inf"),
        ({"lr": torch.ones(2)}, "1 element"),
        ({"lr": torch.tensor(math.nan)}, "lr=nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]=-0.1"),
        ({"betas": (math.nan, 0.9)}, r"betas\[0\]=nan"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"eps": -1e-8}, "eps="),
        ({"eps": math.nan}, "eps=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"weight_decay": math.inf}, "weight_decay=inf"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
        ({"state_dtype": torch.float64}, "state_dtype=torch.float64"),
        ({"differentiable": True}, "differentiable"),
        ({"fused": True, "foreach": True}, "fused and foreach"),
        ({"stochastic_rounding": True, "master_weights": True}, "nothing to round"),
    ],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_hyperparameters(kind, options, says):
    with pytest.raises(ValueError, match=says):
        kind(parameters(), **options)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: [], ValueError, "empty parameter list"),
        (lambda: torch.ones(3), TypeError, "iterable"),
        (lambda: [param(2, dtype=torch.complex64)], TypeError, "view_as_real"),
        (lambda: [param(2, dtype=torch.int32)], TypeError, "integers"),
        (lambda: [param(2, dtype=torch.float64)], TypeError, "torch.optim.AdamW"),
        (lambda: [nn.Parameter(torch.ones(1).expand(4))], ValueError, "share memory"),
        (
            lambda: [nn.Parameter(torch.ones(9).as_strided((3, 3), (2, 1)))],
            ValueError,
            "share memory",
        ),
        (lambda: [param(2)] * 2, ValueError, "twice"),
        (lambda: [3.0], TypeError, "only optimize Tensors"),
        (lambda: [{"params": [param(2)], "max_grad_norm": 1.0}], ValueError, "whole optimizer"),
        (
            lambda: [{"params": [param(2)], "copies": []}],
            ValueError,
            "'copies' has 0 entries for 1",
        ),
        (lambda: [{"params": [param(2)], "lr": math.nan}], ValueError, "lr=nan"),
    ],
)
def test_parameters(make, error, says):
    with pytest.raises(error, match=says):
        AdamW(make())


def test_strides_that_only_look_overlapping_are_accepted():
    memory = torch.zeros(8)
    values = memory.as_strided((2, 3), (3, 2))  # places 0 2 4 3 5 7
    weight = nn.Parameter(values)
    optimizer = AdamW([weight], lr=0.5, weight_decay=0.0)
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    torch.testing.assert_close(memory, torch.tensor([-0.5, 0, -0.5, -0.5, -0.5, -0.5, 0, -0.5]))


def test_a_group_that_is_refused_is_not_added():
    optimizer = AdamW(parameters())
    with pytest.raises(TypeError, match="complex"):
        optimizer.add_param_group({"params": [param(2, dtype=torch.complex64)]})
    assert len(optimizer.param_groups) == 1


def sparse(p):
    p.grad = torch.ones_like(p).to_sparse()


def of_another_shape(p):
    p.grad = torch.ones_like(p)
    p.grad.data = torch.ones(p.numel() + 1)


def nan_rate(p):
    return {"lr": math.nan}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (sparse, TypeError, "sparse=False"),
        (of_another_shape, ValueError, "has shape"),
        (nan_rate, ValueError, "lr=nan"),
    ],
)
def test_a_bad_gradient_in_the_last_group_changes_nothing_in_the_first(
    spoil, error, says, steps_before
):
    a = parameters(((4, 4), (3,), (5,)))
    optimizer = AdamW([{"params": a[:2]}, {"params": a[2:]}], lr=0.1)
    for step in range(steps_before):
        give_gradients(a, seed=step)
        optimizer.step()
    give_gradients(a, seed=5)
    optimizer.param_groups[1].update(spoil(a[2]) or {})
    before = [p.detach().clone() for p in a]
    steps = [optimizer.state[p]["step"].item() for p in a if p in optimizer.state]
    with pytest.raises(error, match=says):
        optimizer.step()
    assert_equal(a, before)
    assert [optimizer.state[p]["step"].item() for p in a if p in optimizer.state] == steps
    # Mended, it goes on.
    give_gradients(a, seed=5)
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(a[0].detach(), before[0])


def test_gradients_that_share_memory_are_refused_with_zero_grad():
    a = parameters(((3,), (3,)))
    optimizer = AdamW(a, zero_grad=True)
    a[0].grad = a[1].grad = torch.ones(3)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("exp_avg", torch.zeros(4), "expected a tensor of"),
        ("exp_avg", torch.zeros(3, dtype=torch.float64), "float64"),
        ("exp_avg", torch.zeros(3, dtype=torch.bfloat16), "one dtype"),
        ("step", torch.zeros(3), "one number"),
    ],
)
def test_a_state_that_does_not_fit(key, value, says):
    a = parameters(((3,),))
    optimizer = AdamW(a)
    give_gradients(a, seed=0)
    optimizer.step()
    optimizer.state[a[0]][key] = value
    before = a[0].detach().clone()
    with pytest.raises(ValueError, match=says):
        optimizer.step()
    assert torch.equal(a[0].detach(), before)


def test_a_gradient_on_another_device():
    """torch itself lets hardly anybody make one; the check is called as step() calls it."""
    with pytest.raises(ValueError, match=r"gradient of weight is on meta, the parameter on cpu"):
        check_gradient(
            torch.ones(3, device="meta"), torch.ones(3), name="weight", who="AdamW", zeroed=False
        )


def test_a_step_of_empty_groups_does_nothing():
    late = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": []}], max_grad_norm=1.0)
    optimizer.step()
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    optimizer.step()
    assert late.max() < 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"lr": None}, "lr=None"),
        ({"lr": True}, "lr=True"),
        ({"betas": 0.9}, "betas=0.9 must be two numbers"),
        ({"betas": ("a", 0.9)}, "betas="),
        ({"eps": None}, "eps=None"),
        ({"weight_decay": "x"}, "weight_decay='x'"),
        ({"max_grad_norm": "x"}, "max_grad_norm='x'"),
    ],
)
def test_hyperparameters_of_another_type(options, says):
    with pytest.raises(TypeError, match=says):
        AdamW(parameters(), **options)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_storage_that_was_given_back(what, steps_before):
    """A sharded trainer resizes storages to nothing; stepping through their old address would write
    to memory of others."""
    a = parameters(((4, 4), (3,)))
    optimizer = AdamW(a, lr=0.1)
    for step in range(steps_before):
        give_gradients(a, seed=step)
        optimizer.step()
    give_gradients(a, seed=5)
    before = a[0].detach().clone()
    (a[1].grad if what == "gradient" else a[1].data).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        optimizer.step()
    assert torch.equal(a[0], before), "nothing is changed"


@pytest.mark.parametrize(
    ("make", "options", "error", "says"),
    [
        (SGD, {"momentum": 1.5}, ValueError, "momentum=1.5 must be <= 1"),
        (LARS, {"momentum": 1.5}, ValueError, "momentum=1.5 must be <= 1"),
        (LARS, {"momentum": -0.1}, ValueError, "momentum=-0.1"),
        (SGD, {"dampening": math.nan}, ValueError, "dampening=nan must be a finite number"),
        (LARS, {"nesterov": 1}, TypeError, "nesterov=1 must be True or False"),
        (LARS, {"trust_ratio": None}, TypeError, "trust_ratio=None must be True or False"),
        (LAMB, {"min_ratio": 2.0, "max_ratio": 1.0}, ValueError, "min_ratio=2.0 and max_ratio=1.0"),
        (LAMB, {"min_ratio": math.inf}, ValueError, "min_ratio=inf"),
        (LAMB, {"trust_ratio": "no"}, TypeError, "trust_ratio='no' must be True or False"),
        (Adam, {"amsgrad": "false"}, TypeError, "amsgrad='false' must be True or False"),
        (Adam, {"decoupled_weight_decay": 2}, TypeError, "decoupled_weight_decay=2 must be"),
        (Lion, {"maximize": "no"}, TypeError, "maximize='no' must be True or False"),
        (Lion, {"seed": 1.5}, TypeError, "seed=1.5 must be a whole number"),
        (
            Adagrad,
            {"master_weights": "fp32"},
            TypeError,
            "master_weights='fp32' must be True or False",
        ),
        (
            Adagrad,
            {"stochastic_rounding": None},
            TypeError,
            "stochastic_rounding=None must be True or False",
        ),
        (Adagrad, {"zero_grad": 1}, TypeError, "zero_grad=1 must be True or False"),
    ],
    ids=str,
)
def test_what_no_step_could_make_sense_of(make, options, error, says):
    with pytest.raises(error, match=says):
        make(parameters(), **options)
    if not set(options) & {"master_weights", "stochastic_rounding", "zero_grad"}:
        a = parameters()
        optimizer = make(a)
        give_gradients(a, seed=0)
        before = [p.detach().clone() for p in a]
        optimizer.param_groups[0].update(options)
        with pytest.raises(error, match=says):
            optimizer.step()
        assert_equal(a, before)
