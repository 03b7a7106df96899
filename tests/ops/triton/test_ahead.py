"""Every Triton kernel compiles for sm_90, with the arguments that its launcher gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ops.triton.ahead import compile_launches

pytestmark = pytest.mark.cpu_only

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def activations() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton import activation as kernels

    def operands(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in ((64, 1024), (1024,), (64, 512))]

    for name, dtype in (("gelu", BF16), ("gelu_tanh", F32), ("relu", F16), ("silu", F64)):
        x, bias, _ = operands(dtype)
        yield name, lambda x=x, b=bias, n=name: kernels.bias_activation(x, b, activation=n)
    x, bias, dy = operands(BF16)
    back = {"activation": "gelu", "bias_grad": True}
    yield "gated", lambda: kernels.bias_gated(x, bias, activation="silu")
    yield "backward", lambda: kernels.bias_activation_backward(x, x, bias, **back)
    yield "backward without bias", lambda: kernels.bias_activation_backward(x, x, None, **back | {"bias_grad": False})
    yield "gated backward", lambda: kernels.bias_gated_backward(dy, x, bias, **back)


STEMS = {"activation": activations}


@pytest.mark.parametrize("stem", STEMS)
def test_kernels_compile_for_sm_90(stem: str):
    for name, call in STEMS[stem]():
        compiled = compile_launches(call)
        assert compiled, f"{name} launched nothing"
        assert all(".target sm_90" in ptx and "st.global" in ptx for ptx in compiled), name
