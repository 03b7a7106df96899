"""Adafactor over ranges of flattened tensors, each on a thread of its own: the whole tensors'
steps, wherever they are cut."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.optim import Adafactor
from pyops.optim.adafactor.parts import TensorPart
from tests.tolerance import assert_close_to_reference

SHAPES: tuple[tuple[int, ...], ...] = (
    (37, 23),
    (6, 5, 3, 3),
    (1, 40),
    (40, 1),
    (400, 401),
    (),
    (129,),
)
HYPER: dict[str, Any] = {
    "lr": 0.03,
    "beta2_decay": -0.7,
    "eps": (1e-5, 2e-2),
    "d": 1.1,
    "weight_decay": 0.3,
}
STEPS = 3


def cuts(numel: int, processes: int) -> list[int]:
    """Within rows, within matrices, and one range that is empty."""
    inner = sorted((numel * (7 * k + 3)) // (7 * processes) for k in range(1, processes - 1))
    return [0, *inner, numel, numel] if processes > 1 else [0, numel]


def tensors(dtype: torch.dtype, step: int) -> list[Tensor]:
    """Values (step -1), or gradients of a step, of all sizes."""
    generator = torch.Generator().manual_seed(step + 7)
    return [
        (torch.randn(s, generator=generator) * 10.0 ** (i % 3 - 1)).to(dtype)
        for i, s in enumerate(SHAPES)
    ]


def sum_over(processes: int) -> Callable[[Tensor], Tensor]:
    """A reduction among threads; each calls it in turn."""
    lock, meeting, waiting = threading.Lock(), threading.Barrier(processes), []

    def reduce(mine: Tensor) -> Tensor:
        with lock:
            waiting.append(mine)
        meeting.wait(20)
        total = torch.stack(waiting).sum(0)
        meeting.wait(20)
        waiting.clear()
        meeting.wait(20)
        return mine.copy_(total)

    return reduce


def in_parts(
    processes: int, dtype: torch.dtype, **options: Any
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The tensors after the steps, and each process' states."""
    values, reduce = tensors(dtype, -1), sum_over(processes)

    def one(process: int) -> tuple[list[nn.Parameter], Adafactor]:
        parameters = []
        for value in values:
            start, stop = cuts(value.numel(), processes)[process : process + 2]
            p = nn.Parameter(value.view(-1)[start:stop].clone())
            p.part_of = TensorPart(tuple(value.shape), start)
            parameters.append(p)
        offsets = [
            sum(prod(s) for s in SHAPES[:i]) + p.part_of.start for i, p in enumerate(parameters)
        ]
        optimizer = Adafactor([{"params": parameters, "offsets": offsets}], **options)
        optimizer.reduce_sums = reduce
        for step in range(STEPS):
            for p, g in zip(parameters, tensors(dtype, step), strict=True):
                p.grad = g.view(-1)[p.part_of.start : p.part_of.start + p.numel()].clone()
            optimizer.step()
        return parameters, optimizer

    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(one, range(processes)))
    whole = [
        torch.cat([parameters[i] for parameters, _ in found]).detach().view(s)
        for i, s in enumerate(SHAPES)
    ]
    return whole, [[o.state[p] for p in parameters] for parameters, o in found]


def whole(cls: type, dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], Any]:
    parameters = [nn.Parameter(value.to(dtype)) for value in tensors(torch.float32, -1)]
    optimizer = cls(parameters, **options)
    for step in range(STEPS):
        for p, g in zip(parameters, tensors(torch.float32, step), strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in parameters], optimizer


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True, "lr": 2.0, "d": 1.0}, {"eps": (None, 1e-3)}], ids=str
)
def test_parts_take_the_steps_of_whole_tensors(processes: int, options: dict[str, Any]):
    options = {**HYPER, **options}
    eps = (
        {"eps": (torch.finfo(torch.float32).eps, options["eps"][1])}
        if options["eps"][0] is None
        else {}
    )
    found, states = in_parts(processes, torch.float32, **options)
    plain, _ = whole(torch.optim.Adafactor, torch.float32, **options)
    exact, reference = whole(torch.optim.Adafactor, torch.float64, **{**options, **eps})
    start = tensors(torch.float32, -1)
    for i, (a, b, c) in enumerate(zip(found, plain, exact, strict=True)):
        assert_close_to_reference(a, b, c, tiny=STEPS * 2.0**-22 * (0.1 + float(c.abs().max())))
        assert not torch.equal(a, start[i]), "a step that does nothing would pass"
        for name in ("row_var", "col_var") if len(SHAPES[i]) > 1 else ():
            expected = list(reference.state.values())[i][name]
            for process in range(processes):
                value = states[process][i][name]
                assert torch.equal(value, states[0][i][name]), "the same everywhere"
                torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"stochastic_rounding": True}], ids=str
)
def test_16_bit_parts_are_rounded_as_whole_tensors(options: dict[str, Any]):
    expected, _ = in_parts(1, torch.bfloat16, **HYPER, **options)
    plain, _ = whole(Adafactor, torch.bfloat16, **HYPER, **options)
    found, _ = in_parts(3, torch.bfloat16, **HYPER, **options)
    for a, b, c in zip(found, expected, plain, strict=True):
        assert torch.equal(a, b)
        # Sums in another order move a value across a rounding boundary now and then: by one unit in
        # the last place.
        differs = (a != c).double().mean()
        assert differs < 0.02
        torch.testing.assert_close(a, c, rtol=2.0**-7, atol=1e-3)


def test_a_part_with_the_states_of_another_shape_is_refused():
    p = nn.Parameter(torch.randn(10))
    p.part_of = TensorPart((4, 5), 3)
    optimizer = Adafactor([p])
    p.grad = torch.ones(10)
    optimizer.state[p]["row_var"] = torch.zeros(5, 1)
    with pytest.raises(ValueError, match="row_var"):
        optimizer.step()
