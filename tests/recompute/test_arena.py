"""Saved inputs in an arena: one allocation, last in first out, the bits of a run without it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from pyops.ops.library import native
from pyops.recompute import Arena, apply, checkpoint
from tests.recompute.parts import WIDTH, Part, Stack, assert_same_bits, run

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]

PAGE = 4096


def test_inputs_lie_one_after_the_other_and_gradients_have_the_same_bits():
    arena, plain = Arena(3 * PAGE), Stack()
    model = copy.deepcopy(plain)
    apply(model, "parts.*", arena=arena)
    x = torch.randn(5, WIDTH)
    expected = run(plain, x)
    for _ in range(3):
        assert_same_bits(run(model, x), expected)
        assert (arena.used, arena.room, arena.peak) == (0, 3 * PAGE, 3 * PAGE), (
            "each step leaves it empty"
        )


def test_what_lies_there_is_the_input_and_it_goes_from_the_top():
    arena, part = Arena(8 * PAGE), Part()
    x = torch.randn(5, WIDTH, requires_grad=True)
    used = []
    y = x * 1.0
    for _ in range(3):
        y = checkpoint(part, y, arena=arena)
        y.register_hook(lambda g: used.append(arena.used // PAGE))
    assert arena.used == 3 * PAGE
    y.sum().backward()
    assert used == [3, 2, 1]
    assert arena.used == 0


def test_an_input_may_be_changed_in_place_afterwards():
    part, x = Part(probability=0.0), torch.randn(3, WIDTH)
    y = checkpoint(part, x, arena=Arena(PAGE))
    (expected,) = torch.autograd.grad(part(x).sum(), part.up.weight)
    x.add_(1)
    (found,) = torch.autograd.grad(y.sum(), part.up.weight)
    assert torch.equal(found, expected)


def test_without_backward_the_arena_is_given_back():
    arena, part = Arena(4 * PAGE), Part()
    y = checkpoint(part, torch.randn(3, WIDTH), arena=arena)
    assert arena.used == PAGE
    del y
    gc.collect()
    assert arena.used == 0
    with torch.no_grad():
        checkpoint(part, torch.randn(3, WIDTH), arena=arena)
    assert arena.used == 0

    def fails(x):
        raise KeyError

    with pytest.raises(KeyError):
        checkpoint(fails, torch.randn(3, WIDTH), arena=arena)
    gc.collect()
    assert arena.used == 0


def test_an_arena_that_is_too_small_says_so_before_the_function_runs():
    part = Part()
    with pytest.raises(
        RuntimeError,
        match=r"the arena of 4096 bytes has 4096 free, and a tensor of shape \(24000,\)",
    ):
        checkpoint(part, torch.randn(2000, WIDTH), arena=Arena(PAGE))
    assert part.forwards == 0


def test_nested_calls_share_an_arena():
    arena, outer, inner = Arena(8 * PAGE), Part(), Part()

    def gradients(call):
        torch.manual_seed(5)
        x = torch.ones(3, WIDTH, requires_grad=True)
        y = call(lambda x: outer(call(inner, torch.tanh(x))), x * 1.0)
        return [
            y.detach(),
            *torch.autograd.grad(y.square().sum(), [x, *inner.parameters(), *outer.parameters()]),
        ]

    assert_same_bits(
        gradients(lambda f, x: checkpoint(f, x, arena=arena)), gradients(lambda f, x: f(x))
    )
    assert arena.used == 0
