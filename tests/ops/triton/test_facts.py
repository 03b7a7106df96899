"""What the compiler makes of the Triton kernels for sm_90, within bounds, and how many kernels it
has to make for a training whose batches differ. .ci/triton_facts.sh runs this file under the oldest
Triton that a supported torch brings, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.ahead import compile_launches, machine_code, variants
from benchmarks.kernel_facts import TRITON, Case, elements, empty

pytestmark = pytest.mark.cpu_only

# Of kernels that touch every element: registers, and instructions for an element. Drawing a block
# of Philox in each of four threads took 213 and 179 of `bias dropout add`; erf 28 of gelu.
BOUNDS = {
    "bias dropout add": (96, 85.0),
    "part of rows": (80, 60.0),
    "gelu bf16": (40, 36.0),
    "gelu back bf16": (96, 38.0),
    "gelu fp32": (48, 50.0),
    "swiglu": (96, 32.0),
}


def _bounded(stems: tuple[str, ...]) -> Iterator[tuple[Case, int, float]]:
    for stem in stems:
        for case in TRITON[stem]():
            for begin, bounds in BOUNDS.items():
                if begin in (case.name, case.name.removesuffix(" bf16").removesuffix(" fp32")):
                    yield case, *bounds


def test_registers_and_instructions():
    seen = set()
    for case, most_registers, most_instructions in _bounded(("dropout", "activation")):
        launch = compile_launches(case.call)[0]
        (machine,) = machine_code(launch.cubin)
        issue = machine.loop * 32 * launch.warps / elements(launch)
        assert machine.registers <= most_registers, f"{case.name}: {machine}"
        assert issue <= most_instructions, f"{case.name}: {issue}"
        assert machine.local == 0, f"{case.name}: {machine}"
        seen.add(case.name)
    assert len(seen) == 9


ROWS = [16 * k for k in range(1, 400)] + [777, 4095]


def test_few_kernels_for_many_numbers_of_tokens():
    """Sixteen of each kind at most: a number that is 1, divisible by 16 or neither."""
    from pyops.ops.triton import activation, dropout, norm

    state, weight = empty(2, dtype=torch.int64), empty(1024)

    def call() -> None:
        for rows in ROWS:
            x, statistic = empty(rows, 1024), empty(rows, dtype=torch.float32)
            norm.layer_norm_backward(x, None, x, weight, statistic, statistic, weight_grad=True)
            activation.bias_activation_backward(x, x, weight, activation="gelu", bias_grad=True)
            dropout.bias_dropout_add_backward(x, state, p=0.1, bias_grad=True)

    kinds: dict[str, int] = {}
    for text in variants(call):
        name = text.split("'")[1]
        kinds[name] = kinds.get(name, 0) + 1
    assert len(kinds) == 5
    assert max(kinds.values()) <= 16, kinds


def test_one_kernel_for_a_schedule_of_dropout():
    from pyops.ops.triton import dropout

    x, state = empty(64, 1024), empty(2, dtype=torch.int64)

    def call() -> None:
        for k in range(1, 100):
            dropout.bias_dropout_add(x, None, x, state, p=k / 200)

    assert len(variants(call)) == 1
