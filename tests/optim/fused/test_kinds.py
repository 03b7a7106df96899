"""A state_dict of another optimizer is refused by name; torch's own, and those of the same kind,
load."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pyops.onebit import OneBitConfig
from pyops.optim import LAMB, LARS, SGD, Adafactor, Adagrad, Adam, AdamW, Lion, OneBitAdam

KINDS: dict[str, Any] = {
    "SGD": lambda p: SGD(p, momentum=0.9),
    "Adam": Adam,
    "AdamW": AdamW,
    "Lion": Lion,
    "LAMB": LAMB,
    "LARS": LARS,
    "Adagrad": Adagrad,
    "Adafactor": Adafactor,
}
TORCH = {
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
}
STRANGERS = ("RMSprop", "NAdam", "Adadelta", "Rprop", "ASGD", "Adamax")


def stepped(make: Any) -> Any:
    weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    optimizer = make([weight])
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    return optimizer


def refused(optimizer: Any, state: dict[str, Any], says: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(copy.deepcopy(state))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entries in before["state"].items():
        assert all(
            torch.equal(torch.as_tensor(after["state"][key][name]), torch.as_tensor(v))
            for name, v in entries.items()
        )


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(KINDS, KINDS)))
def test_the_state_of_another_optimizer(mine, theirs):
    optimizer, other = stepped(KINDS[mine]), stepped(KINDS[theirs])
    if mine.removesuffix("W") == theirs.removesuffix("W"):
        optimizer.load_state_dict(other.state_dict())
    else:
        refused(
            optimizer,
            other.state_dict(),
            f"{mine}: the state_dict is that of {theirs.removesuffix('W')}",
        )


@pytest.mark.parametrize("mine", KINDS)
def test_the_states_of_torch(mine):
    for name, make in TORCH.items():
        if mine.removesuffix("W") == name.removesuffix("W"):
            optimizer = stepped(KINDS[mine])
            optimizer.load_state_dict(stepped(make).state_dict())
            optimizer.step()
        else:
            refused(
                stepped(KINDS[mine]),
                stepped(make).state_dict(),
                f"{mine}: the state_dict is that of {name[:4]}",
            )
    for name in STRANGERS:
        refused(
            stepped(KINDS[mine]),
            stepped(getattr(torch.optim, name)).state_dict(),
            f"{mine}: the state_dict (has|is)",
        )


def test_states_without_telling_groups():
    """Another program's: groups of lr alone."""
    momentum = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 4)}
    saved = {"state": {0: momentum}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    refused(
        stepped(KINDS["SGD"]), saved, r"has \['exp_avg'\] for parameter 0, which SGD does not keep"
    )
    refused(stepped(AdamW), saved, "no 'exp_avg_sq' for parameter 0: it is that of Lion")
    stepped(Lion).load_state_dict(saved)


def test_a_group_may_have_keys_of_its_own():
    saved = stepped(AdamW).state_dict()
    saved["param_groups"][0] |= {"lr_decay": 0.8, "trust_coefficient": "somebody's"}
    stepped(AdamW).load_state_dict(saved)


def test_momenta_that_travelled_compressed_are_no_moments_of_adam():
    optimizer = stepped(lambda p: OneBitAdam(p, config=OneBitConfig(warmup_steps=2)))
    stepped(AdamW).load_state_dict(optimizer.state_dict())  # still in the warm-up
    optimizer.step()
    assert optimizer.phase == "compressed"
    refused(
        stepped(AdamW),
        optimizer.state_dict(),
        "that of OneBitAdam in phase 'compressed', whose 'exp_avg' is another",
    )
