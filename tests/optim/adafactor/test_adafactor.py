"""Adafactor: element by element against torch.optim.Adafactor, in a flat buffer as apart, whatever
the layout or dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pyops.ops import library
from pyops.optim import Adafactor
from tests.optim.layer_oracle import flat_twin, gradients, layers, padding_of
from tests.optim.pairs import assert_equal, twins
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.cpu_only  # its CUDA kernels: tests/cuda/test_adafactor.py

F32, BF16 = torch.float32, torch.bfloat16
# Matrices of one row, of one column, of more than a band, of three dimensions; vectors within and
# beyond a tile; none.
SHAPES: tuple[tuple[int, ...], ...] = (
    (5, 7),
    (1,),
    (0,),
    (1, 130),
    (130, 1),
    (300, 301),
    (3, 20, 30),
    (),
    (1100,),
    (2, 0),
    (33,),
)
HYPER: dict[str, Any] = {
    "lr": 0.03,
    "beta2_decay": -0.7,
    "eps": (1e-5, 2e-2),
    "d": 1.1,
    "weight_decay": 0.3,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"eps": (None, 1e-3), "weight_decay": 0.0},
    {"maximize": True, "lr": 2.0},
    {"eps": (0.5, 1e-3)},
    {"d": 1.0, "beta2_decay": 0.0},
]


def isas(device: torch.device) -> list[str]:
    return library.isas() if device.type == "cpu" and library.isas() else ["one"]


def train(optimizer: torch.optim.Optimizer, params: Any, *, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for p, g in zip(params, gradients(params, step), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_torch_in_float64(options: dict[str, Any], device: torch.device):
    options = {**HYPER, **options}
    # torch's float64 takes the eps of float64 for None.
    in64 = (
        {**options, "eps": (torch.finfo(F32).eps, 1e-3)} if options["eps"][0] is None else options
    )
    steps = 4
    for isa in isas(device):
        with library.use_isa(isa) if isa != "one" else torch.no_grad():
            ours = [p for p in layers(device=device, shapes=SHAPES) if p.numel()]
            plain, exact = twins(ours), twins(ours, torch.float64)
            before = [p.detach().clone() for p in ours]
            optimizers = (
                Adafactor(ours, **options),
                torch.optim.Adafactor(plain, **options),
                torch.optim.Adafactor(exact, **in64),
            )
            for step in range(steps):
                for row in zip(gradients(ours, step), ours, plain, exact, strict=True):
                    for p in row[1:]:
                        p.grad = row[0].to(p.dtype)
                for optimizer in optimizers:
                    optimizer.step()
            for p, a, b, old in zip(ours, plain, exact, before, strict=True):
                largest = float(b.detach().abs().max())
                assert_close_to_reference(
                    p.detach(), a.detach(), b.detach(), tiny=steps * 2.0**-22 * (0.1 + largest)
                )
                assert not torch.equal(p.detach(), old), "a step that does nothing would pass"
                for name in ("row_var", "col_var", "variance"):
                    if name in optimizers[2].state[b]:
                        state = [
                            o.state[q][name] for o, q in zip(optimizers, (p, a, b), strict=True)
                        ]
                        assert_close_to_reference(
                            *state, tiny=steps * 2.0**-22 * float(state[2].max())
                        )


def test_empty_tensors_are_stepped_over(device: torch.device):
    params = layers(device=device, shapes=((0,), (2, 0), (0, 3)))
    optimizer = Adafactor(params, **HYPER)
    train(optimizer, params, steps=2)
    assert all(optimizer.state[p]["step"].item() == 2 for p in params)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {}),
        (F32, {"max_grad_norm": 0.5, "zero_grad": True}),
        (BF16, {"master_weights": True}),
        (BF16, {"eps": (1e-5, 2e-2)}),
    ],
    ids=str,
)
def test_flat_layers_have_the_bits_of_separate_ones(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device
):
    for isa in isas(device):
        with library.use_isa(isa) if isa != "one" else torch.no_grad():
            separate = layers(dtype, device, SHAPES)
            buffer = flat_twin(separate)
            separate.reverse()
            apart, together = (
                Adafactor(separate, **{**HYPER, **options}),
                Adafactor([buffer.parameter], **{**HYPER, **options}),
            )
            for step in range(3):
                for i, g in enumerate(gradients(separate, step)):
                    separate[i].grad = g
                    buffer.parameter.grad[buffer.layout.slice_at(i)] = g.flatten()  # type: ignore[index]
                apart.step()
                together.step()
            for i, p in enumerate(separate):
                assert torch.equal(buffer.data[buffer.layout.slice_at(i)], p.detach().flatten()), (
                    isa,
                    i,
                )
            for name in ("row_var", "col_var", "variance"):
                each = [apart.state[p][name].flatten() for p in separate if name in apart.state[p]]
                assert torch.equal(together.state[buffer.parameter][name], torch.cat(each)), name
            assert together.state[buffer.parameter]["step"].item() == 3
            assert (buffer.data[padding_of(buffer)] == 7.0).all(), "padding was touched"


def test_a_transposed_parameter_is_exact(device: torch.device):
    values = torch.randn(40, 30, device=device)
    turned, plain = nn.Parameter(values.t().contiguous().t()), nn.Parameter(values.clone())
    assert not turned.is_contiguous()
    a, b = (Adafactor([p], **HYPER, zero_grad=True) for p in (turned, plain))
    train(a, [turned], steps=2)
    train(b, [plain], steps=2)
    assert_equal([turned], [plain])
    assert not turned.grad.any()  # type: ignore[union-attr]


def test_threads_change_no_bit():
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            params = layers(shapes=((700, 401), (77,), (90000,), (3, 4)))
            train(Adafactor(params, **HYPER), params, steps=2)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_equal(results[0], other)


def test_stochastic_rounding_is_seeded_and_near(device: torch.device):
    drawn = []
    for seed in (1, 1, 2):
        p = layers(BF16, device, ((60, 50),))
        train(Adafactor(p, **HYPER, stochastic_rounding=True, seed=seed), p, steps=2)
        drawn.append(p[0].detach())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    torch.testing.assert_close(drawn[0], drawn[2], rtol=2.0**-5, atol=2.0**-6)


def test_state_goes_both_ways_with_torch_and_resumes(device: torch.device):
    ours = [p for p in layers(device=device, shapes=SHAPES) if p.numel()]
    theirs = twins(ours)
    mine, plain = Adafactor(ours, **HYPER), torch.optim.Adafactor(theirs, **HYPER)
    train(mine, ours, steps=2)
    train(plain, theirs, steps=2)
    other = [twins(ours), twins(ours)]
    resumed, taken = Adafactor(other[0], lr=1.0), torch.optim.Adafactor(other[1], lr=1.0)
    resumed.load_state_dict(copy.deepcopy(mine.state_dict()))
    taken.load_state_dict(copy.deepcopy(mine.state_dict()))
    for optimizer, params in (
        (mine, ours),
        (resumed, other[0]),
        (taken, other[1]),
        (plain, theirs),
    ):
        train(optimizer, params, steps=2, first=2)
    assert_equal(ours, other[0])
    for a, b, c in zip(ours, other[1], theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


def test_a_step_with_an_inf_changes_nothing(device: torch.device):
    params = layers(device=device, shapes=SHAPES)
    optimizer = Adafactor(params, **HYPER, max_grad_norm=1.0, zero_grad=True)
    train(optimizer, params, steps=1)
    before, state = (
        [p.detach().clone() for p in params],
        copy.deepcopy(optimizer.state_dict()["state"]),
    )
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    optimizer.step()
    assert_equal(params, before)
    for i, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, state[i][name]), name
    assert not any(p.grad.any() for p in params)  # type: ignore[union-attr]


def test_bad_input(device: torch.device):
    p = nn.Parameter(torch.zeros(6, 2, device=device))
    for wrong, error, message in (
        ({"d": 0.5}, ValueError, "d=0.5 must be a finite number >= 1"),
        ({"eps": 1e-3}, TypeError, r"eps=0.001 must be two"),
        ({"eps": (-1.0, 1e-3)}, ValueError, r"eps\[0\]=-1.0"),
        ({"beta2_decay": 0.8}, ValueError, "beta2_decay=0.8 must be <= 0"),
        ({"lr": float("nan")}, ValueError, "lr=nan"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
    ):
        with pytest.raises(error, match=message):
            Adafactor([p], **{**HYPER, **wrong})
    optimizer = Adafactor([p], **HYPER)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    optimizer.state[p]["row_var"] = torch.zeros(5, 1, device=device)
    with pytest.raises(
        ValueError,
        match=r"state 'row_var' of parameter 0 .* is \(5, 1\); expected a tensor of \(6, 1\)",
    ):
        optimizer.step()
    assert torch.equal(p.detach(), before)
