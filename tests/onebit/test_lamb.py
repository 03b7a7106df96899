"""OneBitLAMB, element by element: against the ranks in float64, LAMB, DeepSpeed's formulas, and
rank against rank."""

from __future__ import annotations

import io

import pytest
import torch

import pyops.optim
from pyops.comm.compression.floats import Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.flat import FlatBuffer
from pyops.onebit import OneBitLAMB
from tests.grids import full
from tests.onebit.lamb_simulation import DeepSpeedRanks, OneBitLAMBRanks
from tests.onebit.runs import built, grads_of, optimizer_of, run_steps, take_steps
from tests.onebit.simulation import SHAPES, random_gradients, random_parameters
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.on_device

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": 4}
SIMULATED = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup": 4, "eps": 1e-6}


def layers_of_sizes(sizes=(0.3, 1.0, 4.0)):
    """Layers whose trust ratios differ."""
    return [size * p for size, p in zip(sizes, random_parameters(), strict=True)]


def assert_like(reference_of, results, gradients):
    """Every rank's parameters, after every step, beside the simulation's in float64; and bitwise
    equal between ranks."""
    reference, plain = reference_of(torch.float64), reference_of(torch.float32)
    for step, each in enumerate(gradients):
        reference.step(each)
        plain.step(each)
        for i, (want, rough) in enumerate(zip(reference.params(), plain.params(), strict=True)):
            allowed = (step + 1) * 1.2e-7 * want.abs().max().item() + 2e-6 * OPTIONS["lr"]
            assert_close_to_reference(results[0].params[step][i], rough, want, tiny=allowed)
            for other in results[1:]:
                assert torch.equal(other.params[step][i], results[0].params[step][i])
    return reference


def assert_like_simulation(results, params, gradients, **simulated):
    def of(dtype):
        return OneBitLAMBRanks(
            params, ranks=len(results), dtype=dtype, **{**SIMULATED, **simulated}
        )

    return assert_like(of, results, gradients)


@pytest.mark.parametrize("ranks", [full(2), 3])
def test_ranks_follow_the_simulation_and_agree_in_every_bit(world, ranks):
    params, gradients = layers_of_sizes(), random_gradients(14, ranks)
    options = {**OPTIONS, "frozen_beta2": 0.0, "codec": OneBit(block=64)}
    results = world(ranks).run(run_steps, "OneBitLAMB", params, gradients, options)
    assert results[0].phases == ["warmup"] * 3 + ["compressed"] * 11
    reference = assert_like_simulation(results, params, gradients, block=64)
    kept = results[0].state["communication"]
    assert kept["layers"] == ["0.0", "0.1", "0.2"]
    assert torch.allclose(
        kept["trust"][:, 2], torch.tensor(reference.last, dtype=torch.float64), rtol=1e-5
    )
    ratios = kept["trust"][:, 0] / kept["trust"][:, 1]
    assert ratios.max() > 3 * ratios.min(), "layers that have the same ratio don't tell them apart"
    assert min(abs(f - 1) for f in reference.last) > 1e-3, "a factor of 1 would go unnoticed"


def test_slower_variance_clipping_and_a_sum_of_parts(world):
    params, gradients = layers_of_sizes(), random_gradients(10, 2)
    gradients = [[[g / 2 for g in each] for each in ranks] for ranks in gradients]
    options = {
        **OPTIONS,
        "frozen_beta2": 0.999,
        "max_grad_norm": 12.0,
        "reduction": "sum",
        "codec": OneBit(block=64),
    }
    results = world(2).run(run_steps, "OneBitLAMB", params, gradients, options)
    assert_like_simulation(
        results, params, gradients, slow=0.999, max_norm=12.0, op="sum", block=64
    )


