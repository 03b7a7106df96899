"""Offloaded: the bits of an ordinary step, for any optimizer that steps elements by themselves,
wherever the states are."""

from __future__ import annotations

import itertools
import os
import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pyops import optim
from pyops.offload import Offloaded
from pyops.offload import optimizer as offload_optimizer
from pyops.ops.library import native
from tests.grids import cut
from tests.open_files import open_files

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]

SIZES = [100_000, 7, 333, 40_001, 64, 1]
BF16 = torch.bfloat16
CASES: list[tuple[Any, dict[str, Any], torch.dtype]] = [
    (optim.AdamW, {}, torch.float32),
    (optim.AdamW, {"amsgrad": True, "weight_decay": 0.2}, torch.float32),
    (optim.AdamW, {"master_weights": True}, BF16),
    (optim.AdamW, {"stochastic_rounding": True, "state_dtype": BF16, "seed": 3}, BF16),
    (optim.Lion, {}, torch.float32),
    (optim.SGD, {"momentum": 0.9}, torch.float32),
    (optim.SGD, {}, torch.float32),
    (optim.Adagrad, {}, torch.float32),
    (torch.optim.AdamW, {}, torch.float32),
    (torch.optim.Adam, {"foreach": True}, torch.float32),
    (torch.optim.SGD, {"momentum": 0.9}, torch.float32),
    (torch.optim.NAdam, {}, torch.float32),
    (torch.optim.ASGD, {}, torch.float32),
    (torch.optim.Rprop, {}, torch.float32),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}, torch.float32),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, torch.float32),
]


@pytest.fixture(params=["file", "host tiles", "host"])
def where(request, tmp_path, monkeypatch):
    """A folder; "cpu" as it is; and "cpu" with tiles, as parameters on a GPU have it."""
    if request.param == "host tiles":
        monkeypatch.setattr(offload_optimizer, "stays_with", lambda where, device: False)
    return str(tmp_path) if request.param == "file" else "cpu"


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]


def gradients(params: list[nn.Parameter], step: int) -> None:
    """A gradient for each, of another seed each step; one parameter has none at first, and one sits
    a step out."""
    generator = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(params):
        drawn = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if (i, step) in ((1, 0), (2, 1), (0, 2)) else drawn


def train(optimizer: torch.optim.Optimizer, step: Any, steps: range) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    for number in steps:
        gradients(params, number)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (number + 1)
        step()


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype
        else:
            assert found[name] == value, name


# In tiles, a host's memory and a file differ in where they lie alone: of torch's own optimizers the
# suite has each in one of the two.
PLACES = ("file", "host tiles", "host")
HALVES = [
    (place, number)
    for place in PLACES
    for number, (cls, *_) in enumerate(CASES)
    if not cls.__module__.startswith("torch.") or place == PLACES[number % 2]
]


@pytest.mark.parametrize(
    ("where", "number"),
    cut(itertools.product(PLACES, range(len(CASES))), keep=HALVES),
    indirect=["where"],
)
def test_parameters_and_states_have_the_bits_of_an_ordinary_step(where, number):
    cls, options, dtype = CASES[number]
    plain, params = parameters(dtype), parameters(dtype)
    start = [p.detach().clone() for p in params]
    ordinary, optimizer = cls(plain, lr=0.1, **options), cls(params, lr=0.1, **options)
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    train(ordinary, ordinary.step, range(4))
    train(optimizer, offloaded.step, range(4))
    for p, q, before in zip(params, plain, start, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, before)
        assert_same_state(offloaded.read(p), ordinary.state[q])
    offloaded.close()


