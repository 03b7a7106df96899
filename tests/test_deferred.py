"""Weight gradients that are put off: I then W has the bits of B, hooks run once, nothing is kept
longer than needed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyops import deferred, recompute
from pyops.deferred import Deferred
from pyops.deferred import queue as queue_module
from tests.deferred_models import (
    Embedded,
    Shared,
    Twice,
    assert_same_bits,
    batches,
    found,
    split,
    whole,
)

pytestmark = pytest.mark.on_device


@pytest.mark.parametrize("together", [False, True])
def test_apart_has_the_bits_of_one_backward(together: bool):
    for make in (Twice, Shared):
        plain = make()
        model = copy.deepcopy(plain)
        assert deferred.linears(model) == (
            ["first", "again", "tied", "last"] if make is Twice else []
        )
        assert_same_bits(split(model, batches(), together=together), whole(plain, batches()))


def test_one_take_of_several_backward_passes_adds_them_one_by_one():
    plain, model = Twice(), Twice()
    deferred.linears(model)
    queue, inputs = Deferred(model.parameters()), batches()
    for x in inputs:
        with queue.collecting():
            model(x).square().sum().backward()
    assert model.last.weight.grad is None
    assert model.norm.weight.grad is not None  # comes with its input's
    queue.take().accumulate()
    assert_same_bits(found(model, inputs), whole(plain, batches()))


def test_nothing_is_put_off_outside_collecting():
    plain, model = Twice(), Twice()
    deferred.linears(model)
    queue = Deferred(model.parameters())
    assert_same_bits(whole(model, batches()), whole(plain, batches()))
    queue.take().accumulate()
    assert_same_bits(found(model, []), found(plain, []))
    queue.release()
    assert not any(hasattr(p, "deferred") for p in model.parameters())


def test_a_weight_shared_with_an_embedding_gets_its_whole_gradient_at_once():
    plain, model = Embedded(), Embedded()
    deferred.linears(model)
    counts: list[Tensor] = []
    model.words.weight.register_post_accumulate_grad_hook(lambda p: counts.append(p.grad.clone()))
    words = [torch.randint(7, (4,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    assert_same_bits(split(model, words, together=True), whole(plain, words))
    assert len(counts) == 3
    assert torch.equal(counts[-1], plain.words.weight.grad)


@pytest.mark.parametrize("name", ["again", "last", "norm"])
def test_hooks_run_once_with_the_whole_gradient(name: str):
    def run(
        step: Callable[[nn.Module, list[Tensor]], object], model: nn.Module
    ) -> list[tuple[str, Tensor]]:
        seen: list[tuple[str, Tensor]] = []
        weight = model.get_submodule(name).weight
        weight.register_hook(lambda g: seen.append(("gradient", g.clone())) or 3 * g)
        weight.register_hook(lambda g: seen.append(("tripled", g.clone())))
        handle = weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(("grad", p.grad.clone()))
        )
        step(model, batches())
        handle.remove()
        step(model, batches(count=1))
        return seen

    plain, model = Twice(), Twice()
    deferred.linears(model)
    expected, seen = run(whole, plain), run(split, model)
    assert (
        [kind for kind, _ in seen]
        == [kind for kind, _ in expected]
        == ["gradient", "tripled", "grad"] * 3
        + [
            "gradient",
            "tripled",
        ]
    )
    assert_same_bits([g for _, g in seen], [g for _, g in expected])


def test_hooks_of_a_weight_shared_with_an_embedding_see_the_sum():
    plain, model = Embedded(), Embedded()
    deferred.linears(model)
    words = [torch.arange(7)]
    for each in (plain, model):
        each.words.weight.register_hook(lambda g: g * g)
    assert_same_bits(split(model, words), whole(plain, words))


def test_main_grad_takes_the_pieces():
    plain, model = Shared(), Shared()
    for each in (plain, model):
        for layer in (each.up, each.down):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
    told: list[Tensor] = []
    model.up.weight.register_post_accumulate_grad_hook(lambda p: told.append(p.main_grad.clone()))
    assert_same_bits(split(model, batches()), whole(plain, batches()))
    assert model.up.weight.grad is None
    assert len(told) == 3
    assert torch.equal(told[-1], plain.up.weight.main_grad)


def test_kept_tensors_go_as_their_gradients_come():
    model = Twice()
    deferred.linears(model)
    queue = Deferred(model.parameters())
    (x,) = batches(count=1)
    hidden: list[Tensor] = []
    model.first.register_forward_hook(lambda *given: hidden.append(given[-1]))
    loss = model(x).square().sum()
    graph, kept = weakref.ref(hidden[0].grad_fn), weakref.ref(hidden[0].untyped_storage())
    hidden.clear()
    with queue.collecting():
        loss.backward()
    pieces = queue.take()
    # first and again get x [10, .], three times of 8 inputs and one of 6; dy's are of 8, 8, 8, 8
    # and 3 columns.
    assert pieces.nbytes == 4 * 10 * (6 + 3 * 8 + 8 + 4 * 8 + 3)
    del loss, x
    gc.collect()
    assert graph() is None  # what computed the operands is gone
    pieces.accumulate()
    assert pieces.nbytes == 0
    assert kept() is None
    assert queue.take().nbytes == 0


def test_each_parameter_lets_go_what_was_kept_for_it_before_the_next():
    model, (x,) = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)), batches(count=1)
    deferred.linears(model)
    queue, left = Deferred(model.parameters()), []
    with queue.collecting():
        model(x).square().sum().backward()
    pieces = queue.take()
    rows = {
        name: waiting
        for each in pieces._passes
        for waiting in each.values()
        for name, p in model.named_parameters()
        if p is waiting.parameter
    }
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, n=name: left.append((n, sum(len(w.operands) for w in rows.values())))
        )
    pieces.accumulate()
    assert left == [
        ("2.weight", 5),
        ("2.bias", 4),
        ("1.weight", 3),
        ("1.bias", 2),
        ("0.weight", 1),
        ("0.bias", 0),
    ]


def test_a_first_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    model, (x,), computed = nn.Linear(6, 4), batches(count=1), []

    def seen(*given: Tensor, inner: Callable[..., Tensor] = queue_module.local_gradient) -> Tensor:
        gradient = inner(*given)
        computed.append(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(queue_module, "local_gradient", seen)
    deferred.linears(model)
    queue = Deferred(model.parameters())
    with queue.collecting():
        model(x).square().sum().backward()
    queue.take().accumulate()
    assert [p.grad.data_ptr() for p in model.parameters()] == computed


def test_a_backward_that_raises_leaves_nothing_behind():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: Tensor) -> Tensor:  # type: ignore[override]
            raise ArithmeticError("bad")

    model, calls = Twice(), []
    deferred.linears(model)
    queue = Deferred(model.parameters())
    model.last.weight.register_hook(lambda g: calls.append(g))
    (x,) = batches(count=1)
    with pytest.raises(ArithmeticError, match="bad"), queue.collecting():
        model(Bad.apply(x)).square().sum().backward()
    queue.take().accumulate()
    assert model.last.weight.grad is None
    model(x).square().sum().backward()
    assert len(calls) == 1


def test_a_kept_tensor_that_is_changed_is_refused():
    model, (x,) = nn.Linear(6, 4), batches(count=1)
    deferred.linears(model)
    queue = Deferred(model.parameters())
    with queue.collecting():
        model(x).sum().backward()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="changed in place since"):
        queue.take().accumulate()


def test_linears_are_replaced_and_put_back():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    recompute.apply(model, ["3"])
    names, own = list(model.state_dict()), model[3].forward
    assert deferred.linears(model) == ["0", "2"]
    assert deferred.linears(model) == []
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert twin[0].forward.module is twin[0]
    assert deferred.remove(model) == ["0", "2"]
    assert "forward" not in model[0].__dict__
    assert model[3].forward is own


def test_frozen_and_narrow():
    model = nn.Linear(6, 4)
    deferred.linears(model)
    model.weight.requires_grad_(False)
    queue, (x,) = Deferred(model.parameters()), batches(count=1)
    with queue.collecting():
        model(x[0, 0]).square().sum().backward()
    assert model.bias.grad is None
    queue.take().accumulate()
    assert model.weight.grad is None
    assert model.bias.grad.abs().max() > 0
    assert x.grad.abs().max() > 0


def test_refusals():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="computed from others"):
        Deferred([p * 2])
    queue = Deferred([p])
    with (
        queue.collecting(),
        pytest.raises(RuntimeError, match="collecting already"),
        queue.collecting(),
    ):
        pass
    assert queue.take().nbytes == 0
