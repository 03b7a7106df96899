"""A step's parts sum up to it, and each has the time of its own module and pass, on a clock that
the modules set forward themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyops.observe.profile.parts import OUTSIDE, Part, Parts, by_phase

pytestmark = pytest.mark.cpu_only


class Clock:
    now = 0.0


class Taking(torch.autograd.Function):
    """Doubles; takes so many seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        ctx.save_for_backward(x)  # for which it is computed again
        Clock.now += forward
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        assert len(ctx.saved_tensors) == 1
        Clock.now += ctx.backward_seconds
        return dy * 2, None, None


class Layer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Taking.apply(x * self.weight, *self.seconds)


class Block(nn.Module):
    """Two layers and a sum around them, as in a transformer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.second = Layer(scale, 2 * scale), Layer(3 * scale, 4 * scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class Model(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.entry = Layer(100.0, 200.0)
        self.blocks = nn.ModuleList([Block(1.0), Block(10.0)])
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.sum()


def parts_of(model: nn.Module) -> Parts:
    parts = Parts(model, torch.device("cpu"))
    parts._now = lambda: Clock.now
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parts.step():
        Clock.now += 7.0
        loss = model(torch.ones(2))
        Clock.now += 11.0
        loss.backward()
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.step()
        Clock.now += 13.0
    return parts


def test_each_module_and_pass_has_its_own_time_and_all_sum_up_to_the_step():
    begun = Clock.now
    parts = parts_of(Model())
    totals = {part: seconds for part, seconds in parts.totals().items() if seconds}
    assert totals == {
        Part("entry", "forward"): 100,
        Part("entry", "backward"): 200,
        Part("blocks.0.first", "forward"): 1,
        Part("blocks.0.first", "backward"): 2,
        Part("blocks.0.second", "forward"): 3,
        Part("blocks.0.second", "backward"): 4,
        Part("blocks.1.first", "forward"): 10,
        Part("blocks.1.first", "backward"): 20,
        Part("blocks.1.second", "forward"): 30,
        Part("blocks.1.second", "backward"): 40,
        Part(OUTSIDE, ""): 7 + 11 + 13,
    }
    assert parts.seconds == sum(totals.values()) == Clock.now - begun
    assert by_phase(totals) == {
        "forward": 144,
        "backward": 266,
        "optimizer": 0,
        "waiting": 0,
        "other": 31,
    }


def test_what_is_computed_again_is_forward_time_and_nothing_is_lost():
    begun = Clock.now
    parts = parts_of(Model(again=True))
    totals = parts.totals()
    assert totals[Part("blocks.1.second", "forward")] == 2 * 30
    assert totals[Part("blocks.0.first", "forward")] == 2
    assert totals[Part("blocks.1.first", "backward")] == 20
    assert sum(totals.values()) == parts.seconds == Clock.now - begun


def test_a_second_step_begins_anew_and_no_hook_stays():
    model = Model()
    first, second = parts_of(model), parts_of(model)
    assert first.totals() == second.totals()
    looks: list[float] = []
    first._now = second._now = lambda: looks.append(Clock.now)
    model(torch.ones(2)).backward()
    assert looks == []


def test_a_step_that_raises_leaves_no_hook():
    model = Model()
    parts = Parts(model, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="on purpose"), parts.step():
        raise RuntimeError("on purpose")
    model(torch.ones(2)).backward()
    assert parts.current == Part(OUTSIDE, "")
