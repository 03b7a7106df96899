"""ZeroOneAdam: its rounds by the closed form, its steps against ranks in float64, ranks that are
one after each message."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pyops.comm.compression.error_feedback import merge
from pyops.comm.compression.floats import Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.data_parallel import DataParallel
from pyops.flat import FlatBuffer
from pyops.onebit import ZeroOneAdam
from pyops.onebit.steps.round_schedule import RoundSchedule
from pyops.onebit.steps.variance import sketch
from tests.grids import cut, full
from tests.onebit.runs import Result, built, grads_of, optimizer_of, run_steps, take_steps
from tests.onebit.simulation import random_gradients, random_parameters
from tests.onebit.zero_one_simulation import ZeroOneRanks
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.on_device

SCHEDULE = RoundSchedule(9, 1, 3, 4)  # exact: 1, 3, 7, 9
ROUNDS = {
    "warmup_steps": 9,
    "var_update_scaler": 1,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
OPTIONS = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "variance_codec": Identity(),
    **ROUNDS,
}
SIMULATED = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "schedule": SCHEDULE}


def noisy_gradients(steps, ranks):
    """Louder at first, as of a model that begins; some elements never have one, some only after the
    first exact round."""
    gradients = random_gradients(steps, ranks)
    for step, each in enumerate(gradients):
        for rows in each:
            rows[1][:4] = 0.0
            rows[2][0, 0, : 4 if step < 2 else 0] = 0.0
            for row in rows:
                row *= 10.0 / (1 + step) + 1.0
    return gradients


def assert_like_simulation(results, params, gradients, **simulated):
    """Every rank's parameters after every step, beside the simulation's in float64."""
    simulated = {**SIMULATED, **simulated}
    reference, plain = (
        ZeroOneRanks(params, ranks=len(results), dtype=dtype, **simulated)
        for dtype in (torch.float64, torch.float32)
    )
    for step, each in enumerate(gradients):
        reference.step(each)
        plain.step(each)
        for rank, result in enumerate(results):
            for i, (want, rough) in enumerate(
                zip(reference.params(rank), plain.params(rank), strict=True)
            ):
                # As of OneBitAdam: a rounding of a parameter of size 1 per step, whether or not
                # plain torch was lucky.
                allowed = (step + 1) * 1.2e-7 * want.abs().max().item() + 2e-6 * simulated["lr"]
                assert_close_to_reference(result.params[step][i], rough, want, tiny=allowed)
    return reference


def test_rounds_are_the_closed_form():
    schedule = RoundSchedule(101, 4, 10, 8)
    updates, step, j = [], 1, 1
    while step <= 101:
        updates.append(step)
        step, j = step + 2 ** (j // 4), j + 1
    assert updates[-1] < 101
    updates.append(101)
    messages, at = [], 0
    while at < 200:
        at += min(8, 2 ** (at // 10))
        messages.append(101 + at)
    kinds = {step: schedule.kind(step) for step in range(1, 302)}
    assert [step for step, kind in kinds.items() if kind == "exact"] == updates
    assert [step for step, kind in kinds.items() if kind == "compressed" and step > 101] == [
        m for m in messages if m <= 301
    ]
    assert schedule.rounds(301) == (
        len(updates),
        101 - len(updates) + sum(m <= 301 for m in messages),
        200 - sum(m <= 301 for m in messages),
    )


def test_the_default_rounds_send_a_sixtieth():
    optimizer = built(ZeroOneAdam, [torch.nn.Parameter(torch.zeros(1 << 20))], total_steps=2000)
    exact = [step for step in range(1, 2001) if optimizer.schedule.kind(step) == "exact"]
    assert exact == [1, 2, 4, 6, 10, 14, 22, 30, 46, 62, 94, 126, 190, 254, 382, 400]
    rounds = optimizer.rounds(2000)
    assert sum(rounds) == 2000
    bits = OneBit().payload_bytes(1 << 20) / (4 << 20)
    ratio = (len(exact) * (1 / 2 + 1 / 1024 + bits) + rounds.compressed * bits) / 2000
    assert optimizer.bytes_ratio(2000) == pytest.approx(ratio, rel=1e-4)
    assert ratio <= 1 / 60


def bytes_of_steps(rank, group, params, gradients):
    optimizer, copies = optimizer_of(
        "ZeroOneAdam", params, group, {**OPTIONS, "variance_codec": None}
    )
    found = []
    for each in gradients:
        before = optimizer.communicator.bytes_sent
        take_steps(optimizer, copies, [each[rank]])
        found.append(optimizer.communicator.bytes_sent - before)
    return found


def test_steps_send_what_the_schedule_says(world):
    shapes = ((1 << 15,), (1 << 15,))
    params, gradients = random_parameters(shapes), random_gradients(22, 2, shapes)
    sent = world(2).run(bytes_of_steps, params, gradients)[0]
    fp32, bits = 4 << 16, OneBit().payload_bytes(1 << 16)
    for step, many in enumerate(sent, start=1):
        want = {"exact": fp32 // 2 + 2 * 4 * 1024 + bits, "compressed": bits, "local": 0}[
            SCHEDULE.kind(step)
        ]
        assert want <= many <= want + 3000, (step, SCHEDULE.kind(step))


IDENTITY, ONE_BIT = Identity(), OneBit(block=64)


@pytest.mark.parametrize(
    ("codec", "ranks"),
    cut(
        [(codec, ranks) for codec in (IDENTITY, ONE_BIT) for ranks in (1, 2, 3)],
        keep=[(ONE_BIT, 1), (ONE_BIT, 3)],
    ),
)
def test_ranks_follow_the_simulation(world, codec, ranks):
    params, gradients = random_parameters(), noisy_gradients(26, ranks)
    results = world(ranks).run(
        run_steps, "ZeroOneAdam", params, gradients, {**OPTIONS, "codec": codec}
    )
    assert results[0].phases == ["variance"] * 8 + ["local"] * 18
    reference = assert_like_simulation(results, params, gradients, block=getattr(codec, "block", 0))
    for i, (offset, shape) in enumerate(zip(reference.offsets, reference.shapes, strict=True)):
        want = reference.v[offset : offset + shape.numel()].view(shape)
        for result in results:
            assert torch.allclose(
                result.state["state"][i]["exp_avg_sq"].double(), want, rtol=3e-6, atol=0
            )
            assert torch.equal(
                result.state["state"][i]["exp_avg_sq"], results[0].state["state"][i]["exp_avg_sq"]
            )
    if ranks == 1:
        assert reference.c == [1.0] * 3
        whole = 1.0 if isinstance(codec, Identity) else 1 + 2 * (1 - 2 / math.pi)
        assert torch.allclose(reference.v, whole * reference.squares[0])
    else:
        assert max(reference.c) < 0.9, "the noise of ranks does not tell"


def test_what_was_left_out_while_the_learning_rate_was_0_moves_nothing_later():
    params, gradients = random_parameters(), noisy_gradients(5, 1)
    optimizer, copies = optimizer_of(
        "ZeroOneAdam", params, None, {**OPTIONS, "weight_decay": 0.0, "codec": OneBit(block=64)}
    )
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, copies, [each[0] for each in gradients[:3]])
    assert all(torch.equal(a, b) for a, b in zip(copies, params, strict=True))
    assert optimizer._exchanged.errors.worker.any()
    before = optimizer._exchanged.errors.worker.clone()
    optimizer.param_groups[0]["lr"] = 1e-2
    take_steps(optimizer, copies, [gradients[3][0]])
    first = optimizer._exchanged.errors.worker.clone()
    optimizer.param_groups[0]["lr"] = (
        1e-3  # what 1e-2 left out is ten times as much in steps of 1e-3
    )
    optimizer._measure_errors_by([1e-3])
    assert torch.allclose(optimizer._exchanged.errors.worker, 10 * first)
    assert not torch.allclose(first, before)
    assert max((a - b).abs().max().item() for a, b in zip(copies, params, strict=True)) < 0.1


def variances(rank, group, gradients, options):
    """The whole layers' variances after one step, and this rank's squares."""
    optimizer, copies = optimizer_of(
        "ZeroOneAdam", [torch.zeros_like(g) for g in gradients[0]], group, options
    )
    take_steps(optimizer, copies, [gradients[rank]])
    return [optimizer.state[copy]["exp_avg_sq"].clone() for copy in copies]


def test_variance_in_bf16_with_the_noise_of_a_sketch(world):
    """Of a large layer, a sketch tells how much noise the ranks' gradients have, also where few
    elements have most of it."""
    shapes, generator = ((200, 300), (50,)), torch.Generator().manual_seed(0)
    signal = [torch.randn(shape, generator=generator) for shape in shapes]
    signal[0][:5] *= 30.0
    noise = [[2.0 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
    gradients = [[s + n for s, n in zip(signal, each, strict=True)] for each in noise]
    options = {**OPTIONS, "codec": Identity()}
    exact = world(2).run(variances, gradients, options)
    rounded = world(2).run(variances, gradients, {**options, "variance_codec": None})
    for mine, other in zip(exact[0] + rounded[0], exact[1] + rounded[1], strict=True):
        assert torch.equal(mine, other)
    for i, near in enumerate((0.08, 1e-5)):  # two standard deviations of a sketch
        pair = torch.stack([each[i] for each in gradients])
        share = pair.mean(0).square().sum() / pair.square().flatten(1).sum(1).mean()
        assert share > 0.8 if i == 0 else share < 0.7
        assert torch.allclose(exact[0][i], share * pair.square().mean(0), rtol=near)
        error = (rounded[0][i] / exact[0][i] - 1).abs().max()
        assert 0 < error <= 2**-7


def test_a_sketch_has_the_norm_of_its_layer_and_adds_up():
    x, y = torch.randn(2, 100_003, generator=torch.Generator().manual_seed(0))
    x[:10] *= 100.0
    found = [float(sketch(x, f"layer {i}").square().sum() / x.square().sum()) for i in range(50)]
    assert abs(sum(found) / 50 - 1) < 0.03
    assert (
        max(abs(one - 1) for one in found) < 0.4
    )  # ten elements have most of the norm, and two may meet
    assert torch.allclose(sketch(x + y, "w"), sketch(x, "w") + sketch(y, "w"), atol=1e-3)
    assert torch.equal(sketch(x[:1000], "w"), x[:1000])


@pytest.mark.cpu_only
@pytest.mark.parametrize("stop", [2, 7, 9, 12])
def test_errors_are_those_of_the_simulation(world, stop):
    params, gradients = random_parameters(), noisy_gradients(stop, 2)
    results = world(2).run(
        run_steps, "ZeroOneAdam", params, gradients, {**OPTIONS, "codec": OneBit(block=64)}
    )
    reference = assert_like_simulation(results, params, gradients, block=64)
    errors = merge([result.state["communication"]["errors"] for result in results])
    for i, (offset, shape) in enumerate(zip(reference.offsets, reference.shapes, strict=True)):
        for rank, worker in enumerate([*reference.wire.workers, reference.wire.server]):
            want = worker[offset : offset + shape.numel()]
            found = (
                errors["server"][f"0.{i}"]
                if rank == 2
                else errors["worker"][f"0.{i}"][rank].flatten()
            )
            assert torch.allclose(found.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())
            assert want.any()


def test_sum_of_parts_groups_and_clipping(world):
    params, gradients = random_parameters(), noisy_gradients(20, 2)
    gradients = [[[g / 2 for g in each] for each in ranks] for ranks in gradients]
    options = {**OPTIONS, "reduction": "sum", "max_grad_norm": 12.0, "codec": OneBit(block=64)}
    results = world(2).run(run_steps, "ZeroOneAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, op="sum", max_norm=12.0, block=64)
    assert max(results[0].norms) > 12.0, "nothing was clipped"


@pytest.mark.parametrize("ranks", [full(2), 3])
def test_ranks_are_one_after_each_message_and_differ_between(world, ranks):
    params, gradients = random_parameters(), random_gradients(30, ranks)
    results = world(ranks).run(
        run_steps, "ZeroOneAdam", params, gradients, {**OPTIONS, "codec": OneBit(block=64)}
    )
    schedule = SCHEDULE
    seen = set()
    for step in range(1, 31):
        kind = schedule.kind(step)
        seen.add(kind)
        same = all(
            torch.equal(a, b)
            for r in results[1:]
            for a, b in zip(r.params[step - 1], results[0].params[step - 1], strict=True)
        )
        assert same == (kind != "local"), (step, kind)
    assert seen == {"exact", "compressed", "local"}


# Between an exact step and a compressed one, the other way round, between two that are compressed,
# and before a step without a message.
@pytest.mark.parametrize("stops", [(2, 9, 10, 24), full((1, 5, 8, 16))], ids=str)
def test_resumed_within_an_interval_it_goes_on_bit_for_bit(world, stops: tuple[int, ...]):
    params, gradients = random_parameters(), noisy_gradients(26, 2)
    options = {**OPTIONS, "codec": OneBit(block=64)}
    whole = world(2).run(run_steps, "ZeroOneAdam", params, gradients, options)
    for stop in stops:
        first = world(2).run(run_steps, "ZeroOneAdam", params, gradients[:stop], options)
        saved = (
            [r.state for r in first],
            first[0].params[-1],
        )  # rank 0's parameters, as a trainer saves them
        rest = world(2).run(run_steps, "ZeroOneAdam", params, gradients[stop:], options, saved)
        for r in range(2):
            for i in range(len(params)):
                assert torch.equal(rest[r].params[-1][i], whole[r].params[-1][i]), stop


def test_saved_by_two_ranks_three_go_on_from_the_mean(world):
    params, gradients = random_parameters(), noisy_gradients(6, 2)
    options = {**OPTIONS, "codec": OneBit(block=64)}
    first = world(2).run(run_steps, "ZeroOneAdam", params, gradients, options)
    parts = [r.state["communication"] for r in first]
    state = first[0].state
    state["communication"]["errors"] = merge([part["errors"] for part in parts])
    variance = parts[0]["variance"]
    for key in ("squares", "counts"):  # as a checkpoint joins rows
        variance[key] = {
            name: torch.cat([part["variance"][key][name].tensor for part in parts])
            for name in variance[key]
        }
    later = world(3).run(
        run_steps, "ZeroOneAdam", params, [], options, ([state], first[0].params[-1])
    )
    for result in later:
        again = result.state["communication"]["variance"]
        assert again["counts"]["tensors"].tensor.tolist() == [[6.0, 6.0, 6.0]]
        for name, rows in variance["squares"].items():
            assert torch.allclose(again["squares"][name].tensor[0], rows.mean(0))
            assert not torch.equal(rows[0], rows[1])
    more = world(3).run(
        run_steps,
        "ZeroOneAdam",
        params,
        noisy_gradients(4, 3),
        options,
        ([state], first[0].params[-1]),
    )
    for result in more:
        assert all(
            torch.equal(a, b) for a, b in zip(result.params[-1], more[0].params[-1], strict=True)
        )


def take_flat_steps(rank, group, params, gradients, options):
    """As run_steps, over one flat parameter; the buffer turns the order around."""
    named = [(f"p{i}", nn.Parameter(p.clone())) for i, p in enumerate(params)][::-1]
    flat = FlatBuffer(named)
    optimizer, found = built(ZeroOneAdam, [flat.parameter], group=group, **options), Result()
    for each in gradients:
        for view, g in zip(flat.grad_views, each[rank], strict=True):
            view.copy_(g)
        optimizer.step()
        found.params.append([p.detach().clone() for p in flat.parameters])
    return found


def test_a_flat_parameter_has_its_layers(world):
    params, gradients = random_parameters(), noisy_gradients(16, 2)
    options = {**OPTIONS, "codec": OneBit(block=64)}
    many = world(2).run(run_steps, "ZeroOneAdam", params, gradients, options)
    flat = world(2).run(take_flat_steps, params, gradients, options)
    for a, b in zip(many[1].params, flat[1].params, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def parameter_of_one_rank(rank, group, params, gradients):
    """Parameter 1 has gradients on rank 1 only and from step 2 on; parameter 2 is added after step
    4."""
    optimizer, copies = optimizer_of(
        "ZeroOneAdam", params[:2], group, {**OPTIONS, "codec": OneBit(block=64)}
    )
    late = nn.Parameter(params[2].clone())
    found = []
    for step, each in enumerate(gradients, start=1):
        if step == 5:
            optimizer.add_param_group({"params": [late]})
        grads_of([*copies, late], each[rank])
        if step == 1 or rank == 0:
            copies[1].grad = None
        optimizer.step()
        found.append([p.detach().clone() for p in (*copies, late)])
    return found


def test_parameters_that_come_later_move_from_the_next_exact_round_on(world):
    params, gradients = random_parameters(), noisy_gradients(10, 2)
    found = world(2).run(parameter_of_one_rank, params, gradients)
    for mine, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    moved = [
        [not torch.equal(a, b) for a, b in zip(each, params, strict=True)] for each in found[0]
    ]
    assert [row[1] for row in moved] == [False] * 2 + [True] * 8
    assert [row[2] for row in moved] == [False] * 6 + [True] * 4
    step = max((a - b).abs().max().item() for a, b in zip(found[0][6], found[0][5], strict=True))
    assert step < 0.1  # lr is 0.01: a variance of few gradients is not one of many zeros


def silent(rank, group):
    torch.manual_seed(0)
    model = DataParallel(nn.Linear(20, 10), group=group, reduction="mean")
    optimizer = built(
        ZeroOneAdam, [b.parameter for b in model.flat], lr=1e-2, group=group, model=model, **ROUNDS
    )
    found = [model.require_backward_grad_sync]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(16):
        model(torch.randn(6, 20, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(model.require_backward_grad_sync)
    return found, model.flat[0].data.clone(), optimizer.schedule.kind(16)


def test_the_model_never_reduces(world):
    found = world(2).run(silent)
    assert found[0][0] == [False] * 17
    assert found[0][2] != "local"
    assert torch.equal(found[0][1], found[1][1])


def test_goes_on_from_adamw():
    params, gradients = random_parameters(), [g[0] for g in random_gradients(8, 1)]
    others = [nn.Parameter(p.clone()) for p in params]
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for each in gradients[:7]:
        grads_of(others, each)
        adamw.step()
    optimizer, copies = optimizer_of(
        "ZeroOneAdam", [p.detach() for p in others], None, {**OPTIONS, "codec": Identity()}
    )
    optimizer.load_state_dict(adamw.state_dict())
    assert (optimizer.phase, optimizer.steps) == ("variance", 7)
    take_steps(optimizer, copies, gradients[7:])
    for i, other in enumerate(others):
        state = adamw.state[other]
        m, v = 0.9 * state["exp_avg"] + 0.1 * gradients[7][i], state["exp_avg_sq"] / (1 - 0.99**7)
        want = other.detach() * (1 - 1e-3) - 1e-2 * m / (1 - 0.9**8) / (v.sqrt() + 1e-8)
        assert torch.allclose(copies[i], want, rtol=0, atol=1e-6)
