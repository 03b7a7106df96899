"""Each Triton kernel at a small, odd size, forward and backward, beside the CPU.

Small on purpose: `make gpu` runs this file under compute-sanitizer, so that loads and stores behind
the end of a row or a tensor are seen. The numbers at length are tests/ops' business.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyops.ops.layers import activation, cross_entropy, dropout, norm, rotary
from tests.conftest import DEVICE

pytestmark = [
    pytest.mark.real_device,
    pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a GPU: PYOPS_TEST_DEVICE=cuda"),
]

ROWS, WIDTH = 5, 77  # less than a tile, and no multiple of a vector
STATE = dropout.dropout_state(7, 0)


def _dropped(x: Tensor, residual: Tensor) -> Tensor:
    state = STATE.to(x.device)
    return dropout.bias_dropout_add(x, None, residual, p=0.3, state=state)


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(ROWS, dtype=x.dtype, device=x.device)[:, None] * torch.linspace(
        0.1, 1.0, 3, dtype=x.dtype, device=x.device
    )
    heads = x[:, :60].reshape(1, ROWS, 10, 6)
    return rotary.rotary(heads, angles.cos(), angles.sin())


def _losses(x: Tensor) -> Tensor:
    targets = torch.arange(ROWS, device=x.device) * 3
    return cross_entropy.cross_entropy(x, targets, reduction="sum")


CASES: dict[str, Callable[..., Tensor]] = {
    "layer norm": lambda x, y: norm.layer_norm(x, y[0], y[1]),
    "rms norm": lambda x, y: norm.rms_norm(x, y[0]),
    "add + layer norm": lambda x, y: norm.add_layer_norm(x, y, y[0], y[1])[0],
    "gelu": lambda x, y: activation.bias_activation(x, y[0]),
    "swiglu": lambda x, y: activation.bias_gated(x[:, :76]),
    "dropout + add": _dropped,
    "rotary": lambda x, y: _rotated(x),
    "cross entropy": lambda x, y: _losses(x),
}


def _run(case: Callable[..., Tensor], device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_() for _ in range(2)
    ]
    found = case(*inputs)
    weights = torch.linspace(0.5, 1.5, found.numel()).view(found.shape).to(device)
    (found * weights).sum().backward()
    return [each.detach().cpu() for each in (found, *(x.grad for x in inputs)) if each is not None]


@pytest.mark.parametrize("name", list(CASES))
def test_a_small_case_is_that_of_the_cpu(device, name):
    for there, here in zip(_run(CASES[name], device), _run(CASES[name], "cpu"), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
