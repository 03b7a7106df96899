"""LAMB and LARS: element by element against float64, layers of a flat buffer against separate ones
bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pyops.flat import FlatLayout
from pyops.ops import library
from pyops.optim import AdamW
from pyops.optim.lamb import LAMB
from pyops.optim.lars import LARS
from tests.optim import layer_oracle
from tests.optim.layer_oracle import flat_twin, gradients, layers, options_of, padding_of
from tests.optim.pairs import assert_equal
from tests.tolerance import assert_close_to_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {"LAMB": (LAMB, layer_oracle.lamb), "LARS": (LARS, layer_oracle.lars)}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "LAMB": [
        {},
        {"min_ratio": 0.5, "max_ratio": 2.0},
        {"trust_ratio": False},
        {"maximize": True, "weight_decay": 0.0},
    ],
    "LARS": [
        {},
        {"nesterov": True},
        {"dampening": 0.3},
        {"trust_ratio": False},
        {"maximize": True, "weight_decay": 0.0},
        {"momentum": 0.0},
    ],
}
CASES = [(kind, options) for kind in KINDS for options in OPTIONS[kind]]
both = pytest.mark.parametrize("kind", list(KINDS))


def isas(device: torch.device) -> list[str]:
    return library.isas() if device.type == "cpu" and library.isas() else ["one"]


def set_gradients(params: Any, grads: Any) -> None:
    for p, g in zip(params, grads, strict=True):
        if p.grad is not None and p.grad.shape == g.shape:
            p.grad.copy_(g)
        else:
            p.grad = g.clone()


def train(optimizer: torch.optim.Optimizer, params: Any, *, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(params, gradients(params, step))
        optimizer.step()


def of_buffer(buffer: Any) -> list[nn.Parameter]:
    """The buffer's parameters in registration order."""
    return list(reversed(buffer.parameters))


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_against_float64(kind: str, options: dict[str, Any], device: torch.device):
    optimizer_class, oracle = KINDS[kind]
    for isa in isas(device):
        with library.use_isa(isa) if isa != "one" else torch.no_grad():
            params, steps = layers(device=device), 4
            start = [p.detach().clone() for p in params]
            train(optimizer_class(params, **options_of(kind, **options)), params, steps=steps)
            for i, (p, before) in enumerate(zip(params, start, strict=True)):
                grads = [gradients(params, step)[i] for step in range(steps)]
                plain, exact = (
                    oracle(before, grads, dtype, **options_of(kind, **options))[0]
                    for dtype in (F32, torch.float64)
                )
                largest = float(exact.abs().max()) if exact.numel() else 0.0
                assert_close_to_reference(
                    p.detach(), plain, exact, tiny=steps * 2.0**-22 * (1 + largest)
                )
                assert not p.numel() or not torch.equal(p.detach(), before), (
                    "a step that does nothing would pass"
                )


@both
def test_the_ratio_makes_a_difference(kind: str, device: torch.device):
    """A trust ratio of 1 everywhere, or norms over all layers together, would give other numbers
    than the layers' own."""
    optimizer_class, oracle = KINDS[kind]
    params = layers(device=device)
    start = [p.detach().clone() for p in params]
    train(optimizer_class(params, **options_of(kind)), params, steps=1)
    whole = torch.cat([p.flatten() for p in start])
    grads = gradients(start, 0)
    for wrong in (
        [
            oracle(p, [g], torch.float64, **options_of(kind, trust_ratio=False))[0]
            for p, g in zip(start, grads, strict=True)
        ],
        oracle(whole, [torch.cat([g.flatten() for g in grads])], torch.float64, **options_of(kind))[
            0
        ].split([p.numel() for p in start]),
    ):
        off = [
            float((p.detach().double().flatten() - w.flatten()).abs().max())
            for p, w in zip(params, wrong, strict=True)
            if p.numel() > 1
        ]
        assert sum(x > 1e-3 for x in off) >= len(off) - 1, (
            off
        )  # the layer of zeros has a ratio of 1


