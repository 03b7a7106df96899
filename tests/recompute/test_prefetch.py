"""Inputs fetched ahead: in which order, that bits stay, and that nothing is kept longer than it
should be."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops import recompute
from pyops.comm.collectives.work import ThreadWork
from pyops.recompute import Arena, Prefetch, checkpoint, inputs
from tests.recompute.parts import WIDTH, Part, Stack, run

pytestmark = pytest.mark.cpu_only


class Noted(Part):
    """A part that notes its forwards."""

    def __init__(self, number: int, notes: list[str]) -> None:
        super().__init__()
        self.number, self.notes = number, notes

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        self.notes.append(f"run {self.number}")
        return super().forward(x, **options)


def _noted_stack(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Parts 0, 1, 2; notes get "fetch N" when the gather of part N's input is begun, N being the
    part that has kept so many elements."""
    model = Stack()
    model.parts = nn.ModuleList(Noted(i, notes) for i in range(3))
    gather = inputs._gather

    def begun(part: Tensor, group: Any, numel: int) -> Any:
        work = gather(part, group, numel)
        assert isinstance(work, ThreadWork), "the gather must not be waited for here"
        notes.append("fetch")
        return work

    monkeypatch.setattr(inputs, "_gather", begun)
    return model


def _order(rank: int, group: Any, use: str) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = _noted_stack(notes, monkeypatch)
        plain = copy.deepcopy(model)
        if use == "checkpoint":
            prefetch = Prefetch()
            model.call = lambda part, x: checkpoint(
                part, x, partition_group=group, prefetch=prefetch
            )
        else:
            recompute.apply(model, ["parts.*"], partition_group=group, prefetch=use == "apply")
        x = torch.randn(5, WIDTH)
        expected, notes[:] = run(plain, x), []
        found = [
            *zip(run(model, x), expected, strict=True),
            *zip(run(model, x), run(model, x), strict=True),
        ]
        first = notes[3 : len(notes) // 3]
    return first, all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("use", ["checkpoint", "apply"])
def test_the_input_before_is_on_its_way_while_a_part_runs(world, use):
    for notes, same in world(2).run(_order, use):
        assert same
        assert notes == ["fetch", "fetch", "run 2", "fetch", "run 1", "run 0"]


def test_without_prefetch_each_part_waits_for_its_own(world):
    for notes, same in world(2).run(_order, "not"):
        assert same
        assert notes == ["run 2", "run 1", "run 0"]


def _orders_of_backward(rank: int, group: Any) -> list[bool]:
    """Branches, several forwards before backward, backward twice, several inputs, calls within
    calls."""
    torch.manual_seed(0)
    prefetch = Prefetch()
    first, second = Part(), Part()

    def call(part: nn.Module, x: Tensor, **more: Any) -> Tensor:
        return checkpoint(part, x, partition_group=group, prefetch=prefetch, **more)

    def nested(part: nn.Module, x: Tensor) -> Tensor:
        return call(lambda y: call(part, y) + call(second, y), x)

    def direct(part: nn.Module, x: Tensor, **more: Any) -> Tensor:
        return part(x, **more)

    def gradients(f: Any, of: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH).requires_grad_()
        for part in (first, second):
            part.zero_grad()
            part.dropout.p = 0.0
        of(f, x)
        return [x.grad, *(p.grad for part in (first, second) for p in part.parameters())]

    def branches(f: Any, x: Tensor) -> None:
        a, b = f(first, x), f(second, x)
        (b.sum() * 2).backward()
        a.square().sum().backward()

    def accumulated(f: Any, x: Tensor) -> None:
        losses = [f(second, f(first, x * scale)).square().sum() for scale in (1.0, 2.0, 3.0)]
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()

    def twice(f: Any, x: Tensor) -> None:
        y = f(second, f(first, x)).square().sum()
        y.backward(retain_graph=True)
        y.backward()

    def several(f: Any, x: Tensor) -> None:
        f(second, f(first, x, shift=x * 2), shift=x.exp()).square().sum().backward()

    found = []
    for of in (branches, accumulated, twice, several):
        pairs = zip(gradients(call, of), gradients(direct, of), strict=True)
        found.append(all(torch.equal(a, b) and bool(b.abs().max() > 0) for a, b in pairs))
    within = gradients(nested, lambda f, x: f(first, f(first, x)).square().sum().backward())
    plain = gradients(
        lambda part, x: part(x) + second(x),
        lambda f, x: f(first, f(first, x)).square().sum().backward(),
    )
    return [*found, all(torch.equal(a, b) for a, b in zip(within, plain, strict=True))]


@pytest.mark.parametrize("size", [2, 3])
def test_any_order_of_backward_gives_the_same_bits(world, size):
    for found in world(size).run(_orders_of_backward):
        assert found == [True] * 5


def test_what_was_kept_goes_with_the_results():
    arena, prefetch = Arena(1 << 16), Prefetch()
    parts = [Part() for _ in range(3)]
    for _ in range(2):
        x = torch.randn(4, WIDTH, requires_grad=True)
        for part in parts:
            x = checkpoint(part, x, arena=arena, prefetch=prefetch)
        assert arena.used > 0
        x.sum().backward()
        del x
        gc.collect()
        assert arena.used == 0
    y = parts[0](torch.randn(4, WIDTH))
    for part in parts:
        y = checkpoint(part, y, arena=arena, prefetch=prefetch)
    assert arena.used > 0
    del y  # no backward
    gc.collect()
    assert arena.used == 0


def test_what_is_no_prefetch_is_refused():
    with pytest.raises(TypeError, match="prefetch"):
        checkpoint(Part(), torch.randn(2, WIDTH), prefetch=True)
