"""Skipped steps, saved and resumed runs, and what is refused on every rank alike."""

from __future__ import annotations

import io
import logging

import pytest
import torch

from pyops.comm.compression.error_feedback import merge
from pyops.comm.compression.floats import BF16
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.power_sgd import PowerSGD
from pyops.comm.failure import DisagreementError
from pyops.data_parallel import DataParallel
from pyops.onebit import OneBitAdam
from tests.grids import full
from tests.onebit.runs import built, grads_of, optimizer_of, run_steps, take_steps
from tests.onebit.simulation import random_gradients, random_parameters

pytestmark = pytest.mark.on_device

OPTIONS = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "warmup_steps": 4,
    "codec": OneBit(block=64),
}
AVERAGES = {**OPTIONS, "frozen_beta2": 0.999}


@pytest.mark.parametrize("stop", [full(2), 4, full(6)])
def test_resumed_in_the_warmup_at_the_switch_and_after_it(world, stop):
    params, gradients = random_parameters(), random_gradients(9, 2)
    whole = world(2).run(run_steps, "OneBitAdam", params, gradients, AVERAGES)
    first = world(2).run(run_steps, "OneBitAdam", params, gradients[:stop], AVERAGES)
    states = []
    for result in first:  # the way through a file, as torch.load reads it by default
        file = io.BytesIO()
        torch.save(result.state, file)
        states.append(torch.load(io.BytesIO(file.getvalue())))
    rest = world(2).run(
        run_steps, "OneBitAdam", params, gradients[stop:], AVERAGES, (states, first[0].params[-1])
    )
    for step in range(9 - stop):
        for a, b in zip(rest[1].params[step], whole[1].params[stop + step], strict=True):
            assert torch.equal(a, b)


def with_a_bad_gradient(rank, group, params, gradients, at):
    optimizer, copies = optimizer_of("OneBitAdam", params, group, {**OPTIONS, "zero_grad": True})
    take_steps(optimizer, copies, [g[rank] for g in gradients[:at]])

    def everything():
        state = optimizer.state_dict()
        errors = state["communication"]["errors"]
        return (
            [p.detach().clone() for p in copies]
            + [t.clone() for entries in state["state"].values() for t in entries.values()]
            + [
                s.tensor.clone()
                for kind in ("worker", "server")
                for s in errors.get(kind, {}).values()
            ]
        )

    before = everything()
    grads_of(copies, gradients[at][rank])
    if rank == 1:
        copies[1].grad[3] = float("nan")
    optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    cleared = all(not p.grad.any() for p in copies)
    return same, cleared, bool(optimizer.grad_norm.isfinite()), optimizer.steps


@pytest.mark.parametrize("at", [2, 6])
def test_a_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing(world, at):
    found = world(2).run(with_a_bad_gradient, random_parameters(), random_gradients(8, 2), at)
    assert found == [(True, True, False, at)] * 2


def test_errors_of_two_ranks_are_shared_out_among_three(world):
    params, gradients = random_parameters(), random_gradients(8, 2)
    first = world(2).run(run_steps, "OneBitAdam", params, gradients, OPTIONS)
    errors = merge([r.state["communication"]["errors"] for r in first])
    state = first[0].state
    state["communication"]["errors"] = errors
    later = world(3).run(
        run_steps, "OneBitAdam", params, [], OPTIONS, ([state], first[0].params[-1])
    )
    again = merge([r.state["communication"]["errors"] for r in later])
    for name, rows in errors["worker"].items():
        before = rows.double().mean(0).flatten() + errors["server"][name].double()
        after = again["worker"][name].double().mean(0).flatten() + again["server"][name].double()
        assert (before - after).abs().max() <= 2.0**-22 * rows.abs().max()
        assert rows.abs().max() > 0