@pytest.mark.parametrize("louder", [0.05, 20.0])
def test_the_factor_follows_the_variance_within_its_bounds(louder):
    """Gradients that become small, or large, after the switch: the factor leaves 1 by its threshold
    and stops at its bound."""
    params, gradients = layers_of_sizes(), random_gradients(24, 1)
    gradients = gradients[:4] + [
        [[louder * g for g in each] for each in ranks] for ranks in gradients[4:]
    ]
    betas, bounds = (0.9, 0.7), {"factor_min": 0.8, "factor_max": 1.5, "factor_threshold": 0.05}
    options = {**OPTIONS, "betas": betas, "frozen_beta2": 0.0, "codec": Identity(), **bounds}
    optimizer, copies = optimizer_of("OneBitLAMB", params, None, options)
    found = take_steps(optimizer, copies, [g[0] for g in gradients])
    simulated = {"betas": betas, "bounds": (0.8, 1.5, 0.05), "block": 0}
    reference = assert_like_simulation([found], params, gradients, **simulated)
    bound = 1.5 if louder < 1 else 0.8
    assert found.state["communication"]["trust"][:, 2].tolist() == pytest.approx(
        reference.last, rel=1e-5
    )
    assert reference.last == pytest.approx([bound] * 3)


def test_warmup_is_lamb_bit_for_bit():
    params, gradients = layers_of_sizes(), random_gradients(6, 1)
    optimizer, copies = optimizer_of(
        "OneBitLAMB", params, None, {**OPTIONS, "warmup_steps": 10, "max_grad_norm": 3.0}
    )
    found = take_steps(optimizer, copies, [g[0] for g in gradients])
    others = [torch.nn.Parameter(p.clone()) for p in params]
    plain = pyops.optim.LAMB(
        others,
        lr=1e-2,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_grad_norm=3.0,
        min_ratio=0.01,
        max_ratio=10.0,
    )
    for step, each in enumerate(gradients):
        grads_of(others, each[0])
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(found.params[step], others, strict=True))
    for i, other in enumerate(others):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(found.state["state"][i][key], plain.state[other][key])


def flat_and_separate(rank, group, params, gradients, options):
    """Parameters after each step, of separate tensors and of one flat parameter laid out in the
    same order."""
    optimizer, copies = optimizer_of("OneBitLAMB", params, group, options)
    apart = take_steps(optimizer, copies, [g[rank] for g in gradients])
    names = [f"0.{i}" for i in range(len(params))]
    pairs = [(name, torch.nn.Parameter(p.clone())) for name, p in zip(names, params, strict=True)]
    buffer = FlatBuffer(pairs[::-1])  # backward order: the last comes first
    assert buffer.layout.names == tuple(names)
    optimizer, found = built(OneBitLAMB, [buffer.parameter], group=group, **options), []
    for each in gradients:
        flat = torch.zeros_like(buffer.parameter)
        for k, g in enumerate(each[rank]):
            flat[buffer.layout.slice_at(k)] = g.flatten()
        buffer.parameter.grad = flat
        optimizer.step()
        whole = buffer.parameter.detach()
        found.append(
            [whole[buffer.layout.slice_at(k)].view(p.shape).clone() for k, p in enumerate(params)]
        )
    return apart.params, found, optimizer.state_dict()["communication"]["layers"]


