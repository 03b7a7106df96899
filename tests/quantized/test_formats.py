"""Codes and scales by hand, and what they keep."""

from __future__ import annotations

import pytest
import torch

from pyops.quantized import FP8, Int4, Int8, IntN, Scheme, decode, encode
from pyops.quantized.formats import code_range, pack_nibbles, to_codes, unpack_nibbles

FORMATS = (
    Int8(),
    Int8(symmetric=False),
    Int8(per="tensor"),
    Int8(per="tensor", symmetric=False),
    Int4(group=4),
    Int4(group=None, symmetric=False),
    IntN(2),
    IntN(3, group=2, symmetric=False),
    FP8(),
)


def test_symmetric_by_hand():
    """Halves go to the even code; -127 is the least."""
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 0.0], [0, 0, 0, 0, 0, 0]])
    found = encode(x, Int8())
    assert found.codes.tolist() == [[127, 0, 2, -2, -127, 0], [0] * 6]
    assert found.codes.dtype == torch.int8
    assert found.scales.tolist() == [1.0, 0.0]
    assert found.zero_points is None
    assert decode(found).tolist() == [[127, 0, 2, -2, -127, 0], [0] * 6]
    four = encode(torch.tensor([[7.0, -3.5, 0.5, -7.0]]), Int4(group=2))
    assert four.codes.tolist() == [[7, -4, 0, -7]]  # 3.5 -> 4, 0.5 -> 0
    assert four.scales.tolist() == [[1.0, 1.0]]


def test_asymmetric_by_hand():
    x = torch.tensor([[-1.0, 0.0, 254.0], [1.0, 2.0, 255.0], [-255.0, -1.0, -2.0]])
    found = encode(x, Int8(symmetric=False))
    assert found.scales.tolist() == [1.0, 1.0, 1.0]
    assert found.zero_points.tolist() == [1, 0, 255]
    assert found.codes.tolist() == [[0, 1, 255], [1, 2, 255], [0, 254, 253]]
    assert torch.equal(decode(found), x)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_codes_keep(format):
    x = torch.randn(5, 3, 8) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1)
    x[:, :, 3] = 0
    x[2] = 0
    found = encode(x, format)
    back = decode(found)
    low, high = code_range(format)
    assert (back[:, :, 3] == 0).all()
    assert (back[2] == 0).all()
    if not isinstance(format, FP8):
        assert int(found.codes.min()) >= low
        assert int(found.codes.max()) == high
        scales = found.scales if format.per == "tensor" else found.scales.unsqueeze(-1)
        if format.group is not None:
            scales = found.scales.repeat_interleave(format.group, -1)
        # A rounding of an ulp of x beside half a step
        assert ((back - x).abs() <= 0.5 * scales + x.abs() * 2**-22).all()
        again = encode(back, format)
        assert torch.equal(again.codes, found.codes)
    else:
        assert ((back - x).abs() <= x.abs() / 16 + 1e-12).all()
    assert back.abs().max() > 0


def test_along_another_dimension():
    x = torch.randn(6, 4)
    for format in (Int8(), Int4(group=2, symmetric=False)):
        across, upright = encode(x, format, 0), encode(x.t(), format)
        assert torch.equal(across.codes, upright.codes.t())
        assert torch.equal(across.scales, upright.scales.t())
        assert torch.equal(decode(across), decode(upright).t())
        assert across.dim == -2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_block_alone(bad: float):
    x = torch.ones(2, 4)
    x[1, 2] = bad
    for format in (Int8(), Int8(symmetric=False), Int4(group=2)):
        found = encode(x, format)
        assert (found.codes[1, 2:] == 0).all()
        back = decode(found)
        assert back[1, 2:].isnan().all()
        assert torch.equal(back[0], x[0])
        if format.group:
            assert torch.equal(back[1, :2], x[1, :2])


def test_given_scales_clip():
    scales = torch.tensor([0.1, 0.0, torch.nan])
    x = torch.tensor([[100.0, -100.0, torch.nan]] * 3)
    found = to_codes(x, scales, None, Int8())
    assert found.codes.tolist() == [[127, -127, 0], [0, 0, 0], [0, 0, 0]]


def test_scales_below_what_fp32_can_divide_by():
    tiny = torch.tensor([[1e-45, 0.0]])
    found = encode(tiny, Int8())
    assert found.scales.tolist() == [0.0]
    assert found.codes.tolist() == [[0, 0]]


def test_nibbles_by_hand():
    codes = torch.tensor([[1, -1, -8], [7, 0, 5]], dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0xF1, 0x08], [0x07, 0x05]]  # the first in the low half
    assert torch.equal(unpack_nibbles(packed, 3), codes)
    plain = torch.tensor([[15, 0, 9, 4]], dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(plain), 4, symmetric=False), plain)


def test_no_numbers():
    for shape in ((0, 4), (3, 0)):
        found = encode(torch.zeros(shape), Int8())
        assert found.codes.shape == shape
        assert decode(found).shape == shape


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(per="row"), "per must be one of channel, token, tensor; got 'row'"),
        (lambda: Int4(group=3), "group must be an even number.*got 3"),
        (lambda: IntN(9), "bits must be 2 to 8; got 9"),
        (lambda: IntN(4, per="tensor", group=2), 'per="tensor" is one scale for all; got group=2'),
        (lambda: IntN(2.5), "bits must be 2 to 8; got 2.5"),
        (lambda: Int4(group="64"), "group must be an even number.*got '64'"),
        (lambda: Scheme("int8"), "Scheme: weights is 'int8'; give a format, such as"),
        (lambda: Scheme(Int8), "Scheme: weights is <class"),
        (lambda: Scheme(Int8(), "int8"), "Scheme: activations is 'int8'"),
        (lambda: encode(torch.ones(2, 2), "int8"), "encode: format is 'int8'"),
        (lambda: encode([1.0], Int8()), "encode: x is list; give a tensor of floating"),
        (lambda: encode(torch.ones(2, 2), Int8(), 5), r"dim is 5, but x is \[2, 2\]"),
        (lambda: Scheme(Int8(per="token")), "weights have a scale for each output channel"),
        (lambda: Scheme(activations=Int8()), 'activations are per="token"'),
        (lambda: Scheme(Int8(), FP8(per="token")), "both be fp8 or both be integers"),
        (
            lambda: encode(torch.zeros(2, 12), Int4(group=8)),
            "12 inputs can't be cut into groups of 8; groups that divide it: 2, 4, 6, 12",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
