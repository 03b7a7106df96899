"""The differentiable ops inside torch.compile, under autocast and in a CUDA graph: as alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers import activation, depthwise, dropout, norm, rotary
from pyops.ops.layers.cross_entropy import cross_entropy

WIDTH = 12
Layer = Callable[..., Tensor | tuple[Tensor, ...]]


def state(x: Tensor) -> Tensor:
    return torch.full((2,), 7, dtype=torch.int64, device=x.device)


def turned(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    angle = torch.arange(5, device=x.device, dtype=torch.float32)[:, None] * 0.1 ** torch.arange(
        2, device=x.device
    )
    return rotary.rotary((x * w + y + b).view(2, 5, 3, 4), angle.cos(), angle.sin())


# Of x, y [2, 5, WIDTH] and w, b [WIDTH]. All four take part in each.
LAYERS: dict[str, Layer] = {
    "bias_activation": lambda x, y, w, b: activation.bias_activation(
        x * w + y, b, activation="gelu"
    ),
    "bias_gated": lambda x, y, w, b: activation.bias_gated(
        torch.cat([x, y], -1), torch.cat([w, b])
    ),
    "bias_dropout_add": lambda x, y, w, b: dropout.bias_dropout_add(
        x * w, b, y, p=0.3, state=state(x)
    ),
    "dropout": lambda x, y, w, b: dropout.dropout(
        x * w + y + b, p=0.3, state=state(x), row=4, row_stride=9
    ),
    "rotary": turned,
    "depthwise_conv2d": lambda x, y, w, b: depthwise.depthwise_conv2d(
        (x + y).mT.reshape(2, WIDTH, 1, 5), (w + x[0, 0]).view(-1, 1, 1, 1).expand(-1, 1, 3, 3), b
    ),
    "layer_norm": lambda x, y, w, b: norm.layer_norm(x + y, w, b),
    "rms_norm": lambda x, y, w, b: norm.rms_norm(x + y * b, w, offset=1.0),
    "add_layer_norm": lambda x, y, w, b: norm.add_layer_norm(x, y, w, b),
    "add_rms_norm": lambda x, y, w, b: norm.add_rms_norm(x * b, y, w),
}


def leaves(device: torch.device) -> list[Tensor]:
    shapes = [(2, 5, WIDTH)] * 2 + [(WIDTH,)] * 2
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def forward_backward(layer: Layer, tensors: list[Tensor]) -> list[Tensor]:
    outputs = layer(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [
        torch.arange(o.numel(), device=o.device, dtype=o.dtype).view(o.shape) / o.numel()
        for o in outputs
    ]
    return [*outputs, *torch.autograd.grad(outputs, tensors, seeds)]


@pytest.mark.real_device
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_forward_and_backward(name: str, device: torch.device):
    tensors = leaves(device)
    expected = forward_backward(LAYERS[name], tensors)
    torch.compiler.reset()
    compiled = torch.compile(LAYERS[name], backend="aot_eager", fullgraph=True)
    for a, e in zip(forward_backward(compiled, tensors), expected, strict=True):
        torch.testing.assert_close(a, e)
        assert e.abs().max() > 0


def mixed(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """A layer's pieces as autocast hands them out: products in bf16, parameters and the first
    residual in fp32."""
    h = functional.linear(x, w)
    y, s = norm.add_layer_norm(h, x, b, b)
    r, t = norm.add_rms_norm(h, s, b)
    flat = activation.bias_gated(functional.linear(y, w), b)
    kept = dropout.bias_dropout_add(h, b, x, p=0.3, state=state(x))
    return [
        y,
        s,
        r,
        t,
        norm.layer_norm(h, b),
        norm.rms_norm(h, b),
        flat,
        activation.bias_activation(h, b),
        kept,
    ]


def test_autocast(device: torch.device):
    """What torch's own addition or norm would give: dtypes promoted, values to bf16's precision."""
    x, w, b = (
        torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 8), (8, 8), (8,))
    )
    exact = mixed(x, w, b)
    with torch.autocast(device.type, torch.bfloat16):
        found = mixed(x, w, b)
    bf16, f32 = torch.bfloat16, torch.float32
    assert [t.dtype for t in found] == [f32, f32, f32, f32, bf16, bf16, bf16, bf16, f32]
    for a, e in zip(found, exact, strict=True):
        torch.testing.assert_close(a.float(), e, atol=0.1, rtol=0.1)
    gradients = torch.autograd.grad(sum(t.float().sum() for t in found), (x, w, b))
    for g, e in zip(
        gradients, torch.autograd.grad(sum(t.sum() for t in exact), (x, w, b)), strict=True
    ):
        assert g.dtype == f32
        assert (g - e).abs().max() < 0.1 * e.abs().max()


@pytest.mark.parametrize("name", [*LAYERS, "cross_entropy"])
def test_a_graph_replays_forward_and_backward(name: str, device: torch.device):
    """Nothing waits for the device, so a CUDA graph can hold it; replayed on other numbers it
    computes theirs."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs are CUDA's")
    layer = LAYERS.get(
        name,
        lambda x, y, w, b: cross_entropy(
            x * w + y + b, torch.ones(2, 5, dtype=torch.int64, device=x.device)
        ),
    )
    tensors = leaves(device)
    forward_backward(layer, tensors)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(layer, tensors)
    with torch.no_grad():
        for t in tensors:
            t.copy_(torch.randn_like(t))
    graph.replay()
    for a, e in zip(captured, forward_backward(layer, tensors), strict=True):
        torch.testing.assert_close(a, e)