@pytest.mark.parametrize("tile_bytes", [1 << 16, 3 << 17, 1 << 30])
def test_tiles_of_any_size_give_the_same_bits(tmp_path, tile_bytes):
    params, plain = parameters(), parameters()
    optimizer, ordinary = optim.AdamW(params), optim.AdamW(plain)
    offloaded = Offloaded(optimizer, str(tmp_path), tile_bytes=tile_bytes)
    assert len(offloaded.tiles) == 1 or tile_bytes < 1 << 30
    assert offloaded.resident_bytes <= 3 * (tile_bytes + 65536)
    train(optimizer, offloaded.step, range(3))
    train(ordinary, ordinary.step, range(3))
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_groups_keep_their_options(where):
    def build(params):
        first = {"params": params[:2], "lr": 0.01, "momentum": 0.9}
        return torch.optim.SGD(
            [first, {"params": params[2:], "lr": 0.3, "weight_decay": 0.1}], lr=0.1
        )

    params, plain = parameters(), parameters()
    optimizer, ordinary = build(params), build(plain)
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    for number in range(3):
        gradients(params, number)
        gradients(plain, number)
        offloaded.step()
        ordinary.step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    assert "momentum_buffer" in offloaded.read(params[0])
    assert not isinstance(offloaded.read(params[3]).get("momentum_buffer"), Tensor)


def test_float32_values_may_be_states_that_are_rounded_into_a_target(where):
    masters, plain = parameters(), parameters()
    targets = [p.detach().to(BF16) for p in masters]
    optimizer, ordinary = torch.optim.AdamW(masters), torch.optim.AdamW(plain)
    offloaded = Offloaded(
        optimizer, where, tile_bytes=1 << 16, targets=dict(zip(masters, targets, strict=True))
    )
    assert_same_state(offloaded.read(masters[0]), {"master": plain[0].detach()})
    train(optimizer, offloaded.step, range(3))
    train(ordinary, ordinary.step, range(3))
    for master, target, p in zip(masters, targets, plain, strict=True):
        assert torch.equal(target, p.detach().to(BF16))
        assert_same_state(offloaded.read(master), {**ordinary.state[p], "master": p.detach()})
    if where != "cpu":
        assert all(p.untyped_storage().nbytes() == 4 for p in masters), (
            "their memory was given back"
        )


def test_states_move_in_and_out(where):
    """A run that is taken up from an optimizer's own states, and one from what `read` gave, go on
    as if never stopped."""
    plain, params, others = parameters(), parameters(), parameters()
    ordinary, optimizer, third = optim.AdamW(plain), optim.AdamW(params), optim.AdamW(others)
    train(ordinary, ordinary.step, range(5))
    train(optimizer, optimizer.step, range(2))
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    train(optimizer, offloaded.step, range(2, 4))
    again = Offloaded(third, where, tile_bytes=1 << 17)
    for p, q in zip(params, others, strict=True):
        again.write(q, offloaded.read(p))
        q.data.copy_(p)
    train(third, again.step, range(4, 5))
    assert all(torch.equal(a, b) for a, b in zip(others, plain, strict=True))
    for p, q in zip(plain, others, strict=True):
        assert_same_state(again.read(q), ordinary.state[p])


def test_random_rounding_is_that_of_the_shard_that_a_parameter_is(where):
    def build(params):
        group = {"params": params, "offsets": [5000 + 200_000 * i for i in range(len(params))]}
        return optim.AdamW([group], stochastic_rounding=True, state_dtype=BF16, lr=0.1)

    params, plain = parameters(BF16), parameters(BF16)
    optimizer, ordinary = build(params), build(plain)
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    train(optimizer, offloaded.step, range(2))
    train(ordinary, ordinary.step, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_copies_of_a_group_are_written(where):
    params, plain = parameters(), parameters()
    both = [[torch.zeros(p.shape, dtype=BF16) for p in params] for _ in range(2)]
    groups = [
        [{"params": some, "copies": copies}]
        for some, copies in zip((params, plain), both, strict=True)
    ]
    optimizer, ordinary = optim.AdamW(groups[0]), optim.AdamW(groups[1])
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    train(optimizer, offloaded.step, range(2))
    train(ordinary, ordinary.step, range(2))
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*both, strict=True))


def test_loss_scale_and_skipped_steps_are_the_optimizers_own(where):
    params, plain = parameters(), parameters()
    optimizer, ordinary = optim.AdamW(params), optim.AdamW(plain)
    offloaded = Offloaded(optimizer, where, tile_bytes=1 << 16)
    for number, found_inf in enumerate([0.0, 1.0, 0.0]):
        for each, step, some in (
            (optimizer, offloaded.step, params),
            (ordinary, ordinary.step, plain),
        ):
            gradients(some, number)
            each.grad_scale, each.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
            step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    assert float(offloaded.read(params[3])["step"]) == 2


