"""Gradual pruning in one process: along the schedule, resumed, with and without regrowth; and
lottery tickets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops import optim
from pyops.pruning import CubicSchedule, LotteryConfig, Masks, gradual, hold, lottery, magnitude

pytestmark = pytest.mark.cpu_only

SCHEDULE = CubicSchedule(final=0.9, begin=3, every=2, times=5)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 2))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 10, generator=generator)
    optimizer.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    optimizer.step()


def adam(model: nn.Module) -> optim.AdamW:
    return optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def zeros(model: nn.Module) -> list[int]:
    return [int((model[i].weight == 0).sum()) for i in (0, 2)]


def test_the_schedule_is_kept_and_nothing_comes_back():
    model = network()
    optimizer = adam(model)
    gone: dict[str, Tensor] = {}
    with gradual(model, optimizer, SCHEDULE) as pruner:
        for number in range(1, 20):
            step(model, optimizer, number)
            pruner.step()
            share = SCHEDULE.at(number) if number >= SCHEDULE.begin else 0.0
            assert zeros(model) == [round(share * 200), round(share * 400)]
            for name in pruner.masks or ():
                dead = ~pruner.masks[name].alive()
                assert not (gone.get(name, dead) & ~dead).any(), "what is gone stays gone"
                gone[name] = dead
        assert pruner.sparsity == 0.9
    assert len(gone) == 2


def test_resumed_in_the_middle_is_uninterrupted():
    def run(model: nn.Module, optimizer: Any, pruner: Any, last: int) -> None:
        for number in range(pruner.steps, last):
            step(model, optimizer, number)
            pruner.step()

    whole, parts = network(), network()
    optimizer = adam(whole)
    with gradual(whole, optimizer, SCHEDULE) as pruner:
        run(whole, optimizer, pruner, 17)
    first = adam(parts)
    with gradual(parts, first, SCHEDULE) as pruner:
        run(parts, first, pruner, 8)
        state = copy.deepcopy([parts.state_dict(), first.state_dict(), pruner.state_dict()])
    again = network(seed=5)
    again.load_state_dict(state[0])
    second = adam(again)
    second.load_state_dict(state[1])
    with gradual(again, second, SCHEDULE) as pruner:
        pruner.load_state_dict(state[2])
        run(again, second, pruner, 17)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert a.equal(b)


def test_weights_grow_again_with_the_values_they_had():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    schedule = CubicSchedule(final=0.5, begin=1, every=1, times=2, initial=0.5)
    before = model[0].weight.detach().clone()
    with gradual(model, optimizer, schedule, regrow=True, only=["0.weight"]) as pruner:
        step(model, optimizer, 0)
        pruner.step()
        first = pruner.masks["0.weight"].alive()
        with torch.no_grad():  # what was kept becomes small: what was pruned is larger now
            model[0].weight.mul_(1e-6)
        step(model, optimizer, 1)
        pruner.step()
        second = pruner.masks["0.weight"].alive()
        assert second.equal(~first)
        assert model[0].weight.detach()[second].equal(before[second])
        with pytest.raises(ValueError, match=r"keeps pruned values beside the model"):
            pruner.state_dict()
    half = network().bfloat16()
    with pytest.raises(ValueError, match=r"0.weight is of 16 bits"):
        gradual(half, adam(half), schedule, regrow=True)


class Trainer:
    """Notes what each training begins with."""

    def __init__(self, steps: int = 12) -> None:
        self.steps, self.starts = steps, list[tuple[int, int, dict[str, Tensor]]]()

    def __call__(
        self, model: nn.Module, masks: Masks | None, *, first: int, last: int | None
    ) -> None:
        end = self.steps if last is None else last
        self.starts.append((first, end, copy.deepcopy(model.state_dict())))
        optimizer = adam(model)
        held = None if masks is None else hold(masks, optimizer)
        for number in range(first, end):
            step(model, optimizer, number)
        if held is not None:
            held.close()


@pytest.mark.parametrize("rewind", [0, 4])
def test_each_round_begins_with_masked_first_weights(rewind: int, tmp_path):
    train = Trainer()
    folder = tmp_path / "theta" if rewind else None
    config = LotteryConfig(rounds=3, rate=0.4, rewind=rewind, folder=folder)
    tickets, alive = [], None
    for ticket in lottery(network, train, config):
        numel = {"0.weight": 200, "2.weight": 400}
        sparsity = 1 - 0.6**ticket.round
        for name, mask in ticket.masks.items():
            assert mask.kept == numel[name] - round(sparsity * numel[name])
            assert alive is None or not (mask.alive() & ~alive[name].alive()).any()
        alive = dict(ticket.masks)
        tickets.append((ticket, alive, copy.deepcopy(ticket.model.state_dict())))
    assert len(tickets) == 3
    theta = network()
    if rewind:
        Trainer()(theta, None, first=0, last=rewind)
    rounds = train.starts[1 + bool(rewind) :]
    assert [(first, end) for first, end, _ in rounds] == [(rewind, 12)] * 3
    for (_, masks, trained), (_, _, start) in zip(tickets, rounds, strict=True):
        for name, value in theta.state_dict().items():
            expected = value
            if name in masks:
                expected = value.masked_fill(~masks[name].alive(), 0.0)
                assert not trained[name][~masks[name].alive()].any()
            assert start[name].equal(expected), "mask * theta_k to the bit"
    ticket = tickets[-1][0]
    control = ticket.control(seed=9)
    again = Trainer()
    other = network(9)
    again(other, None, first=0, last=rewind)
    again(other, Masks(other, dict(ticket.masks)), first=rewind, last=None)
    assert all(a.equal(b) for a, b in zip(control.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"seed 0 is the ticket's own draw"):
        ticket.control(seed=0)


def test_a_training_that_cannot_begin_in_the_middle_is_refused():
    def train(model: nn.Module, masks: Masks | None) -> None:
        raise AssertionError("it is not called")

    with pytest.raises(TypeError, match=r"repeats the same data from step `first` on"):
        lottery(network, train, LotteryConfig(rounds=1))


def test_what_gradual_is_not_given():
    """Before the model is touched; a state of something else changes nothing."""
    model = network()
    optimizer = adam(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="schedule is a float; give a CubicSchedule"):
        gradual(model, optimizer, 0.5)
    for given in (None, model):
        with pytest.raises(TypeError, match="give the one that trains the model"):
            gradual(model, given, CubicSchedule(final=0.5, begin=0, every=1, times=1))
    with gradual(model, optimizer, SCHEDULE) as pruner:
        for state, message in (
            ({}, "the state of a gradual pruning has steps and masks"),
            (None, "not NoneType"),
            ({"steps": -1, "masks": None}, "the state's steps is -1; give a whole number"),
        ):
            with pytest.raises(ValueError, match=message):
                pruner.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    masks = magnitude(model, 0.5)
    with pytest.raises(TypeError, match="masks is a dict; give the Masks of the model"):
        hold(dict(masks), optimizer)
