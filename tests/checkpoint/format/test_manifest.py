"""A state taken apart and put together is the same state, types and all."""

from __future__ import annotations

import math

import pytest
import torch

from pyops.checkpoint.format.manifest import restore, take_apart

pytestmark = pytest.mark.cpu_only


def test_tree_names_tensors_by_their_path():
    tensors: dict[str, torch.Tensor] = {}
    weight = torch.ones(2)
    tree = take_apart({"model": {"w": weight}, "step": 7}, tensors)
    assert tree == {"model": {"w": {"$tensor": "model.w"}}, "step": 7}
    assert tensors == {"model.w": weight}


def test_round_trip_keeps_types_keys_and_values():
    a, b = torch.arange(3), torch.zeros(())
    group = {"betas": (0.9, 0.999), "lr": math.inf, "fused": None, "on": True}
    state = {
        "state": {0: {"step": a}, 1: {}},
        "groups": [group],
        "a": {"b": a},
        "a.b": b,
        "$tensor": "no tensor",
    }
    tensors: dict[str, torch.Tensor] = {}
    tree = take_apart(state, tensors)
    again = restore(tree, lambda node, name: tensors[node["$tensor"]])
    assert again == state
    assert isinstance(again["groups"][0]["betas"], tuple)
    assert again["a"]["b"] is a
    assert again["a.b"] is b
    assert list(again["state"]) == [0, 1]


def test_what_a_checkpoint_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"state\['model.1'\] is a set"):
        take_apart({"model": [1, {2}]}, {})


def test_a_state_that_is_too_deep_to_be_one():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(TypeError, match=r"own\['.*0.0.0'\] is nested more than 64 levels"):
        take_apart({"a": deep}, {}, what="own")
