"""Stochastic rounding in the optimizer: unbiased, repeatable, the same for shards and after a
resume."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pyops.optim import AdamW
from tests.optim.pairs import HYPER, assert_equal, give_gradients, parameters, run, twins

OPTIONS = {"state_dtype": torch.bfloat16, "stochastic_rounding": True}


def test_small_steps_are_not_lost(device):
    """Steps of 1/64 ulp: rounding to nearest stays where it is for ever, on average this one moves
    as it should."""

    def drift(stochastic):
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device))
        # From 1 downwards an ulp of bf16 is 2^-8.
        optimizer = AdamW([param], lr=2.0**-14, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return 1 - param.detach().float().mean().item()

    assert drift(False) == 0.0
    expected = 64 * 2.0**-14
    assert abs(drift(True) - expected) < 0.15 * expected


def test_two_runs_are_equal_and_another_seed_is_not(device):
    def final(seed):
        params = parameters(dtype=torch.bfloat16, device=device)
        run([AdamW(params, **HYPER, **OPTIONS, seed=seed)], [params], steps=3)
        return params

    assert_equal(final(5), final(5))
    assert any(
        not torch.equal(a.detach(), b.detach()) for a, b in zip(final(5), final(6), strict=True)
    )


def test_parameters_draw_numbers_of_their_own(device):
    """Equal parameters with equal gradients: equal bits would mean that they share their random
    numbers."""
    a = parameters(((512,), (512,)), dtype=torch.bfloat16, device=device)
    a[1].data.copy_(a[0].data)
    optimizer = AdamW(a, **HYPER, **OPTIONS)
    a[0].grad = torch.randn_like(a[0])
    a[1].grad = a[0].grad.clone()
    optimizer.step()
    assert not torch.equal(a[0].detach(), a[1].detach())


def test_resumed_bit_for_bit(device):
    a = parameters(dtype=torch.bfloat16, device=device)
    b = twins(a)
    first = AdamW(a, **HYPER, **OPTIONS, seed=77)
    run([first], [a], steps=3)
    saved = copy.deepcopy(first.state_dict())
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    second = AdamW(b, **OPTIONS)  # hyper-parameters and the seed come from the state_dict
    second.load_state_dict(saved)
    run([first, second], [a, b], steps=3, first=3)
    assert_equal(a, b)


def test_shards_with_offsets_round_as_the_whole(device):
    """Halves on two optimizers, each told where its half starts."""
    whole = parameters(((96,), (64,)), dtype=torch.bfloat16, device=device)
    halves = [[nn.Parameter(p.detach().clone().chunk(2)[r]) for p in whole] for r in (0, 1)]
    starts = [[0, 96], [48, 96 + 32]]
    optimizers = [
        AdamW([{"params": half, "offsets": at}], **HYPER, **OPTIONS)
        for half, at in zip(halves, starts, strict=True)
    ]
    reference = AdamW(whole, **HYPER, **OPTIONS)
    for step in range(3):
        give_gradients(whole, seed=step)
        for i, p in enumerate(whole):
            for r in (0, 1):
                halves[r][i].grad = p.grad.chunk(2)[r].clone()
        for optimizer in (reference, *optimizers):
            optimizer.step()
    assert_equal(
        whole, [torch.cat([halves[0][i].detach(), halves[1][i].detach()]) for i in range(2)]
    )


def test_offsets_are_of_this_process_and_stay_when_a_state_is_loaded():
    first, second = (
        AdamW([{"params": parameters(((8,),), dtype=torch.bfloat16), "offsets": [at]}], **OPTIONS)
        for at in (0, 8)
    )
    assert "offsets" not in first.state_dict()["param_groups"][0]
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["offsets"] == [8]
