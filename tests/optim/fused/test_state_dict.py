"""Saving and loading: ours to ours bit for bit, torch's to ours and back mid-run, 16-bit parameters
without loss."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from pyops.optim import SGD, Adafactor, Adagrad, Adam, AdamW
from tests.optim.pairs import HYPER, assert_as_torch, assert_equal, parameters, run, twins

PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_resumed_bit_for_bit(dtype, master, amsgrad, device):
    options = {"master_weights": master}
    a = parameters(dtype=dtype, device=device)
    first = AdamW(a, **HYPER, amsgrad=amsgrad, **options)
    run([first], [a], steps=3)
    b = twins(a)
    second = AdamW(b, **options)
    second.load_state_dict(through_a_file(first.state_dict()))
    run([first, second], [a, b], steps=3, first=3)
    assert_equal(a, b)
    for p, q in zip(a, b, strict=True):
        assert list(first.state[p]) == list(second.state[q])
        for key, value in first.state[p].items():
            assert value.dtype == second.state[q][key].dtype == torch.float32
            assert torch.equal(value, second.state[q][key]), key


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("fused", [None, True])
def test_torch_to_ours_to_torch(ours, theirs, fused, device):
    """Two steps each, against six steps of one optimizer."""
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    plain, exact = theirs(b, **HYPER, amsgrad=True), theirs(c, **HYPER, amsgrad=True)
    run([plain, exact], [b, c], steps=6)

    start = theirs(a, **HYPER, amsgrad=True, fused=fused)
    run([start], [a], steps=2)
    middle = ours(a)
    middle.load_state_dict(through_a_file(start.state_dict()))
    assert middle.param_groups[0]["amsgrad"]
    run([middle], [a], steps=2, first=2)
    end = theirs(a)
    end.load_state_dict(through_a_file(middle.state_dict()))
    run([end], [a], steps=2, first=4)
    assert_as_torch(a, b, c, steps=6)
    assert all(end.state[p]["step"].item() == 6 for p in a)


# Ours, torch's, options, and the entries that ours has besides: SGD counts its steps, which torch's
# does not.
COUNTERPARTS = [
    (Adam, torch.optim.Adam, {"amsgrad": True}, set()),
    (AdamW, torch.optim.AdamW, {}, set()),
    (SGD, torch.optim.SGD, {"momentum": 0.6, "dampening": 0.2}, {"step"}),
    (SGD, torch.optim.SGD, {}, {"step"}),
    (Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}, set()),
    (Adafactor, torch.optim.Adafactor, {"beta2_decay": -0.6, "weight_decay": 0.1}, set()),
]


@pytest.mark.parametrize(("ours", "theirs", "options", "besides"), COUNTERPARTS)
def test_the_entries_are_torchs_and_the_next_steps_too(ours, theirs, options, besides, device):
    """Each optimizer's state of three steps goes on in the other, for two more."""
    shapes = ((5, 7), (1,), (3, 2, 4), (130,), ())
    starts = {kind: parameters(shapes, device=device) for kind in (ours, theirs)}
    made = {kind: kind(params, lr=0.013, **options) for kind, params in starts.items()}
    run(list(made.values()), list(starts.values()), steps=3)
    saved = {kind: through_a_file(optimizer.state_dict()) for kind, optimizer in made.items()}
    for i in range(len(shapes)):
        mine, torchs = saved[ours]["state"][i], saved[theirs]["state"].get(i, {})
        assert set(mine) - set(torchs) <= besides, (shapes[i], set(mine), set(torchs))
        assert {key: tuple(torch.as_tensor(value).shape) for key, value in torchs.items()} == {
            key: tuple(mine[key].shape) for key in torchs
        }, shapes[i]
    assert saved[theirs]["param_groups"][0].keys() <= saved[ours]["param_groups"][0].keys()
    for first, second in ((ours, theirs), (theirs, ours)):
        params = twins(starts[first])
        after = second(params, lr=0.5)
        after.load_state_dict(saved[first])
        stays = made[first]
        run([stays, after], [starts[first], params], steps=2, first=3)
        for p, q in zip(starts[first], params, strict=True):
            torch.testing.assert_close(q, p, rtol=2e-6, atol=1e-6)


def test_adafactors_of_older_checkpoints():
    """A vector's state had empty entries besides, which torch's has not; they are dropped."""
    a = parameters(((5, 7), (4,)))
    optimizer = Adafactor(a)
    run([optimizer], [a], steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1] |= {"row_var": torch.zeros(0), "col_var": torch.zeros(0)}
    b = twins(a)
    again = Adafactor(b)
    again.load_state_dict(state)
    assert set(again.state[b[1]]) == {"step", "variance"}
    run([optimizer, again], [a, b], steps=2, first=2)
    assert_equal(a, b)


