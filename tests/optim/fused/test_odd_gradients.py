"""Gradients and parameters that are views still to be computed, or have lost their memory: stepped
as they read, or refused by name; nothing is changed then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.optim import LAMB, LARS, SGD, Adafactor, Adagrad, Adam, AdamW, Lion
from tests.odd_input.tensors import ODD
from tests.optim.pairs import assert_equal, give_gradients, parameters

pytestmark = pytest.mark.cpu_only
KINDS = (SGD, Adam, AdamW, Adagrad, Lion, LAMB, LARS, Adafactor)
SHAPES = ((4, 4), (3,))
MANY = (
    *SHAPES,
    *((2,) for _ in range(12)),
)  # new gradients of which are asked together, not one by one


def _steps(
    kind, odd: str | None, *, zero_grad: bool = False, steps_before: int = 1, shapes=SHAPES
) -> list[nn.Parameter]:
    """Parameters after some steps, the last of them with gradients of which one is odd."""
    a = parameters(shapes)
    optimizer = kind(
        a, lr=0.1, zero_grad=zero_grad, **({"momentum": 0.9} if kind in (SGD, LARS) else {})
    )
    for step in range(steps_before):
        give_gradients(a, seed=step)
        optimizer.step()
    give_gradients(a, seed=9)
    if odd is not None:
        a[0].grad = ODD[odd](a[0].grad)
    elif a[0].grad is not None:
        a[0].grad = -a[0].grad
    optimizer.step()
    return a


@pytest.mark.parametrize(
    ("steps_before", "shapes"), [(0, SHAPES), (1, SHAPES), (2, MANY)], ids=["first", "few", "many"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_a_negative_view_is_stepped_with_its_sign(kind, steps_before, shapes):
    """At the first step, and at a later one, when only what changed is looked at."""
    options = {"steps_before": steps_before, "shapes": shapes}
    assert_equal(_steps(kind, "negative view", **options), _steps(kind, None, **options))


def test_a_gradient_that_is_a_negative_view_is_zeroed():
    a = _steps(AdamW, "negative view", zero_grad=True)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in a)
    assert_equal(a, _steps(AdamW, None, zero_grad=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_a_negative_view_is_refused(kind):
    with pytest.raises(
        ValueError, match=r"parameter 0 .* is a view whose sign is still to be taken"
    ):
        kind([nn.Parameter(torch._neg_view(torch.ones(4)))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ["emptied", "emptied, with an offset", "too short"])
@pytest.mark.parametrize(
    ("steps_before", "shapes"), [(0, SHAPES), (2, SHAPES), (2, MANY)], ids=["first", "few", "many"]
)
def test_a_new_gradient_without_memory(kind, odd, steps_before, shapes):
    a = parameters(shapes)
    optimizer = kind(a, lr=0.1)
    for step in range(steps_before):
        give_gradients(a, seed=step)
        optimizer.step()
    before = [p.detach().clone() for p in a]
    give_gradients(a, seed=5)
    a[1].grad = ODD[odd](a[1].grad)
    with pytest.raises(
        ValueError, match=r"the gradient of parameter 1 .* has elements but no memory"
    ):
        optimizer.step()
    assert_equal(a, before)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype"
)
@pytest.mark.parametrize("count", [1, 12], ids=["few", "many"])
def test_a_new_gradient_of_another_dtype_of_the_same_width_is_read_as_what_it_is(count):
    """Numbers that fp16 and bf16 both hold: their bits differ, the step must not."""
    sides = []
    for last in (torch.bfloat16, torch.float16):
        a = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = AdamW(a, lr=0.1)
        for dtype in (torch.bfloat16, torch.bfloat16, last):
            for p in a:
                p.grad, p.grad_dtype = None, dtype
                p.grad = torch.tensor([0.5, -2.0, 1.0, 0.25], dtype=dtype)
            optimizer.step()
        sides.append(a)
    assert_equal(*sides)
    assert not sides[0][0].eq(1.0).any()


def test_a_new_gradient_in_another_order_of_memory_without_its_own():
    """channels_last, which is asked one by one."""
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = AdamW([weight], lr=0.1)
    expected = weight.detach().clone()
    plain = AdamW([nn.Parameter(expected)], lr=0.1)
    for step in range(3):
        gradient = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(
            memory_format=torch.channels_last
        )
        weight.grad = (
            torch._neg_view(gradient)
            if step == 2
            else gradient.clone(memory_format=torch.preserve_format)
        )
        plain.param_groups[0]["params"][0].grad = -gradient if step == 2 else gradient
        optimizer.step()
        plain.step()
    assert torch.equal(weight, plain.param_groups[0]["params"][0])
    weight.grad = gradient.clone(memory_format=torch.preserve_format)
    weight.grad.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match="no memory"):
        optimizer.step()


@pytest.mark.parametrize("kind", [AdamW, SGD, LAMB])
@pytest.mark.parametrize("steps_before", [1, 3])
def test_a_state_whose_memory_was_given_back(kind, steps_before):
    a = parameters(SHAPES)
    optimizer = kind(a, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))
    for step in range(steps_before):
        give_gradients(a, seed=step)
        optimizer.step()
    before = [p.detach().clone() for p in a]
    for state in optimizer.state.values():
        for value in state.values():
            value.untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"state '\w+' of parameter 0 .* has elements but no memory"
    ):
        optimizer.step()
    assert_equal(a, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_parameter_beside_another(kind, shape):
    """As if it were not there."""
    pairs = [
        [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(shape))],
        [nn.Parameter(torch.ones(3, 2))],
    ]
    for params in pairs:
        optimizer = kind(params, lr=0.1, max_grad_norm=1.0)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("lr", torch.tensor(1j), "lr is a tensor of torch.complex64; it must be one real number"),
        ("lr", torch.tensor(True), "lr is a tensor of torch.bool"),
        ("lr", torch.tensor([0.1]).to_sparse(), "lr is a tensor with layout torch.sparse_coo"),
        ("weight_decay", torch.tensor(1j), "weight_decay is a tensor of torch.complex64"),
    ],
    ids=str,
)
def test_tensors_that_are_no_number(kind, name, value, says):
    with pytest.raises(TypeError, match=says):
        kind(parameters(), **{name: value})
    optimizer = kind(parameters())
    give_gradients(optimizer.param_groups[0]["params"], seed=0)
    optimizer.param_groups[0][name] = value
    with pytest.raises(TypeError, match=says):
        optimizer.step()


def test_betas_that_are_no_real_numbers():
    with pytest.raises(TypeError, match=r"betas\[1\] is a tensor of torch.complex64"):
        AdamW(parameters(), betas=(0.9, torch.tensor(1j)))
