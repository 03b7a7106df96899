"""Few rows times codes: values, bits, groups, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.codes.code_rows import FEW, code_rows_product, decode_rows, fits
from pyops.quantized.formats import FP8, Int4, Int8, IntN, decode, encode, pack_nibbles
from tests.tolerance import assert_close_to_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, inputs, outputs, format: one register and a rest, groups within a block of 128 and of
# several, outputs that four do not divide, as many rows as are few.
CASES = (
    (1, 1, 1, Int8()),
    (1, 37, 5, Int8()),
    (5, 96, 7, IntN(8, group=32)),
    (4, 64, 9, Int8(symmetric=False)),
    (1, 7, 3, Int4(group=None)),
    (5, 136, 6, Int4(group=8)),
    (1, 640, 4, Int4(group=128)),
    (5, 384, 9, Int4(group=128)),
    (3, 200, 6, Int8()),
    (2, 300, 7, Int4(group=None)),
    (2, 768, 5, Int4(group=256)),
    (6, 192, 8, Int4(group=64, symmetric=False)),
    (FEW, 320, 4, Int4(group=32)),
    (1, 130, 2, Int4(group=None, symmetric=False)),
    (1, 50, 6, FP8()),
    (5, 37, 3, FP8()),
)


def operands(n: int, width: int, out: int, format: Any, device: torch.device) -> dict[str, Any]:
    """What the op takes, and the weight as numbers."""
    codes = encode(torch.randn(out, width), format)
    scales = codes.scales if format.group else codes.scales[:, None]
    zeros = codes.zero_points
    if zeros is not None:
        zeros = (zeros if format.group else zeros[:, None]).to(device)
    kept = pack_nibbles(codes.codes) if isinstance(format, Int4) else codes.codes
    return {
        "args": (kept.to(device), scales.to(device), zeros, torch.randn(out, device=device)),
        "bits": 4 if isinstance(format, Int4) else 8,
        "weight": decode(codes).to(device),
        "x": torch.randn(n, width, device=device),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: tuple[Any, ...], device: torch.device, isa: str):
    given = operands(*case, device)
    codes, scales, zeros, bias = given["args"]
    for dtype in (F32, BF16, F16):
        x = given["x"].to(dtype)
        y = code_rows_product(x, codes, scales, zeros, bias, bits=given["bits"])
        exact = x.double() @ given["weight"].double().t() + bias.double()
        plain = (x.float() @ given["weight"].t() + bias).to(dtype)
        # What sixteen sums side by side may round beside torch's order
        size = (x.double().abs() @ given["weight"].double().abs().t() + bias.abs()).max()
        tiny = torch.finfo(dtype).eps * exact.abs() + 2**-22 * size
        assert y.dtype == dtype
        assert_close_to_reference(y, plain, exact, tiny=tiny)
        assert y.abs().max() > 0
        without = code_rows_product(x, codes, scales, zeros, bits=given["bits"])
        torch.testing.assert_close(without + bias.to(dtype), y, rtol=2e-2, atol=2e-2)


@pytest.mark.cpu_only
def test_the_same_bits_at_every_instruction_set_and_number_of_threads():
    threads = torch.get_num_threads()
    for case in (
        (1, 640, 67, Int8()),
        (3, 650, 19, Int8(symmetric=False)),
        (3, 640, 67, Int4(group=128)),
        (3, 651, 19, Int4(group=None)),
        (6, 640, 67, Int4(group=64, symmetric=False)),
        (6, 650, 19, FP8()),
    ):
        given, found = operands(*case, torch.device("cpu")), []
        for isa in library.isas():
            with library.use_isa(isa):
                for n in (1, 3):
                    torch.set_num_threads(n)
                    found.append(code_rows_product(given["x"], *given["args"], bits=given["bits"]))
        torch.set_num_threads(threads)
        assert all(torch.equal(found[0], other) for other in found)
        # A row's bits don't depend on those beside it
        last = code_rows_product(given["x"][-1:], *given["args"], bits=given["bits"])
        assert torch.equal(last, found[0][-1:])


WHOLE = (Int8(), Int8(symmetric=False), Int4(group=None), Int4(group=128))


@pytest.mark.cpu_only
@pytest.mark.parametrize("format", WHOLE, ids=str)
def test_a_number_is_off_by_a_part_of_the_largest_of_its_row(format: Any, isa: str):
    """x is rounded to whole numbers of 24 bits for such codes; each row by its own largest."""
    given = operands(4, 256, 9, format, torch.device("cpu"))
    codes, scales, zeros, _ = given["args"]
    x = given["x"] * torch.tensor([1.0, 1e30, 1e-30, 0.0])[:, None]
    x[:3, 7] *= 3e4
    y = code_rows_product(x, codes, scales, zeros, bits=given["bits"]).double()
    weight = given["weight"].double()
    exact = x.double() @ weight.t()
    largest = x.double().abs().amax(1, keepdim=True)
    allowed = 2**-23 * largest * weight.abs().sum(1) + 2**-22 * exact.abs()
    assert ((y - exact).abs() <= allowed).all()
    assert (y[3] == 0).all()
    rest = x.clone()
    rest[:, 7] = 0.0
    kept = code_rows_product(rest, codes, scales, zeros, bits=given["bits"])
    assert (kept[:3] != y[:3]).all()


@pytest.mark.cpu_only
@pytest.mark.parametrize("format", WHOLE, ids=str)
def test_whole_numbers_have_exact_sums(format: Any, isa: str):
    """Where x and the scales are exact in the row's unit, y is what float64 gives, rounded."""
    given = operands(3, 256, 5, format, torch.device("cpu"))
    codes, scales, zeros, _ = given["args"]
    scales = torch.full_like(scales, 0.25)
    zeros = None if zeros is None else torch.full_like(zeros, 3)
    x = torch.randint(-900, 900, (3, 256)).float()
    x[:, 0] = 8355584 / 2**10  # the unit is a power of two
    given_bits = {"bits": given["bits"]}
    weight = decode_rows(codes, scales, zeros, width=256, **given_bits).double()
    y = code_rows_product(x, codes, scales, zeros, **given_bits)
    exact = (x.double() @ weight.t()).float()
    assert torch.equal(y, exact)