def test_a_dropped_state_would_be_seen():
    """The mutant of the test above: moments that start again at zero."""
    a = parameters()
    b, c = twins(a), twins(a, torch.float64)
    run([torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)], [b, c], steps=4)
    run([torch.optim.AdamW(a, **HYPER)], [a], steps=2)
    run([AdamW(a, **HYPER)], [a], steps=2, first=2)
    with pytest.raises(AssertionError):
        assert_as_torch(a, b, c, steps=4)


def test_moments_are_cast_to_this_optimizers_dtype(device):
    a = parameters(dtype=torch.bfloat16, device=device)
    plain = torch.optim.AdamW(a, **HYPER)
    run([plain], [a], steps=1)
    assert plain.state[a[0]]["exp_avg"].dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        mine = AdamW(a, state_dtype=dtype)
        mine.load_state_dict(plain.state_dict())
        assert {mine.state[p]["exp_avg"].dtype for p in a} == {dtype}
        assert {mine.state[p]["step"].dtype for p in a} == {torch.float32}
        assert {mine.state[p]["step"].device for p in a} == {a[0].device}


def test_a_missing_master_is_made_and_an_unwanted_one_dropped():
    a = parameters(dtype=torch.bfloat16)
    plain, mastered = AdamW(a, **HYPER), AdamW(a, **HYPER, master_weights=True)
    run([plain], [a], steps=1)
    mastered.load_state_dict(plain.state_dict())
    assert "master" not in mastered.state[a[0]]
    before = a[0].detach().clone()
    run([mastered], [a], steps=1, first=1)
    assert torch.equal(mastered.state[a[0]]["master"].to(torch.bfloat16), a[0].detach())
    assert not torch.equal(a[0].detach(), before)
    plain.load_state_dict(mastered.state_dict())
    assert "master" not in plain.state[a[0]]


def test_refresh_masters_after_loading_weights():
    a = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(a, **HYPER, master_weights=True)
    run([optimizer], [a], steps=1)
    with torch.no_grad():
        a[0].fill_(3.0)
    optimizer.refresh_masters()
    assert torch.equal(optimizer.state[a[0]]["master"], torch.full((5, 7), 3.0))


def test_states_are_laid_out_as_their_parameter(device):
    """A state saved contiguous and loaded for a channels_last parameter needs no stand-in
    afterwards."""
    shape = (2, 4, 4, 5)
    a = parameters((shape,), device=device)
    first = AdamW(a, **HYPER)
    run([first], [a], steps=1)
    b = [torch.nn.Parameter(a[0].detach().to(memory_format=torch.channels_last))]
    second = AdamW(b)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert second.state[b[0]]["exp_avg"].stride() == b[0].stride()
    assert torch.equal(second.state[b[0]]["exp_avg"], first.state[a[0]]["exp_avg"])


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_as_the_original(way):
    a = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(a, **HYPER, master_weights=True, max_grad_norm=0.3, zero_grad=True)
    run([optimizer], [a], steps=2)
    other = way(optimizer)
    b = other.param_groups[0]["params"]
    assert b[0] is not a[0]
    run([optimizer, other], [a, b], steps=2, first=2)
    assert_equal(a, b)
    assert other.max_grad_norm == 0.3
    assert other.grad_norm == optimizer.grad_norm
    assert b[0].grad.abs().sum() == 0


def test_hooks_are_called_as_in_torch():
    a = parameters()
    calls = []
    optimizer = AdamW(a, **HYPER)
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after load"))
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("after save"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["after save", "before load", "after load"]


@pytest.mark.parametrize("wrong", ["groups", "sizes", "shapes"])
def test_a_foreign_state_is_refused_and_changes_nothing(wrong):
    a = parameters()
    optimizer = AdamW(a, **HYPER)
    run([optimizer], [a], steps=1)
    other = (
        parameters(((5, 8), (1,), (0,), (3, 2, 4), (130,), ()))
        if wrong == "shapes"
        else parameters()
    )
    foreign = AdamW(
        [{"params": other[:2]}, {"params": other[2:]}]
        if wrong == "groups"
        else other[:5]
        if wrong == "sizes"
        else other
    )
    run([foreign], [other], steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="the parameter" if wrong == "shapes" else "param groups"):
        optimizer.load_state_dict(foreign.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(
        torch.equal(after["state"][i][k], v)
        for i, state in before["state"].items()
        for k, v in state.items()
    )
