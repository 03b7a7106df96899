"""depthwise_conv2d: values, gradients, bits, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers import depthwise
from pyops.ops.layers.depthwise import depthwise_conv2d
from tests.tolerance import assert_close_to_reference

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Images of one pixel, of one block and the rest of each size, of more than one block; channels
# below a register, and registers with a rest.
IMAGES = ((1, 1, 1, 3), (2, 3, 2, 37), (1, 2, 7, 16), (2, 5, 11, 5))


def images(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N, C, H, W] with channels last, of a shape [N, H, W, C]."""
    return torch.randn(shape, device=device, dtype=F64).to(dtype).permute(0, 3, 1, 2)


def operands(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, weight: torch.dtype
) -> list[Tensor]:
    x, channels = images(shape, dtype, device), shape[3]
    sizes = ((channels, 1, 3, 3), (channels,))
    return [x, *(torch.randn(size, device=device, dtype=F64).to(weight) for size in sizes)]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int) -> Tensor:
    return functional.conv2d(x, weight, bias, stride=stride, padding=1, groups=x.shape[1])


def results(form, tensors: list[Tensor], dy: Tensor, stride: int, dtype=None) -> list[Tensor]:
    """y, dx, dweight and dbias, computed in `dtype` (None: each in its own)."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = form(*leaves, stride=stride)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def gradient_of_y(x: Tensor, stride: int) -> Tensor:
    n, channels, height, width = x.shape
    return images((n, -(-height // stride), -(-width // stride), channels), x.dtype, x.device)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_against_float64(dtype: torch.dtype, stride: int, device: torch.device, isa: str):
    for shape in IMAGES:
        tensors = operands(shape, dtype, device, dtype)
        dy = gradient_of_y(tensors[0], stride)
        found, torchs = (results(form, tensors, dy, stride) for form in (depthwise_conv2d, plain))
        exact = results(plain, tensors, dy, stride, F64)
        for a, p, e in zip(found, torchs, exact, strict=True):
            size = max(1.0, float(e.detach().abs().max()))
            assert_close_to_reference(a, p, e, tiny=2 * torch.finfo(dtype).eps * size)
            assert a.abs().max() > 0


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_by_finite_differences(stride: int, device: torch.device, isa: str):
    for shape in ((1, 3, 4, 5), (2, 2, 1, 1)):
        tensors = [t.requires_grad_() for t in operands(shape, F64, device, F64)]
        assert torch.autograd.gradcheck(
            lambda *t: depthwise_conv2d(*t, stride=stride), tensors, fast_mode=True
        )
        assert torch.autograd.gradcheck(lambda *t: depthwise_conv2d(*t, stride=stride), tensors)


def test_taps_by_hand(device: torch.device, isa: str):
    """One pixel is seen through each tap once, turned about; weights 1 to 9."""
    x = torch.zeros(1, 1, 5, 5, device=device)
    x[0, 0, 2, 2] = 5.0
    weight = torch.arange(1.0, 10.0, device=device).view(1, 1, 3, 3)
    y = depthwise_conv2d(x, weight, torch.full((1,), 0.5, device=device))
    expected = 5.0 * torch.arange(9.0, 0.0, -1.0, device=device).view(3, 3)
    assert torch.equal(y[0, 0, 1:4, 1:4], expected + 0.5)
    assert y[0, 0].sum() == 5 * 45 + 25 * 0.5
    halved = depthwise_conv2d(x, weight, stride=2)
    assert torch.equal(halved, y[:, :, ::2, ::2] - 0.5)


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, F16)], ids=str)
def test_weights_of_another_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, isa: str
):
    tensors = operands((2, 4, 6, 18), dtypes[0], device, dtypes[1])
    dy = gradient_of_y(tensors[0], 1)
    found = results(depthwise_conv2d, tensors, dy, 1)
    assert [t.dtype for t in found] == [dtypes[0], dtypes[0], dtypes[1], dtypes[1]]
    for a, e in zip(found, results(plain, tensors, dy, 1, F64), strict=True):
        error = (a.double() - e).abs().max()
        assert error <= 2 * torch.finfo(a.dtype).eps * e.detach().abs().max()


@pytest.mark.cpu_only
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (F32, F32)], ids=str)
def test_what_cuda_calls_keeps_the_wider_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], stride: int
):
    """torch's own convolution, which knows one dtype: here on the CPU."""
    x, weight, bias = operands((2, 4, 6, 18), dtypes[0], torch.device("cpu"), dtypes[1])
    dy = gradient_of_y(x, stride)
    exact = results(plain, [x, weight, bias], dy, stride, F64)
    last, wanted = (0, 2, 3, 1), {"input_grad": True, "weight_grad": True}
    y = depthwise._cuda(x.permute(last), weight, bias, stride=stride, activation=None)
    dx, *of_weights = depthwise._cuda_backward(
        dy.permute(last), x.permute(last), weight, stride=stride, **wanted
    )
    found = [*(t.permute(0, 3, 1, 2) for t in (y, dx)), *of_weights]
    assert [t.dtype for t in found] == [dtypes[0], dtypes[0], dtypes[1], dtypes[1]]
    for a, e in zip(found, exact, strict=True):
        error = (a.double() - e).abs().max()
        assert error <= 2 * torch.finfo(a.dtype).eps * e.detach().abs().max()
        assert a.abs().max() > 0