@both
def test_a_layer_of_zeros_has_a_ratio_of_one(kind: str, device: torch.device):
    optimizer_class, oracle = KINDS[kind]
    zeros, still = (
        nn.Parameter(torch.zeros(40, device=device)),
        nn.Parameter(torch.ones(40, device=device)),
    )
    zeros.grad, still.grad = torch.ones_like(zeros), torch.zeros_like(still)
    optimizer_class([zeros, still], **options_of(kind, weight_decay=0.0)).step()
    expected = oracle(
        torch.zeros(40),
        [torch.ones(40)],
        torch.float64,
        **options_of(kind, weight_decay=0.0, trust_ratio=False),
    )[0]
    torch.testing.assert_close(zeros.detach().cpu().double(), expected, rtol=1e-5, atol=0.0)
    assert torch.equal(still.detach(), torch.ones_like(still))


def test_without_the_ratio_lamb_is_adamw_bit_for_bit_and_lars_is_sgd(device: torch.device):
    ours, theirs = layers(device=device), layers(device=device)
    train(LAMB(ours, **options_of("LAMB", trust_ratio=False)), ours, steps=3)
    train(AdamW(theirs, **options_of("LAMB")), theirs, steps=3)
    assert_equal(ours, theirs)
    ours, theirs = layers(device=device), layers(device=device)
    train(LARS(ours, **options_of("LARS", trust_ratio=False)), ours, steps=3)
    train(torch.optim.SGD(theirs, lr=0.9, momentum=0.8, weight_decay=0.21), theirs, steps=3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {}),
        (F32, {"max_grad_norm": 0.5, "zero_grad": True}),
        (BF16, {"master_weights": True}),
        (BF16, {"state_dtype": BF16, "stochastic_rounding": True}),
        (F16, {"state_dtype": F16}),
        (F32, {"trust_ratio": False}),
    ],
    ids=str,
)
def test_flat_layers_have_the_bits_of_separate_ones(
    kind: str, dtype: torch.dtype, options: dict[str, Any], device: torch.device
):
    """Also when a gradient tensor is replaced, and the padding stays what it was."""
    optimizer_class, _ = KINDS[kind]
    if "stochastic_rounding" in options:
        options = {**options, "seed": 9}
    for isa in isas(device):
        with library.use_isa(isa) if isa != "one" else torch.no_grad():
            separate = layers(dtype, device)
            buffer = flat_twin(separate)
            # In the buffer's order, and numbered as its elements are.
            separate.reverse()
            group = {"params": separate, "offsets": list(buffer.layout.offsets)}
            apart, together = (
                optimizer_class([g], **options_of(kind, **options))
                for g in (group, {"params": [buffer.parameter]})
            )
            for step in range(4):
                grads = gradients(separate, step)
                set_gradients(separate, grads)
                if step == 2:
                    buffer.parameter.grad = torch.zeros_like(buffer.data)
                for i, g in enumerate(grads):
                    buffer.parameter.grad[buffer.layout.slice_at(i)] = g.flatten()  # type: ignore[index]
                apart.step()
                together.step()
            for i, p in enumerate(separate):
                where = buffer.layout.slice_at(i)
                assert torch.equal(buffer.data[where], p.detach().flatten()), (isa, i)
                for name, value in apart.state[p].items():
                    if name != "step":
                        assert torch.equal(
                            together.state[buffer.parameter][name][where], value.flatten()
                        ), (isa, i, name)
            assert together.state[buffer.parameter]["step"].item() == 4
            assert (
                options.get("trust_ratio") is False
                or (buffer.data[padding_of(buffer)] == 7.0).all()
            ), "padding was touched"
            assert not torch.equal(separate[1].detach(), torch.zeros_like(separate[1])), (
                "a step that does nothing would pass"
            )


@both
def test_threads_change_no_bit(kind: str):
    optimizer_class, _ = KINDS[kind]
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            params = layers(shapes=((300, 401), (77,), (200, 200), (3,)))
            train(optimizer_class(params, **options_of(kind)), params, steps=2)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_equal(results[0], other)


