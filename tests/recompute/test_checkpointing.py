"""checkpoint: the bits of a run without it, less memory, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from pyops.recompute import checkpoint
from tests.recompute.parts import WIDTH, Part, Stack, assert_same_bits, run

pytestmark = pytest.mark.on_device


def test_gradients_have_the_bits_of_a_run_without_it_dropout_included():
    plain = Stack()
    model = copy.deepcopy(plain)
    model.call = checkpoint
    x = torch.randn(5, WIDTH)
    expected = run(plain, x)
    assert not torch.equal(run(plain, x, seed=4)[0], expected[0]), "dropout must do something"
    assert_same_bits(run(model, x), expected)
    assert [part.forwards for part in model.parts] == [2, 2, 2]


def test_intermediate_results_are_gone_between_forward_and_backward():
    seen = []

    def function(x):
        y = torch.tanh(x)
        z = torch.exp(y)
        seen.append((weakref.ref(y), weakref.ref(z)))
        return z * 2

    x = torch.randn(4, requires_grad=True)
    kept = function(x)
    assert seen[0][0]() is None or seen[0][1]() is not None
    out = checkpoint(function, x)
    assert [r() for r in seen[1]] == [None, None]
    (g1,) = torch.autograd.grad(kept.sum(), x)
    (g2,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(g1, g2)


def test_what_is_kept_is_the_input():
    part, kept = Part(), []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(7, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        part(x)
        without, _ = sum(kept), kept.clear()
        checkpoint(part, x)
    assert sum(kept) == x.numel() < without


def test_arguments_of_every_kind():
    def function(x, names, index, *, pairs, mask, weight, flag, nothing):
        assert names == ["a", 1]
        assert nothing is None
        y = x[index] * pairs["left"][0] - pairs["right"]
        y = torch.where(mask, y, y * weight)
        return (y, [y.sum()], None) if flag else None

    x = torch.randn(4, 6, requires_grad=True)
    left, right = torch.randn(6, requires_grad=True), torch.randn(3, 6)
    weight = nn.Parameter(torch.randn(6))
    index, mask = torch.tensor([0, 3, 1]), torch.rand(3, 6) > 0.5

    def gradients(call):
        arguments = {
            "pairs": {"left": [left], "right": right},
            "mask": mask,
            "weight": weight,
            "flag": True,
            "nothing": None,
        }
        y, (total,), nothing = call(x, ["a", 1], index, **arguments)
        assert nothing is None
        return [y.detach(), *torch.autograd.grad((y * y).sum() + total, [x, left, weight])]

    assert_same_bits(gradients(lambda *a, **k: checkpoint(function, *a, **k)), gradients(function))


def test_nested_calls():
    inner_part, outer_part = Part(), Part()

    def outer(x, call):
        return outer_part(call(inner_part, torch.tanh(outer_part(x))))

    def gradients(call):
        torch.manual_seed(5)
        x = torch.ones(3, WIDTH, requires_grad=True)
        y = call(lambda x: outer(x, call), x)
        return [
            y.detach(),
            *torch.autograd.grad(
                y.square().sum(), [x, *inner_part.parameters(), *outer_part.parameters()]
            ),
        ]

    assert_same_bits(gradients(checkpoint), gradients(lambda f, x: f(x)))


def test_backward_twice_and_gradients_of_gradients():
    part = Part().double()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)

    def gradients(call):
        torch.manual_seed(1)
        y = call(part, x).square().sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), x)
        return [first, again.detach(), second]

    expected = gradients(lambda f, x: f(x))
    assert_same_bits(gradients(checkpoint), expected)
    assert expected[2].abs().max() > 0


def test_autocast_is_that_of_the_forward():
    part = Part(probability=0.0)
    x = torch.randn(3, WIDTH, requires_grad=True)

    def gradients(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(part, x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *part.parameters()])]

    assert_same_bits(gradients(checkpoint), gradients(lambda f, x: f(x)))


@pytest.mark.parametrize("mode", ["no_grad", "eval", "frozen"])
def test_without_backward_nothing_is_left(mode):
    part = Part()
    if mode != "no_grad":
        part.eval()
    if mode == "frozen":
        part.requires_grad_(False)
    x = torch.randn(3, WIDTH)
    alive = weakref.ref(x)
    gc.disable()  # nothing may need the collector
    try:
        with torch.set_grad_enabled(mode != "no_grad"):
            y = checkpoint(part, x)
        del x
        assert (alive() is None) == (mode != "eval"), (
            "kept for a backward that may come, and only then"
        )
        del y
        assert alive() is None
    finally:
        gc.enable()
    assert part.forwards == 1


def test_inputs_go_once_backward_is_through():
    part = Part()
    x = torch.randn(3, WIDTH) * 1.0
    alive = weakref.ref(x)
    y = checkpoint(part, x)
    del x
    y.sum().backward()
    assert alive() is None
    assert y is not None


def test_an_input_that_was_changed_in_place_is_an_error():
    x = torch.randn(3, WIDTH)
    y = checkpoint(Part(), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_function_that_does_something_else_the_second_time_is_an_error():
    calls = []

    def function(x):
        calls.append(1)
        return torch.tanh(x) if len(calls) == 1 else torch.exp(x[:2])

    y = checkpoint(function, torch.ones(3, requires_grad=True))
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


def test_a_function_that_fails_fails_as_it_is():
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoint(function, torch.ones(3, requires_grad=True))
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()  # no hooks are left
    assert torch.equal(x.grad, 2 * torch.ones(3))


def test_wrong_options_are_refused_before_the_function_runs():
    part, x = Part(), torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match="offload is 'disk'; choose 'cpu'"):
        checkpoint(part, x, offload="disk")
    with pytest.raises(ValueError, match="partition_group is 2; expected a process group"):
        checkpoint(part, x, partition_group=2)
    with pytest.raises(TypeError, match="arena is 7; expected a pyops"):
        checkpoint(part, x, arena=7)
    assert part.forwards == 0


def test_offload_leaves_host_tensors_where_they_are():
    plain = Stack()
    model = copy.deepcopy(plain)
    model.call = lambda part, x: checkpoint(part, x, offload="cpu")
    x = torch.randn(5, WIDTH)
    assert_same_bits(run(model, x), run(plain, x))


@pytest.mark.real_device
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}])
def test_a_compiled_caller_is_recomputed_too(options):
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(
        lambda x: checkpoint(part, x, **options).square().sum(),
        backend="aot_eager",
        fullgraph=not options,
    )
    x = torch.randn(3, WIDTH, requires_grad=True)
    (found,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(part(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0