def test_the_result_has_its_channels_last_whatever_x_has(device: torch.device):
    x, weight, _ = operands((2, 4, 5, 6), F32, device, F32)
    y = depthwise_conv2d(x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)
    for other in (x.contiguous(), torch.randn(2, 6, 5, 4, device=device).mT.copy_(x)):
        assert torch.equal(depthwise_conv2d(other, weight), y)
    leaf = x.contiguous().requires_grad_()
    depthwise_conv2d(leaf, weight).sum().backward()  # a gradient of stride 0
    expected = torch.autograd.grad(plain(leaf, weight, None, stride=1).sum(), leaf)[0]
    torch.testing.assert_close(leaf.grad, expected)
    assert expected.abs().max() > 0


@pytest.mark.cpu_only
@pytest.mark.parametrize("stride", [1, 2])
def test_the_same_bits_for_any_number_of_threads(stride: int, isa: str):
    tensors = operands((3, 19, 23, 33), F32, torch.device("cpu"), F32)
    dy, threads, found = gradient_of_y(tensors[0], stride), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(results(depthwise_conv2d, tensors, dy, stride))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=1))
    # An image's bits don't depend on those beside it
    y, dx, *_ = results(depthwise_conv2d, [tensors[0][1:2], *tensors[1:]], dy[1:2], stride)
    assert torch.equal(y, found[0][0][1:2])
    assert torch.equal(dx, found[0][1][1:2])


@pytest.mark.cpu_only
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [1024, 1032], ids=["registers", "and a rest"])
def test_large_results_have_the_bits_of_small_ones(channels: int, stride: int, isa: str):
    """Beyond 4 million numbers they are written past the caches where whole registers fit; the
    channels in two parts are below that."""
    tensors = operands((1, 64, 64, channels), F32, torch.device("cpu"), F32)
    dy, half = gradient_of_y(tensors[0], stride), channels // 2
    assert tensors[0].numel() >= 4 << 20 > tensors[0].numel() / 2
    found = results(depthwise_conv2d, tensors, dy, stride)
    for part in (slice(half), slice(half, None)):
        x, weight, bias = tensors[0][:, part], tensors[1][part], tensors[2][part]
        expected = results(depthwise_conv2d, [x, weight, bias], dy[:, part], stride)
        y, dx, dweight, dbias = found
        for a, e in zip(
            (y[:, part], dx[:, part], dweight[part], dbias[part]), expected, strict=True
        ):
            assert torch.equal(a, e)


def test_an_activation_at_inference(device: torch.device, isa: str):
    tensors = operands((2, 3, 5, 21), F32, device, F32)
    exact = plain(*(t.double() for t in tensors), stride=2)
    forms = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "relu": torch.relu,
        "silu": functional.silu,
    }
    for name, form in forms.items():
        y = depthwise_conv2d(*tensors, stride=2, activation=name)
        torch.testing.assert_close(y.double(), form(exact), rtol=1e-5, atol=1e-5)
        half = depthwise_conv2d(tensors[0].half(), *tensors[1:], stride=2, activation=name)
        torch.testing.assert_close(half.double(), form(exact), rtol=4e-3, atol=4e-3)
        assert y.abs().max() > 0
    with pytest.raises(ValueError, match=r"activation='gelu' is for inference"):
        depthwise_conv2d(tensors[0], tensors[1].requires_grad_(), activation="gelu")


