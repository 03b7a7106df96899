"""What is refused, in which words, and before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.comm import Int8, PowerSGD
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import Link, run_replicas
from pyops.mesh import ALONE
from pyops.onebit import OneBitAdam, OneBitConfig
from pyops.optim import AdamW
from tests.local_sgd.replicas import adam, model, values

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "downpour"}, "method is 'downpour'; choose one of local_sgd, diloco, easgd"),
        ({"every": 0}, "every is 0; give a whole number, 1 or more"),
        ({"outer_lr": 0.0}, "outer_lr is 0.0; give more than 0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"keep_local": 1.5}, "keep_local is 1.5; give a number from 0 to 1"),
        ({"every": 4, "fragments": 5}, "fragments is 5, but a period has every = 4 steps"),
        ({"every": 8, "fragments": 2, "delay": 4}, "delay is 4, but .* set delay to 3 or less"),
        ({"method": "easgd", "keep_local": 0.5}, "leave keep_local out"),
        ({"method": "easgd", "after": 5}, "after is 5, but .* 'easgd'"),
        ({"codec": "int3"}, "codec is 'int3'; choose one of"),
        ({"codec": "power_sgd"}, "multiplies matrices"),
        ({"codec": PowerSGD()}, "multiplies matrices"),
        ({"states": "lose"}, "states is 'lose'; choose one of keep, average, reset"),
    ],
)
def test_a_configuration_that_makes_no_sense(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LocalSGDConfig(**options)


@pytest.mark.parametrize("options", [{"every": 2.5}, {"delay": True}, {"outer_lr": "1"}])
def test_a_configuration_of_other_types(options: dict[str, Any]):
    with pytest.raises(TypeError, match=next(iter(options))):
        LocalSGDConfig(**options)


class Tied(nn.Module):
    """Two parameters over one memory, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight.data = self.a.weight.data


def one_bit(net: nn.Module) -> Any:
    return OneBitAdam(net.parameters(), lr=1e-3, config=OneBitConfig(warmup_steps=3))


def plain(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def of_another(net: nn.Module) -> Any:
    return AdamW([*net.parameters(), nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("make", "optimizer", "options", "kind", "message"),
    [
        (model, one_bit, {}, ValueError, "OneBitAdam, which sends momenta .* use AdamW"),
        (model, of_another, {}, ValueError, r"a tensor of shape \(3,\) that is no parameter"),
        (model, adam, {"fragments": 4}, ValueError, "fragments is 4, but the model has 3 layers"),
        (Tied, adam, {"fragments": 2}, ValueError, "a.weight and b.weight are one tensor"),
        (lambda: model(dtype=torch.float64), plain, {"codec": Int8()}, TypeError, "float64"),
        (lambda: nn.Linear(2, 2, device="meta"), plain, {}, ValueError, "on the meta device"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), plain, {}, TypeError, "complex64"),
    ],
)
def test_a_model_or_an_optimizer_that_does_not_go_with_it(make, optimizer, options, kind, message):
    net = make()
    optimizer = optimizer(net)
    with pytest.raises(kind, match=message):
        LocalSGD(net, optimizer, LocalSGDConfig(**options), group=ALONE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2), "model is a int"),
        ((nn.Linear(2, 2), 2), "optimizer is a int"),
        ((nn.Linear(2, 2), AdamW([nn.Parameter(torch.zeros(1))]), 3), "config is a int"),
    ],
)
def test_what_is_no_model_optimizer_or_configuration(arguments, message):
    with pytest.raises(TypeError, match=message):
        LocalSGD(*arguments, group=ALONE)


@pytest.mark.parametrize("case", ["config", "model", "easgd", "one"])
def test_a_mistake_of_one_replica_is_raised_on_all_and_changes_nothing(case):
    messages = {
        "config": "replica 0 was given .*every=3.*, replica 1 .*every=4",
        "model": r"replica 0 trains \('0.weight', \(7, 5\).* replica 1 trains",
        "easgd": "alpha is 0.6 with 2 replicas, .* set alpha to 0.5 or less",
        "one": "no parameter of the model",
    }

    def body(replica):
        other = replica.number == 1
        config = LocalSGDConfig(every=4 if other and case == "config" else 3)
        if case == "easgd":
            config = LocalSGDConfig(method="easgd", alpha=0.6)
        net: nn.Module = model(seed=replica.number)
        if case == "model" and other:
            net = nn.Sequential(nn.Linear(5, 8))
        optimizer = (of_another if case == "one" and other else adam)(net)
        before = values(net)
        with pytest.raises(ValueError, match=messages[case]):
            LocalSGD(net, optimizer, config, group=replica.exchange)
        assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))
        return True

    assert run_replicas(2, body) == [True, True]


def test_virtual_replicas_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="size is 0"):
        run_replicas(0, lambda replica: None)
    with pytest.raises(ValueError, match="give more than 0, and 0 or more"):
        Link(bytes_per_second=0.0)
    with pytest.raises(ValueError, match="seconds is -1"):
        run_replicas(1, lambda replica: replica.compute(-1))
    with pytest.raises(ValueError, match=r"replica 0 is not among \[1\]"):
        run_replicas(2, lambda replica: replica.number or replica.regroup({1}))
