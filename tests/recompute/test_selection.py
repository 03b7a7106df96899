"""apply and remove: which modules are recomputed, and that nothing else about the model changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pyops.models import GPT, GPTConfig
from pyops.recompute import apply, remove
from tests.recompute.parts import WIDTH, Part, Stack, assert_same_bits, run

pytestmark = pytest.mark.on_device


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("parts.*", ["parts.0", "parts.1", "parts.2"]),
        (["parts.[02]"], ["parts.0", "parts.2"]),
        (["parts.1", "parts.*.up"], ["parts.1", "parts.0.up", "parts.1.up", "parts.2.up"]),
        ([Part], ["parts.0", "parts.1", "parts.2"]),
        (nn.Dropout, ["parts.0.dropout", "parts.1.dropout", "parts.2.dropout"]),
    ],
)
def test_chosen_modules_are_recomputed_and_bits_stay(choice, names):
    plain = Stack()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    assert sorted(apply(model, choice)) == sorted(names)
    assert list(model.state_dict()) == keys
    x = torch.randn(5, WIDTH)
    assert_same_bits(run(model, x), run(plain, x))
    again = [int(f"parts.{i}" in names) for i in range(3)]
    assert [part.forwards for part in model.parts] == [1 + n for n in again]
    assert sorted(remove(model)) == sorted(names)
    assert remove(model) == []
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_a_module_itself_can_be_chosen_and_a_copy_recomputes_its_own():
    model = Stack()
    assert apply(model, [model.parts[1]]) == ["parts.1"]
    twin = copy.deepcopy(model)
    run(twin, torch.randn(2, WIDTH))
    assert [part.forwards for part in twin.parts] == [1, 2, 1]
    assert [part.forwards for part in model.parts] == [0, 0, 0]


def test_hooks_run_once_and_a_replaced_forward_comes_back():
    model, calls = Stack(), []
    first = model.parts[0]
    own = first.forward
    first.forward = replaced = lambda x: own(x, scale=2.0)
    first.register_forward_pre_hook(lambda *_: calls.append("before"))
    apply(model, "parts.0")
    run(model, torch.randn(2, WIDTH))
    assert calls == ["before"]
    assert first.forwards == 2
    remove(model)
    assert first.forward is replaced


def test_a_gpt_with_dropout_of_its_own():
    config = GPTConfig(
        vocab_size=11, sequence_length=8, num_layers=2, num_heads=2, dim=16, dropout=0.3
    )
    tokens = torch.randint(11, (2, 8))

    def gradients(model):
        model.set_dropout((2, 8), seed=1, step=0)
        model(tokens).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    model = GPT(config)
    apply(model, ["blocks.*"])
    assert_same_bits(gradients(model), gradients(GPT(config)))


def test_wrong_choices_are_refused_and_change_nothing():
    model = Stack()
    with pytest.raises(
        ValueError, match=r"no module of the model is 'layers\.\*'; there are \['parts', 'parts.0'"
    ):
        apply(model, ["parts.0", "layers.*"])
    with pytest.raises(ValueError, match="no module of the model is <class"):
        apply(model, nn.BatchNorm1d)
    with pytest.raises(ValueError, match="offload is 'gpu'"):
        apply(model, "parts.*", offload="gpu")
    assert remove(model) == []
    apply(model, "parts.1")
    with pytest.raises(
        ValueError, match=r"recomputed already: \['parts.1'\]; call recompute.remove"
    ):
        apply(model, "parts.*")
    assert remove(model) == ["parts.1"]