def test_what_is_beyond_the_image_counts_for_nothing(device: torch.device, isa: str):
    """Not as a zero times a weight: an infinite weight makes no nan at the edges."""
    if device.type != "cpu":
        pytest.skip("torch's own convolution multiplies its padding")
    x = torch.ones(1, 1, 3, 6, device=device)
    weight = torch.ones(1, 1, 3, 3, device=device)
    weight[0, 0, 0, 0] = torch.inf
    y = depthwise_conv2d(x, weight)
    assert torch.equal(y[0, 0, 0], torch.tensor([4.0, 6, 6, 6, 6, 4], device=device))
    assert y[0, 0, 1:, 1:].isinf().all()
    assert y[0, 0, 1:, 0].isfinite().all()


def test_only_what_is_asked_for(device: torch.device, isa: str):
    tensors = operands((2, 4, 9, 18), F32, device, F32)
    dy = gradient_of_y(tensors[0], 1)
    whole = results(depthwise_conv2d, tensors, dy, 1)[1:]
    for wanted in range(3):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        depthwise_conv2d(*leaves).backward(dy)
        assert torch.equal(leaves[wanted].grad, whole[wanted])
        assert all(t.grad is None for i, t in enumerate(leaves) if i != wanted)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
def test_no_elements(shape: tuple[int, int, int, int], device: torch.device):
    tensors = operands(shape, F32, device, F32)
    found = results(depthwise_conv2d, tensors, gradient_of_y(tensors[0], 2), 2)
    assert found[0].shape == (shape[0], shape[3], -(-shape[1] // 2), -(-shape[2] // 2))
    assert all(t.count_nonzero() == 0 for t in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (4, 5, 5)}, r"x must be \[N, C, H, W\]; got \[4, 5, 5\]. One image is x\[None\]"),
        ({"weight": (4, 1, 5, 5)}, r"weight must be \[4, 1, 3, 3\].*got \[4, 1, 5, 5\]"),
        ({"weight": (8, 1, 3, 3)}, r"as x has 4 channels; got \[8, 1, 3, 3\]"),
        ({"bias": (8,)}, r"bias must be \[4\] torch.float32.*got \[8\]"),
        ({"stride": 3}, r"stride must be 1 or 2; got 3"),
        ({"activation": "tanh"}, r"activation must be None or one of gelu.*got 'tanh'"),
        ({"dtype": F64}, r"or both float64; got torch.float64 and torch.float32"),
        ({"dtype": torch.int32}, r"got torch.int32 and torch.float32"),
    ],
)
def test_what_is_refused(change: dict, message: str, device: torch.device):
    shapes = {"x": (2, 4, 5, 5), "weight": (4, 1, 3, 3), "bias": (4,)} | change
    x, weight, bias = (torch.zeros(shapes[name], device=device) for name in ("x", "weight", "bias"))
    options = {k: v for k, v in change.items() if k in ("stride", "activation")}
    with pytest.raises((ValueError, TypeError), match=message):
        depthwise_conv2d(x.to(change.get("dtype", F32)), weight, bias, **options)


def test_the_op_itself_refuses_what_does_not_fit(device: torch.device):
    x, weight = torch.zeros(1, 3, 3, 4, device=device), torch.zeros(4, 1, 3, 3, device=device)
    op = torch.ops.pyops.depthwise_conv2d_backward.default
    options = {"stride": 2, "input_grad": True, "weight_grad": True}
    error = (RuntimeError, ValueError)
    with pytest.raises(error, match="dy"):
        op(x, x, weight, **options)
    with pytest.raises(error, match="dy"):
        op(x[:, :2, :2].half(), x, weight, **options)
    with pytest.raises(error, match="weight"):
        op(x[:, :2, :2], x, weight[:2], **options)
