"""OneBitAdam, element by element: against the ranks simulated in float64, against AdamW, and rank
against rank."""

from __future__ import annotations

import pytest
import torch

import pyops.optim
from pyops.comm.compression.floats import Identity
from pyops.comm.compression.one_bit import OneBit
from tests.grids import full
from tests.onebit.runs import grads_of, optimizer_of, run_steps, take_steps
from tests.onebit.simulation import OneBitAdamRanks, random_gradients, random_parameters
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.on_device

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": 4}
SIMULATED = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup": 4}


def assert_like_simulation(results, params, gradients, *, tiny=None, **simulated):
    """Every rank's parameters, after every step, beside the simulation's in float64; and bitwise
    equal between ranks."""
    reference = OneBitAdamRanks(
        params, ranks=len(results), dtype=torch.float64, **{**SIMULATED, **simulated}
    )
    plain = OneBitAdamRanks(
        params, ranks=len(results), dtype=torch.float32, **{**SIMULATED, **simulated}
    )
    for step, each in enumerate(gradients):
        reference.step(each)
        plain.step(each)
        for i, (want, rough) in enumerate(zip(reference.params(), plain.params(), strict=True)):
            # One rounding of a parameter of size 1 per step, whether or not plain torch was lucky.
            allowed = (step + 1) * 1.2e-7 * want.abs().max().item() + 2e-6 * SIMULATED["lr"]
            assert_close_to_reference(results[0].params[step][i], rough, want, tiny=allowed)
            for other in results[1:]:
                assert torch.equal(other.params[step][i], results[0].params[step][i])
    return reference


@pytest.mark.parametrize("ranks", [full(2), 3, full(4)])
def test_ranks_follow_the_simulation_and_agree_in_every_bit(world, ranks):
    params, gradients = random_parameters(), random_gradients(12, ranks)
    results = world(ranks).run(
        run_steps, "OneBitAdam", params, gradients, {**OPTIONS, "codec": OneBit(block=64)}
    )
    assert results[0].phases == ["warmup"] * 3 + ["compressed"] * 9
    reference = assert_like_simulation(results, params, gradients, block=64)
    for result in results[1:]:
        for i in range(len(params)):
            assert torch.equal(
                result.state["state"][i]["exp_avg"], results[0].state["state"][i]["exp_avg"]
            )
    # What the errors hold is part of the simulation too.
    wire = reference.wire
    for rank, result in enumerate(results):
        worker = result.state["communication"]["errors"]["worker"]
        for i, (offset, shape) in enumerate(zip(reference.offsets, reference.shapes, strict=True)):
            want = wire.workers[rank][offset : offset + shape.numel()].view(shape)
            assert torch.allclose(
                worker[f"0.{i}"].tensor[0].double(), want, atol=1e-6 * want.abs().max().item()
            )


def test_one_rank_alone_is_pure_quantisation():
    params, gradients = random_parameters(), random_gradients(10, 1)
    optimizer, copies = optimizer_of(
        "OneBitAdam", params, None, {**OPTIONS, "codec": OneBit(block=128)}
    )
    assert_like_simulation(
        [take_steps(optimizer, copies, [g[0] for g in gradients])], params, gradients, block=128
    )


def test_groups_with_and_without_weight_decay(world):
    params, gradients, decays = random_parameters(), random_gradients(8, 2), [0.5, 0.0, 0.1]
    options = {**OPTIONS, "decays": decays, "codec": OneBit(block=None, rule="rms")}
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, weight_decay=decays, block=None, rule="rms")


def test_momenta_may_travel_as_they_are(world):
    params, gradients = random_parameters(), random_gradients(8, 2)
    options = {**OPTIONS, "precondition": False, "codec": OneBit(block=64)}
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, precondition=False, block=64)


def test_the_switch_may_keep_a_slower_variance(world):
    params, gradients = random_parameters(), random_gradients(9, 2)
    options = {**OPTIONS, "frozen_beta2": 0.999, "max_grad_norm": 12.0, "codec": OneBit(block=64)}
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, slow=0.999, max_norm=12.0, block=64)


def test_the_slower_variance_has_half_the_warmup_for_its_memory():
    optimizer, _ = optimizer_of(
        "OneBitAdam", random_parameters(), None, {"betas": (0.9, 0.95), "warmup_steps": 400}
    )
    assert optimizer.frozen_beta2 == pytest.approx(0.995)


def test_sum_of_parts_and_clipping_by_the_common_norm(world):
    params, gradients = random_parameters(), random_gradients(8, 2)
    gradients = [[[g / 2 for g in each] for each in ranks] for ranks in gradients]
    options = {**OPTIONS, "reduction": "sum", "max_grad_norm": 12.0, "codec": OneBit(block=64)}
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, op="sum", max_norm=12.0, block=64)
    assert results[0].norms == results[1].norms
    assert min(results[0].norms) > 12.0, "nothing was clipped"
    local = [sum(float((2 * g).square().sum()) for g in gradients[-1][rank]) for rank in range(2)]
    assert results[0].norms[-1] == pytest.approx((sum(local) / 2) ** 0.5, rel=1e-6)


