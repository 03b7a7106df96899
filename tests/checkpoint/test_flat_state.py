"""State over a flat buffer goes through the checkpoint by name, into any other layout."""

from __future__ import annotations

import pytest
import torch

from pyops.checkpoint import CheckpointError
from pyops.checkpoint.flat_state import flat_state, named_state
from pyops.flat import FlatLayout

pytestmark = pytest.mark.cpu_only

SHAPES = [("w", (3, 5)), ("b", (7,)), ("s", ())]


def test_there_and_back_into_another_layout():
    layout = FlatLayout.plan(SHAPES, multiple_of=100)
    moment = torch.arange(layout.numel, dtype=torch.float32)
    step = torch.tensor(7.0)
    named = named_state({"exp_avg": moment, "step": step, "note": "x"}, layout)
    assert list(named) == ["w", "b", "s"]
    assert torch.equal(named["w"]["exp_avg"], torch.arange(15.0).view(3, 5))
    assert named["w"]["exp_avg"].data_ptr() == moment.data_ptr(), "cut into views, not copied"
    assert named["s"]["exp_avg"].shape == ()
    other = FlatLayout.plan(list(reversed(SHAPES)), alignment=2)
    again = flat_state(named, other)
    assert set(again) == {"exp_avg", "step", "note"}
    assert again["step"] is step
    for name, shape in SHAPES:
        assert torch.equal(
            again["exp_avg"][other.slice(name)].view(shape), named[name]["exp_avg"]
        ), name
    padding = torch.ones(other.numel, dtype=torch.bool)
    for name, _ in SHAPES:
        padding[other.slice(name)] = False
    assert not again["exp_avg"][padding].any()


def test_no_state_yet():
    layout = FlatLayout.plan(SHAPES)
    assert flat_state(named_state({}, layout), layout) == {}


def test_another_model():
    with pytest.raises(
        CheckpointError, match="no optimizer state for b, s; it is of another model"
    ):
        flat_state({"w": {}}, FlatLayout.plan(SHAPES))