def refused(rank, group, params, what):
    try:
        if what == "options":
            optimizer_of("OneBitAdam", params, group, {**OPTIONS, "warmup_steps": 3 + rank})
        elif what == "one rank's mistake":
            optimizer_of("OneBitAdam", params, group, {**OPTIONS, "warmup_steps": 0 if rank else 4})
        elif what == "phases":
            optimizer, copies = optimizer_of("OneBitAdam", params, group, OPTIONS)
            optimizer.steps += rank
            grads_of(copies, params)
            optimizer.step()
        elif what == "gradient":
            optimizer, copies = optimizer_of("OneBitAdam", params, group, OPTIONS)
            grads_of(copies, params)
            if rank == 1:
                copies[0].grad = torch.ones(5, 13).to_sparse()
            optimizer.step()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.real_device
@pytest.mark.parametrize(
    ("what", "kinds", "text"),
    [
        ("options", [ValueError] * 2, "warmup_steps is 3 on rank 0, but 4 on rank 1"),
        ("one rank's mistake", [ValueError] * 2, "warmup_steps=0"),
        ("phases", [DisagreementError] * 2, "rank 1 after step 1"),
        ("gradient", [RuntimeError, TypeError], "rank"),
    ],
)
def test_what_one_rank_does_otherwise_is_raised_on_all(world, what, kinds, text):
    found = world(2).run(refused, random_parameters(), what)
    assert [kind for kind, _ in found] == kinds
    assert text in found[0][1]


def test_another_codec_is_refused_by_both_names():
    params, gradients = random_parameters(), random_gradients(6, 1)
    optimizer, copies = optimizer_of("OneBitAdam", params, None, OPTIONS)
    take_steps(optimizer, copies, [g[0] for g in gradients])
    other, _ = optimizer_of("OneBitAdam", params, None, {**OPTIONS, "codec": BF16()})
    with pytest.raises(ValueError, match=r"onebit\(block=64.*bf16"):
        other.load_state_dict(optimizer.state_dict())
    assert other.phase == "warmup"


def test_a_parameter_is_not_added_after_the_switch():
    params, gradients = random_parameters(), random_gradients(4, 1)
    optimizer, copies = optimizer_of("OneBitAdam", params, None, OPTIONS)
    take_steps(optimizer, copies, [g[0] for g in gradients[:3]])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    take_steps(optimizer, copies, [gradients[3][0]])
    with pytest.raises(ValueError, match="add it before the switch"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_a_warmup_as_long_as_the_run_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, logger="pyops"):
        built(OneBitAdam, [torch.nn.Parameter(torch.ones(3))], warmup_steps=10, total_steps=10)
    assert "nothing will be compressed" in caplog.text


@pytest.mark.parametrize(("loud", "last"), [(0, 12), (5, None)])
def test_auto_ends_when_the_variance_is_stable(caplog, loud, last):
    """A constant gradient: at once when there are two sums 10 steps apart; after loud ones: when
    these are forgotten.

    A step decides by the sum that it found, so one step after it could be known."""
    p = torch.nn.Parameter(torch.ones(50))
    optimizer = built(OneBitAdam, [p], warmup_steps="auto", betas=(0.9, 0.9), lr=0.0)
    sums = []
    with caplog.at_level(logging.INFO, logger="pyops"):
        while optimizer.phase == "warmup" and len(sums) < 100:
            p.grad = torch.ones(50) * (10.0 if len(sums) < loud else 1.0)
            optimizer.step()
            before = 0.0 if not sums else sums[-1] * (1 - 0.9 ** len(sums))
            square = 100.0 if len(sums) < loud else 1.0
            sums.append((0.9 * before + 0.1 * square) / (1 - 0.9 ** (len(sums) + 1)))
    if last is None:
        last = 1 + next(k for k in range(11, 101) if sums[k - 1] / sums[k - 11] >= 0.96)
        assert 30 < last < 100
    assert optimizer.steps == last
    assert f"warm-up ended after step {last}" in caplog.text