@pytest.mark.cpu_only
@pytest.mark.parametrize("format", WHOLE, ids=str)
def test_a_row_that_is_not_finite_is_nan(format: Any, isa: str):
    given = operands(5, 256, 6, format, torch.device("cpu"))
    codes, scales, zeros, bias = given["args"]
    expected = code_rows_product(given["x"], *given["args"], bits=given["bits"])
    x = given["x"].clone()
    x[1, 255], x[2, 0] = torch.inf, torch.nan
    y = code_rows_product(x, codes, scales, zeros, bias, bits=given["bits"])
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3, 4]], expected[[0, 3, 4]])


def test_nibbles_by_hand(device: torch.device, isa: str):
    """Each input meets its own code: x is one at a single place."""
    codes = torch.arange(-7, 8, dtype=torch.int8).repeat(9)[:130].view(1, -1)
    scales = torch.tensor([[0.5]], device=device)
    packed = pack_nibbles(codes).to(device)
    eye = torch.eye(130, device=device)
    found: Tensor = torch.cat([code_rows_product(x[None], packed, scales, bits=4) for x in eye])
    assert torch.equal(found.flatten().cpu(), 0.5 * codes.flatten().float())


def test_every_code_of_fp8(device: torch.device, isa: str):
    """Each meets x that is one at a single place; the two beyond the largest number are nan."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1).to(device)
    scales = torch.tensor([[0.5]], device=device)
    expected = 0.5 * codes.float()
    assert expected[0].isnan().sum() == 2
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(decode_rows(codes, scales, width=256), expected, **same)
    eye = torch.eye(256, device=device)
    for k in range(0, 256, 16):  # as many rows as are few
        found = code_rows_product(eye[k : k + 16, k : k + 16], codes[:, k : k + 16], scales)
        wanted = expected[0, k : k + 16].clone()
        if wanted.isnan().any():
            wanted[:] = torch.nan
        torch.testing.assert_close(found[:, 0], wanted, **same)


@pytest.mark.parametrize("case", [*CASES, (1, 30, 3, IntN(4, group=6))], ids=str)
def test_decoded_codes_have_the_bits_of_plain_torch(case, device: torch.device, isa: str):
    given = operands(*case, device)
    codes, scales, zeros, _ = given["args"]
    options = {"width": case[1], "bits": given["bits"]}
    assert torch.equal(decode_rows(codes, scales, zeros, **options), given["weight"])
    for dtype in (BF16, F16):
        narrow = decode_rows(codes, scales, zeros, dtype=dtype, **options)
        assert torch.equal(narrow, given["weight"].to(dtype))


def test_no_elements(device: torch.device):
    codes, scales = torch.zeros(3, 4, dtype=torch.int8), torch.ones(3, 1)
    codes, scales = codes.to(device), scales.to(device)
    assert code_rows_product(torch.zeros(0, 4, device=device), codes, scales).shape == (0, 3)
    none = code_rows_product(torch.zeros(2, 0, device=device), codes[:, :0], scales)
    assert torch.equal(none.cpu(), torch.zeros(2, 3))
    assert decode_rows(codes[:, :0], scales, width=0).shape == (3, 0)
    assert decode_rows(codes[:0], scales[:0], width=4).shape == (0, 4)


def test_what_the_kernel_takes():
    assert fits(4096, 32, 4)
    assert fits(48, 3, 8)
    assert not fits(48, 6, 8)
    assert not fits(12, 3, 4)
    assert not fits(4096, 1, 3)


X, CODES, SCALES = torch.zeros(1, 32), torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 2)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("args", "bits", "message"),
    [
        ((X.double(), CODES, SCALES), 8, "x must be float32"),
        ((X, CODES, SCALES), 3, "bits must be 4 or 8; got 3"),
        ((X, CODES[:, :31], SCALES), 8, r"codes must be torch.int8 or .*e4m3fn \[out, 32\]"),
        ((X, CODES, SCALES), 4, r"codes must be torch.uint8 \[out, 16\]"),
        ((X, CODES, torch.ones(2, 4)), 8, "equal parts of 32 inputs in multiples of 16"),
        ((X, CODES, torch.ones(2, 5)), 8, "the groups equal parts of 32 inputs"),
        ((X, CODES, SCALES, torch.zeros(2, 2)), 8, "codes must be torch.uint8"),
        ((X, CODES, SCALES, None, torch.ones(3)), 8, r"bias must be torch.float32 \[2\]"),
    ],
)
def test_what_is_refused(args, bits, message):
    with pytest.raises((ValueError, TypeError), match=message):
        code_rows_product(*args, bits=bits)
    full = (*args, *[None] * (5 - len(args)))
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        torch.ops.pyops.code_rows_product(*full, bits=bits)
