"""Adam and AdamW against torch.optim in float64, every option, over several steps."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyops.optim import Adam, AdamW
from tests.optim.pairs import (
    HYPER,
    assert_as_torch,
    assert_equal,
    assert_moved,
    give_gradients,
    parameters,
    run,
    twins,
)

STEPS = 6
PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(("amsgrad", "maximize"), list(itertools.product((False, True), repeat=2)))
def test_as_torch(ours, theirs, amsgrad, maximize, device):
    options = {**HYPER, "amsgrad": amsgrad, "maximize": maximize}
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    before = [p.detach().clone() for p in a]
    mine, plain, exact = ours(a, **options), theirs(b, **options), theirs(c, **options)
    run([mine, plain, exact], [a, b, c], steps=STEPS)
    assert_moved(before, a)
    assert_as_torch(a, b, c, steps=STEPS)
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        states = [[o.state[p][name] for p in ps] for o, ps in ((mine, a), (plain, b), (exact, c))]
        assert_as_torch(*states, steps=STEPS)
    assert all(mine.state[p]["step"].item() == STEPS for p in a)


@pytest.mark.parametrize(
    "mutation",
    [
        {"lr": 0.0},
        {"weight_decay": 0.0},
        {"betas": HYPER["betas"][::-1]},
        {"eps": 1e-8},
        {"maximize": True},
        {"amsgrad": True},
        {"decoupled_weight_decay": False},
    ],
    ids=lambda m: next(iter(m)),
)
def test_the_comparison_sees_a_wrong_option(mutation):
    """Each hyper-parameter, when dropped or swapped on our side alone, must fail the comparison."""
    a = parameters()
    b, c = twins(a), twins(a, torch.float64)
    options = {**HYPER, "decoupled_weight_decay": True}
    mine = Adam(a, **{**options, **mutation})
    run(
        [mine, torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)], [a, b, c], steps=STEPS
    )
    with pytest.raises(AssertionError):
        assert_as_torch(a, b, c, steps=STEPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_no_worse_than_torch(dtype, device):
    a = parameters(dtype=dtype, device=device)
    b, c = twins(a), twins(a, torch.float64)
    run(
        [AdamW(a, **HYPER), torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)],
        [a, b, c],
        steps=1,
    )
    assert_as_torch(a, b, c, steps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_step_as_float32(dtype, device):
    """The master takes exactly the steps of a float32 parameter, and the parameter is its
    rounding."""
    a = parameters(dtype=dtype, device=device)
    b = twins(a, torch.float32)
    mine, full = AdamW(a, **HYPER, master_weights=True), AdamW(b, **HYPER)
    run([mine, full], [a, b], steps=STEPS)
    assert_equal([mine.state[p]["master"] for p in a], b)
    assert_equal(a, [p.to(dtype) for p in b])


def test_mixed_dtypes_in_one_group(device):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    a = [
        p
        for i, d in enumerate(dtypes)
        for p in parameters(((4, 3), (9,)), dtype=d, device=device, seed=i)
    ]
    b = twins(a)
    together = AdamW(a, **HYPER, master_weights=True)
    apart = [AdamW([p], **HYPER, master_weights=True) for p in b]
    run([together, *apart], [a, b], steps=STEPS)
    assert_equal(a, b)


def test_groups_keep_their_own_hyperparameters(device):
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)

    def groups(params):
        return [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": params[2:], "betas": (0.5, 0.6)},
        ]

    run(
        [
            AdamW(groups(a), **HYPER),
            torch.optim.AdamW(groups(b), **HYPER),
            torch.optim.AdamW(groups(c), **HYPER),
        ],
        [a, b, c],
        steps=STEPS,
    )
    assert_as_torch(a, b, c, steps=STEPS)


def test_parameters_without_gradients_stay_and_count_no_steps(device):
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    optimizers = [AdamW(a, **HYPER), torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)]

    def drop_some(step):
        for params in (a, b, c):
            params[step % len(params)].grad = None

    run(optimizers, [a, b, c], steps=STEPS, between=drop_some)
    assert_as_torch(a, b, c, steps=STEPS)
    assert [optimizers[0].state[p]["step"].item() for p in a] == [STEPS - 1] * len(a)


def test_no_gradient_at_all_changes_nothing_then_the_first_is_noticed():
    a = parameters()
    before = [p.detach().clone() for p in a]
    optimizer = AdamW(a, **HYPER, max_grad_norm=1.0)
    for _ in range(2):
        optimizer.step()
        assert_equal(a, before)
    assert optimizer.grad_norm.item() == 0.0
    give_gradients(a, seed=0)
    optimizer.step()
    assert_moved(before, a)


@pytest.mark.parametrize("where", ["host", "device"])
def test_lr_as_a_tensor_is_read_every_step(where, device):
    a = parameters(device=device)
    b = twins(a)
    lr = torch.tensor(HYPER["lr"], device=device if where == "device" else "cpu")
    options = {key: value for key, value in HYPER.items() if key != "lr"}
    mine, plain = AdamW(a, lr=lr, **options, capturable=True), AdamW(b, lr=lr.item(), **options)
    run([mine, plain], [a, b], steps=2)
    assert_equal(a, b)
    lr.fill_(0.5)
    plain.param_groups[0]["lr"] = lr.item()
    run([mine, plain], [a, b], steps=2, first=2)
    assert_equal(a, b)


def test_tensor_betas():
    a = parameters()
    b = twins(a)
    options = {key: value for key, value in HYPER.items() if key != "betas"}
    betas = tuple(torch.tensor(beta, dtype=torch.float64) for beta in HYPER["betas"])
    run([AdamW(a, betas=betas, **options), AdamW(b, **HYPER)], [a, b], steps=3)
    assert_equal(a, b)


def test_a_shard_steps_as_the_whole_does(device):
    """However a parameter is cut, an element's result has the same bits: what is sharded can be
    compared with torch.equal."""
    whole = parameters(((331,),), device=device)
    cuts = [0, 1, 18, 100, 331]
    shards = twins([whole[0].detach()[a:b] for a, b in itertools.pairwise(cuts)])
    optimizers = [AdamW(whole, **HYPER), AdamW(shards, **HYPER)]
    for step in range(STEPS):
        give_gradients(whole, seed=step)
        for shard, (a, b) in zip(shards, itertools.pairwise(cuts), strict=True):
            shard.grad = whole[0].grad[a:b].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(whole, [torch.cat([s.detach() for s in shards])])
