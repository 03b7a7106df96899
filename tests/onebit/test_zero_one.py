"""ZeroOneAdam: its rounds by the closed form, its steps against float64, ranks that are one after each message."""

from __future__ import annotations

import pytest
import torch

from pyops.comm.codec import Identity, OneBit
from pyops.onebit.rounds import RoundSchedule
from tests.onebit.runs import optimizer_of, run_steps, take_steps
from tests.onebit.simulation import random_gradients, random_parameters

pytestmark = pytest.mark.cpu_only

ROUNDS = {"warmup_steps": 7, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, **ROUNDS}


def test_rounds_are_the_closed_form():
    schedule = RoundSchedule(100, 4, 10, 8)
    updates, step, j = [], 1, 1
    while step <= 100:
        updates.append(step)
        step, j = step + 2 ** (j // 4), j + 1
    messages, at = [], 0
    while at < 200:
        at += min(8, 2 ** (at // 10))
        messages.append(100 + at)
    kinds = {step: schedule.kind(step) for step in range(1, 301)}
    assert [step for step, kind in kinds.items() if kind == "exact"] == updates
    assert [step for step, kind in kinds.items() if kind == "compressed" and step > 100] == [m for m in messages if m <= 300]
    assert schedule.rounds(300) == (len(updates), 100 - len(updates) + sum(m <= 300 for m in messages),
                                    200 - sum(m <= 300 for m in messages))  # fmt: skip


def test_the_default_rounds_send_a_sixtieth():
    optimizer, _ = optimizer_of("ZeroOneAdam", random_parameters(), None, {"total_steps": 2000})
    exact, compressed, local = optimizer.rounds(2000)
    assert exact + compressed + local == 2000
    bits = OneBit()
    ratio = bits.payload_bytes(1 << 20) / (4 << 20)
    assert (exact + compressed * ratio) / 2000 <= 1 / 60


def test_without_loss_and_with_a_message_in_every_step_it_is_adamw_with_its_variance_kept():
    params, gradients = random_parameters(), random_gradients(9, 1)
    options = {**OPTIONS, "var_update_scaler": 100, "local_step_clipper": 1, "codec": Identity(), "warmup_steps": 5}
    optimizer, copies = optimizer_of("ZeroOneAdam", params, None, options)
    found = take_steps(optimizer, copies, [g[0] for g in gradients])
    for i, param in enumerate(params):
        p, m, v = param.double(), torch.zeros_like(param).double(), torch.zeros_like(param).double()
        for t, each in enumerate(gradients, start=1):
            g = each[0][i].double()
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g * g if t <= 5 else v
            variance = v / (1 - 0.99 ** min(t, 5))
            p = p * (1 - 1e-3) - 1e-2 * m / (1 - 0.9**t) / (variance.sqrt() + 1e-8)
            rounding = 2 * t * 2.0**-23 * p.abs() + t * 1e-7
            assert ((found.params[t - 1][i].double() - p).abs() <= rounding).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_one_after_each_message_and_differ_between(world, ranks):
    params, gradients = random_parameters(), random_gradients(30, ranks)
    results = world(ranks).run(run_steps, "ZeroOneAdam", params, gradients, {**OPTIONS, "codec": OneBit(block=64)})
    schedule = RoundSchedule(7, 2, 3, 4)
    seen = set()
    for step in range(1, 31):
        kind = schedule.kind(step)
        seen.add(kind)
        same = all(torch.equal(a, b) for r in results[1:] for a, b in zip(r.params[step - 1], results[0].params[step - 1],
                                                                        strict=True))  # fmt: skip
        assert same == (kind != "local"), (step, kind)
    assert seen == {"exact", "compressed", "local"}


def test_local_steps_add_up_as_the_formulas_say(world):
    """Identity on the wire: parameters after each message are those of the mean of the ranks' own moves, in float64."""
    ranks, (b1, b2) = 2, OPTIONS["betas"]
    params, gradients = random_parameters(), random_gradients(30, ranks)
    results = world(ranks).run(run_steps, "ZeroOneAdam", params, gradients, {**OPTIONS, "codec": Identity()})
    schedule, keep = RoundSchedule(7, 2, 3, 4), 1 - 1e-2 * 0.1
    for i, param in enumerate(params):
        x, m, v, k = param.double(), torch.zeros_like(param).double(), torch.zeros_like(param).double(), 0
        for t, each in enumerate(gradients, start=1):
            g = [each[r][i].double() for r in range(ranks)]
            kind, new = schedule.kind(t), (1 - b1) / (1 - b1**t)
            if t <= 7:
                mean = sum(g) / ranks
                m = (1 - new) * m + new * mean
                if kind == "exact":
                    k += 1
                    share = (1 - b2) / (1 - b2**k)
                    v = (1 - share) * v + share * mean * mean
                x = x * keep - 1e-2 * m / (v.sqrt() + 1e-8)
                if t == 7:
                    w, s, p, L, D = [m / (v.sqrt() + 1e-8)] * ranks, [0.0] * ranks, [x] * ranks, 0.0, 1.0
                continue
            w = [(1 - new) * a + new * b / (v.sqrt() + 1e-8) for a, b in zip(w, g, strict=True)]
            s = [a * keep + 1e-2 * b for a, b in zip(s, w, strict=True)]
            p = [a * keep - 1e-2 * b for a, b in zip(p, w, strict=True)]
            L, D = L * keep + 1e-2, D * keep
            if kind == "compressed":
                total = sum(s) / ranks
                x = x * D - total
                w, s, p, L, D = [total / L] * ranks, [0.0] * ranks, [x] * ranks, 0.0, 1.0
            for r in range(ranks):
                error = (results[r].params[t - 1][i].double() - p[r]).abs()
                assert (error <= 3 * t * 2.0**-23 * p[r].abs() + t * 2e-7).all(), (t, kind, error.max())


def test_resumed_within_an_interval_it_goes_on_bit_for_bit(world):
    params, gradients = random_parameters(), random_gradients(26, 2)
    options = {**OPTIONS, "codec": OneBit(block=64)}
    whole = world(2).run(run_steps, "ZeroOneAdam", params, gradients, options)
    for stop in (2, 4, 7, 8, 14, 22):
        first = world(2).run(run_steps, "ZeroOneAdam", params, gradients[:stop], options)
        saved = ([r.state for r in first], first[0].params[-1])  # rank 0's parameters, as a trainer saves them
        rest = world(2).run(run_steps, "ZeroOneAdam", params, gradients[stop:], options, saved)
        for r in range(2):
            for i in range(len(params)):
                assert torch.equal(rest[r].params[-1][i], whole[r].params[-1][i]), stop