@pytest.mark.parametrize("compat", [None, "deepspeed"])
def test_a_flat_parameter_has_the_bits_of_separate_ones(world, compat):
    params, gradients = layers_of_sizes(), random_gradients(9, 2)
    for apart, flat, layers in world(2).run(
        flat_and_separate, params, gradients, {**OPTIONS, "compat": compat}
    ):
        assert layers == ["0.0", "0.1", "0.2"]
        for a, b in zip(apart, flat, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("compat", [full(None), "deepspeed"])
def test_resumed_in_the_warmup_at_the_switch_and_after_it(world, compat):
    params, gradients = layers_of_sizes(), random_gradients(10, 2)
    # A threshold that holds in every step: the factor depends on the one before.
    options = {**OPTIONS, "compat": compat, "factor_threshold": 1e-4}
    options |= {} if compat else {"frozen_beta2": 0.999, "codec": OneBit(block=64)}
    whole = world(2).run(run_steps, "OneBitLAMB", params, gradients, options)
    for stop in (2, 4, 7):
        first = world(2).run(run_steps, "OneBitLAMB", params, gradients[:stop], options)
        states = []
        for result in first:
            file = io.BytesIO()
            torch.save(result.state, file)
            states.append(torch.load(io.BytesIO(file.getvalue())))
        rest = world(2).run(
            run_steps,
            "OneBitLAMB",
            params,
            gradients[stop:],
            options,
            (states, first[0].params[-1]),
        )
        for step in range(10 - stop):
            for a, b in zip(rest[1].params[step], whole[1].params[stop + step], strict=True):
                assert torch.equal(a, b), stop


def test_compat_deepspeed_follows_its_source(world):
    params, gradients = layers_of_sizes(), random_gradients(12, 2)
    results = world(2).run(
        run_steps, "OneBitLAMB", params, gradients, {**OPTIONS, "compat": "deepspeed"}
    )

    def of(dtype):
        return DeepSpeedRanks(params, ranks=2, dtype=dtype, **SIMULATED)

    reference = assert_like(of, results, gradients)
    kept = results[0].state["communication"]["trust"]
    assert torch.allclose(
        kept[:, 3], torch.tensor(reference.scaling, dtype=torch.float64), rtol=1e-5
    )
    assert torch.allclose(
        kept[:, 0], torch.tensor(reference.coeff_freeze, dtype=torch.float64), rtol=1e-5
    )


def test_a_group_without_trust_ratio_takes_the_plain_step():
    params, gradients = random_parameters(), random_gradients(8, 1)
    options = {**OPTIONS, "eps": 1e-6, "codec": OneBit(block=64)}
    found = []
    for kind in ("OneBitLAMB", "OneBitAdam"):
        optimizer, copies = optimizer_of(kind, params, None, options)
        for group in optimizer.param_groups:
            group["trust_ratio"] = False
        found.append(take_steps(optimizer, copies, [g[0] for g in gradients]).params)
    for ours, adams in zip(*found, strict=True):
        for a, b in zip(ours, adams, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_an_element_without_variance_never_moves_and_does_not_decide_the_factor():
    params, gradients = layers_of_sizes(), random_gradients(10, 1)
    for step, ranks in enumerate(gradients):
        ranks[0][0][2] = 0.0 if step < 4 else 5.0
        ranks[0][1].zero_()  # a whole layer
    options = {**OPTIONS, "weight_decay": 0.0, "frozen_beta2": 0.0, "codec": OneBit(block=64)}
    optimizer, copies = optimizer_of("OneBitLAMB", params, None, options)
    found = take_steps(optimizer, copies, [g[0] for g in gradients])
    assert_like_simulation([found], params, gradients, weight_decay=0.0, block=64)
    assert torch.equal(found.params[-1][0][2], params[0][2])
    assert torch.equal(found.params[-1][1], params[1])


def test_bf16_parameters_round_their_masters():
    params, gradients = [p.bfloat16().float() for p in layers_of_sizes()], random_gradients(9, 1)
    gradients = [[[g.bfloat16().float() for g in each] for each in ranks] for ranks in gradients]
    options = {**OPTIONS, "codec": OneBit(block=64)}
    found = []
    for more in ({}, {"dtype": torch.bfloat16, "master_weights": True}):
        optimizer, copies = optimizer_of("OneBitLAMB", params, None, {**options, **more})
        found.append(take_steps(optimizer, copies, [g[0] for g in gradients]))
    for i in range(len(SHAPES)):
        master = found[1].state["state"][i]["master"]
        assert torch.equal(master, found[0].params[-1][i]), (
            "the masters are the parameters of full precision"
        )
        assert torch.equal(found[1].params[-1][i], master.bfloat16())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"factor_min": 1.5}, "factor_min=1.5"),
        ({"factor_threshold": 1.0}, "factor_threshold=1.0"),
        ({"coeff_beta": -0.1}, "coeff_beta=-0.1"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        optimizer_of("OneBitLAMB", random_parameters(), None, {**OPTIONS, **options})