@both
def test_state_dict_resumes_and_flat_has_the_shape_of_its_parameter(
    kind: str, device: torch.device
):
    optimizer_class, _ = KINDS[kind]
    params = layers(device=device)
    buffer = flat_twin(params)
    optimizer = optimizer_class([buffer.parameter], **options_of(kind))
    train(optimizer, [buffer.parameter], steps=2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), buffer.data.clone()
    assert all(t.shape in ((), buffer.data.shape) for t in saved["state"][0].values())
    train(optimizer, [buffer.parameter], steps=2, first=2)
    expected = buffer.data.clone()
    with torch.no_grad():
        buffer.data.copy_(weights)
    again = optimizer_class([buffer.parameter], **options_of(kind))
    again.load_state_dict(saved)
    train(again, [buffer.parameter], steps=2, first=2)
    assert torch.equal(buffer.data, expected)


@both
def test_norms_summed_over_shards(kind: str, device: torch.device):
    """Two halves of each layer, as two processes hold them: `reduce_norms` makes the norms those of
    the whole."""
    optimizer_class, _ = KINDS[kind]
    whole = [
        nn.Parameter(torch.randn(40, 6, device=device)),
        nn.Parameter(torch.randn(50, device=device)),
    ]
    halves = [
        [nn.Parameter(p.detach().flatten().chunk(2)[k].clone()) for p in whole] for k in (0, 1)
    ]
    optimizers = [optimizer_class(half, **options_of(kind)) for half in halves]
    grads = gradients(whole, 1)
    seen: list[torch.Tensor] = []
    for k in (0, 1):  # the first run only measures: its parameters and states are put back
        set_gradients(halves[k], [g.flatten().chunk(2)[k] for g in grads])
        before = [p.detach().clone() for p in halves[k]]
        optimizers[k].reduce_norms = lambda norms: seen.append(norms.clone()) or norms  # type: ignore[func-returns-value]
        optimizers[k].step()
        optimizers[k].state.clear()
        for p, old in zip(halves[k], before, strict=True):
            p.data.copy_(old)
    for k in (0, 1):
        optimizers[k].reduce_norms = lambda norms: seen[0] + seen[1]
        optimizers[k].step()
    set_gradients(whole, grads)
    optimizer_class(whole, **options_of(kind)).step()
    for p, a, b in zip(whole, *halves, strict=True):
        torch.testing.assert_close(torch.cat([a, b]), p.flatten(), rtol=1e-6, atol=1e-7)


@both
def test_a_step_with_an_inf_changes_nothing(kind: str, device: torch.device):
    optimizer_class, _ = KINDS[kind]
    buffer = flat_twin(layers(device=device))
    optimizer = optimizer_class(
        [buffer.parameter], **options_of(kind), max_grad_norm=1.0, zero_grad=True
    )
    train(optimizer, [buffer.parameter], steps=1)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    before = buffer.data.clone()
    buffer.parameter.grad.fill_(1.0)[3] = float("inf")  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(buffer.data, before)
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state[0][name]), name
    assert not buffer.parameter.grad[~padding_of(buffer)].any()  # type: ignore[index]


@both
def test_bad_input(kind: str, device: torch.device):
    optimizer_class, _ = KINDS[kind]
    p = nn.Parameter(torch.zeros(6, device=device))
    p.grad = torch.ones_like(p)
    own: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
        "LAMB": [
            ({"min_ratio": 3.0, "max_ratio": 2.0}, ValueError, "min_ratio=3.0"),
            ({"max_ratio": "2"}, TypeError, "max_ratio='2'"),
        ],
        "LARS": [
            ({"momentum": -0.1}, ValueError, "momentum=-0.1"),
            ({"nesterov": True, "dampening": 0.1}, ValueError, "nesterov"),
            ({"trust_coefficient": True}, TypeError, "trust_coefficient"),
        ],
    }
    shared: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"trust_ratio": 0.5}, TypeError, "trust_ratio=0.5 must be True or False"),
        ({"lr": -1.0}, ValueError, "lr=-1.0"),
    ]
    for wrong, error, message in shared + own[kind]:
        with pytest.raises(error, match=message):
            optimizer_class([p], **options_of(kind, **wrong))
    p.flat_layout = FlatLayout.plan([("w", (5,))])  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError,
        match=r"flat_layout of parameter 0 .* is of 5 elements; expected a FlatLayout of the 6",
    ):
        optimizer_class([p], **options_of(kind)).step()
    assert not p.detach().any()