@pytest.mark.parametrize("cls", [optim.AdamW, torch.optim.AdamW])
def test_nothing_keeps_gradients_after_a_step(tmp_path, cls):
    """Nor the large tensor that a small one is a part of: a bucket of gradients, say."""
    params = parameters()
    offloaded = Offloaded(cls(params, lr=0.1), str(tmp_path), tile_bytes=1 << 16)
    for _ in range(2):
        bucket = torch.ones(sum(p.numel() for p in params))
        given = dict(zip(params, bucket.split([p.numel() for p in params]), strict=True))
        offloaded.step(gradients={p: g.view(p.shape) for p, g in given.items()})
        memory = StorageWeakRef(bucket.untyped_storage())
        del bucket, given
        assert memory.expired()
    assert all(bool(offloaded.read(p)["exp_avg"].abs().max() > 0) for p in params)


def test_optimizers_that_look_beyond_an_element_are_refused(tmp_path):
    for cls in (optim.LAMB, optim.LARS, optim.Adafactor, torch.optim.Adafactor):
        with pytest.raises(TypeError, match=f"{cls.__name__} can't be offloaded"):
            Offloaded(cls(parameters(), lr=0.1), str(tmp_path))
    with pytest.raises(TypeError, match="LBFGS can't be offloaded: a step of a flat parameter"):
        Offloaded(torch.optim.LBFGS(parameters()), str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_what_else_it_refuses(tmp_path):
    with pytest.raises(ValueError, match="AdamW clips by the norm of all gradients"):
        Offloaded(optim.AdamW(parameters(), max_grad_norm=1.0), "cpu")
    with pytest.raises(
        ValueError, match=r"parameter 0 of AdamW, of shape \(3, 4\), has strides \(1, 3\)"
    ):
        Offloaded(optim.AdamW([nn.Parameter(torch.randn(4, 3).t())]), "cpu")
    with pytest.raises(ValueError, match="missing is no folder"):
        Offloaded(optim.AdamW(parameters()), str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="tile_bytes is 1000; give 65536 or more"):
        Offloaded(optim.AdamW(parameters()), "cpu", tile_bytes=1000)
    params = parameters()
    with pytest.raises(
        ValueError, match=r"target of parameter 0 of AdamW, of shape \(100000,\), has shape \(3,\)"
    ):
        Offloaded(torch.optim.AdamW(params), "cpu", targets={params[0]: torch.zeros(3)})
    offloaded = Offloaded(optim.AdamW(params), str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"state 'exp_avg_sq' of parameter 1 is None; expected a tensor of shape \(7,\)",
    ):
        offloaded.write(params[1], {"exp_avg": torch.zeros(7)})
    assert offloaded.read(params[1]) == {}
    with pytest.raises(ValueError, match="is not one of the optimizer's"):
        offloaded.read(nn.Parameter(torch.zeros(2)))


def test_a_disk_without_room_is_known_at_once(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    params = parameters()
    try:
        with pytest.raises(OSError, match=rf"making room for \d+ bytes.*{tmp_path}"):
            Offloaded(optim.AdamW(params), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fails_in_a_step_is_an_error_that_names_the_file(tmp_path):
    params = parameters()
    optimizer = optim.AdamW(params)
    offloaded = Offloaded(optimizer, str(tmp_path), tile_bytes=1 << 16)
    train(optimizer, offloaded.step, range(1))
    descriptor, *_ = open_files(tmp_path)
    os.truncate(f"/proc/self/fd/{descriptor}", 1 << 17)  # what a disk that lost data looks like
    with pytest.raises(OSError, match=rf"read of \d+ bytes.*{tmp_path}"):
        train(optimizer, offloaded.step, range(1, 2))
    assert optimizer.param_groups[0]["params"][0] is params[0], (
        "the optimizer has its own parameters again"
    )