def train_flat(rank, group, accumulate):
    torch.manual_seed(0)
    model = DataParallel(torch.nn.Linear(20, 10), group=group, reduction="mean")
    assert model.require_backward_grad_sync
    optimizer = built(
        OneBitAdam,
        [b.parameter for b in model.flat],
        lr=1e-2,
        warmup_steps=3,
        group=group,
        model=model,
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        for part in range(accumulate):
            x = torch.randn(6, 20, generator=generator)
            if part + 1 < accumulate:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    names = sorted(optimizer.state_dict()["communication"]["errors"]["worker"])
    return model.flat[0].data.clone(), model.require_backward_grad_sync, names


def test_over_data_parallel_with_gradient_accumulation(world):
    found = world(2).run(train_flat, 2)
    assert torch.equal(found[0][0], found[1][0])
    assert [row[1] for row in found] == [False, False]
    assert found[0][2] == ["bias", "weight"]


def loads_what_one_rank_refuses(rank, group, params, states, what):
    optimizer, copies = optimizer_of("OneBitAdam", params, group, OPTIONS)
    state = states[rank]
    if what == "another rank's":
        state = states[0]
    elif what == "phases" and rank:
        state = optimizer.state_dict()
    elif what == "incomplete" and rank:
        state = {**state, "communication": {"phase": "compressed"}}
    with pytest.raises(ValueError, match=r"rank|lacks"):
        optimizer.load_state_dict(state)
    assert (optimizer.phase, optimizer.steps) == ("warmup", 0)
    assert not any(optimizer.state.values())
    grads_of(copies, params)
    optimizer.step()  # as if nothing had been tried
    return [p.detach().clone() for p in copies]


def test_a_state_that_one_rank_refuses_changes_nothing_on_any(world):
    params, gradients = random_parameters(), random_gradients(6, 2)
    states = [r.state for r in world(2).run(run_steps, "OneBitAdam", params, gradients, OPTIONS)]
    for what in ("another rank's", "phases", "incomplete"):
        first, second = world(2).run(loads_what_one_rank_refuses, params, states, what)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_state_of_another_optimizer_is_refused():
    params, gradients = random_parameters(), random_gradients(6, 1)
    optimizer, copies = optimizer_of("OneBitLAMB", params, None, OPTIONS)
    take_steps(optimizer, copies, [g[0] for g in gradients])
    other, _ = optimizer_of("OneBitAdam", params, None, OPTIONS)
    with pytest.raises(ValueError, match="that of a OneBitLAMB"):
        other.load_state_dict(optimizer.state_dict())


def with_other_options(rank, group, kind, params, gradients, options):
    with pytest.raises(ValueError, match=r"param_groups is .* on rank 0, but .* on rank 1"):
        optimizer_of(
            kind,
            params,
            group,
            {"lr": 1e-2, "warmup_steps": 2, **{k: v[rank] for k, v in options.items()}},
        )


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLAMB", "ZeroOneAdam"])
def test_options_that_differ_between_ranks_are_refused(world, kind):
    for options in (
        {"lr": (1e-2, 1e-3)},
        {"weight_decay": (0.0, 0.1)},
        {"eps": (1e-8, 1e-4)},
        {"master_weights": (False, True)},
    ):
        world(2).run(with_other_options, kind, random_parameters(), None, options)


def with_another_rate_later(rank, group, params, gradients, steps):
    optimizer, copies = optimizer_of("OneBitAdam", params, group, {"lr": 1e-2, "warmup_steps": 2})
    take_steps(optimizer, copies, [g[rank] for g in gradients[:steps]])
    before = [p.detach().clone() for p in copies]
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 + rank)
    grads_of(copies, gradients[steps][rank])
    with pytest.raises(DisagreementError, match="set the same lr"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, copies, strict=True))
    assert optimizer.steps == steps
    optimizer.param_groups[0]["lr"] = (
        torch.tensor(0.5) if rank else 0.5
    )  # the same number, however it is held
    optimizer.step()
    return [p.detach().clone() for p in copies]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_rate_that_differs_between_ranks_stops_the_step_on_all(world, steps):
    first, second = world(2).run(
        with_another_rate_later, random_parameters(), random_gradients(5, 2), steps
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_codecs_that_momenta_cannot_travel_by_are_refused():
    for codec, kind in ((OneBit, TypeError), (PowerSGD(), ValueError)):
        with pytest.raises(kind, match=r"codec|matrices"):
            built(OneBitAdam, [torch.nn.Parameter(torch.ones(3))], warmup_steps=2, codec=codec)