def test_warmup_is_adamw_bit_for_bit():
    params, gradients = random_parameters(), random_gradients(6, 1)
    optimizer, copies = optimizer_of(
        "OneBitAdam", params, None, {**OPTIONS, "warmup_steps": 10, "max_grad_norm": 3.0}
    )
    found = take_steps(optimizer, copies, [g[0] for g in gradients])
    others = [torch.nn.Parameter(p.clone()) for p in params]
    plain = pyops.optim.AdamW(
        others, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=3.0
    )
    for step, each in enumerate(gradients):
        grads_of(others, each[0])
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(found.params[step], others, strict=True))
    for i, other in enumerate(others):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(found.state["state"][i][key], plain.state[other][key])


def test_the_first_compressed_step_is_adamw_with_its_variance_kept(world):
    """Without loss on the wire nothing happens at the switch: the same step to rounding, at any
    length of the warm-up."""
    for warmup in (1, 3):
        params, gradients = random_parameters(), random_gradients(warmup + 1, 1)
        options = {**OPTIONS, "warmup_steps": warmup, "codec": Identity()}
        optimizer, copies = optimizer_of("OneBitAdam", params, None, options)
        found = take_steps(optimizer, copies, [g[0] for g in gradients])
        for i, param in enumerate(params):
            p, m, v = (
                param.double(),
                torch.zeros_like(param).double(),
                torch.zeros_like(param).double(),
            )
            for t, each in enumerate(gradients, start=1):
                g = each[0][i].double()
                m = 0.9 * m + 0.1 * g
                v = 0.99 * v + 0.01 * g * g if t <= warmup else v
                variance = v / (1 - 0.99 ** min(t, warmup))
                before, p = p, p * (1 - 1e-3) - 1e-2 * m / (1 - 0.9**t) / (variance.sqrt() + 1e-8)
            moved = (p - before).abs()
            rounding = (
                len(gradients) * 2.0**-23 * p.abs()
            )  # each step rounds p twice, by half a unit
            assert ((found.params[-1][i].double() - p).abs() <= 1e-5 * moved + rounding).all()
            assert moved.mean() > 1e-3


def test_an_element_without_variance_never_moves(world):
    params, gradients = random_parameters(), random_gradients(10, 2)
    for step, ranks in enumerate(gradients):
        for each in ranks:
            each[0][2] = (
                0.0 if step < 4 else 5.0
            )  # a row that is not seen in the warm-up, and then is
            each[1][1::2] = 0.0
    options = {**OPTIONS, "weight_decay": 0.0, "codec": OneBit(block=64)}
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, weight_decay=0.0, block=64)
    assert torch.equal(results[0].params[-1][0][2], params[0][2])
    assert torch.equal(results[0].params[-1][1][1::2], params[1][1::2])
    assert (results[0].params[-1][1][::2] != params[1][::2]).all()


def test_a_parameter_without_a_gradient_stays(world):
    params, gradients = random_parameters(), random_gradients(7, 2)
    gradients = [
        [[each[0], None, each[2] if rank else None] for rank, each in enumerate(ranks)]
        for ranks in gradients
    ]
    results = world(2).run(
        run_steps, "OneBitAdam", params, gradients, {**OPTIONS, "codec": OneBit(block=64)}
    )
    zeros = torch.zeros_like(params[2])
    filled = [
        [[each[0], each[2] if each[2] is not None else zeros] for each in ranks]
        for ranks in gradients
    ]
    for result in results:
        assert torch.equal(result.params[-1][1], params[1])
        result.params = [[p[0], p[2]] for p in result.params]
    assert_like_simulation(results, [params[0], params[2]], filled, block=64)


def test_bf16_parameters_round_their_masters(world):
    params, gradients = random_parameters(), random_gradients(9, 2)
    params = [p.bfloat16().float() for p in params]
    gradients = [[[g.bfloat16().float() for g in each] for each in ranks] for ranks in gradients]
    options = {
        **OPTIONS,
        "dtype": torch.bfloat16,
        "master_weights": True,
        "codec": OneBit(block=64),
        "reduction": "sum",
    }
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    gradients = [[[g.bfloat16().float() for g in each] for each in ranks] for ranks in gradients]
    reference = OneBitAdamRanks(
        params, ranks=2, dtype=torch.float64, op="sum", block=64, **SIMULATED
    )
    for each in gradients:
        reference.step(each)
    for i, want in enumerate(reference.params()):
        master = results[0].state["state"][i]["master"]
        assert torch.equal(results[0].params[-1][i], master.bfloat16())
        # In the warm-up the sum goes back into bf16 gradients, as DistributedDataParallel leaves
        # them: 8 bits.
        assert (master.double() - want).abs().max() < 1e-3
        assert torch.equal(results[1].params[-1][i], results[0].params[-1][i])


def test_compat_deepspeed_follows_its_formulas(world):
    """No bias correction, momenta as they are, one rms scale for a whole momentum and for a chunk
    of the mean."""
    params, gradients = random_parameters(), random_gradients(8, 2)
    options = {key: value for key, value in OPTIONS.items() if key != "codec"} | {
        "compat": "deepspeed"
    }
    results = world(2).run(run_steps, "OneBitAdam", params, gradients, options)
    assert_like_simulation(results, params, gradients, deepspeed=True, block=None, rule="rms")
