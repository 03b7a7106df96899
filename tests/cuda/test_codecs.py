"""The codecs' CUDA kernels compiled for the host (tests/cuda/emulation) against plain torch, bit
for bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pyops.ops.communication import onebit, quantize
from tests.grids import cut, full
from tests.ops.communication.test_onebit import F, numbers, same

pytestmark = pytest.mark.cpu_only

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SIZES = (1, 7, 65, 8 * 311 - 1, 4229)
GRID = 3
CPU = torch.device("cpu")


class Encode(ctypes.Structure):
    """The struct of tests/cuda/emulation/encode.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "block")),
        *((name, ctypes.c_void_p) for name in ("error", "payload", "flag")),
        *((name, ctypes.c_int64) for name in ("rule", "stochastic", "seed", "offset")),
        ("x", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@pytest.fixture
def kernels(emulated: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return emulated("codecs")


def place(values: torch.Tensor, shift: int) -> torch.Tensor:
    """The values `shift` elements into a buffer that is in line, with room behind."""
    buffer = torch.full((values.numel() + shift + 16,), 77, dtype=values.dtype)
    view = buffer[shift : shift + values.numel()]
    view.copy_(values)
    return view


def untouched(view: torch.Tensor) -> bool:
    whole = view.as_strided((view.storage_offset() + view.numel() + 16,), (1,), 0)
    return bool((whole[: view.storage_offset()] == 77).all() and (whole[-16:] == 77).all())


def pointer(t: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr() if t is not None else None)


def addresses(rows: Sequence[torch.Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(rows))(*[row.data_ptr() for row in rows])


def encode(
    kernels: ctypes.CDLL,
    stem: str,
    payload: torch.Tensor,
    x: torch.Tensor | Sequence[torch.Tensor],
    error: torch.Tensor | None,
    flag: torch.Tensor | None,
    *,
    n: int,
    block: int,
    rule: int,
    scale: float = 1.0,
    random: tuple[int, int] | None = None,
) -> None:
    rows = addresses([] if isinstance(x, torch.Tensor) else x)
    seed, offset = random or (0, 0)
    told = Encode(
        n,
        block,
        pointer(error),
        pointer(payload),
        pointer(flag),
        rule,
        random is not None,
        seed,
        offset,
        pointer(x if isinstance(x, torch.Tensor) else None),
        CODES[x.dtype] if isinstance(x, torch.Tensor) else 0,
        ctypes.cast(rows, ctypes.c_void_p),
        len(rows),
        scale,
    )
    getattr(kernels, f"emulated_{stem}_encode")(
        GRID, ctypes.byref(told), ctypes.c_int64(4 * -(-n // block))
    )


def bytes_of(stem: str, n: int, block: int) -> int:
    return (
        onebit.payload_bytes(n, block=block)
        if stem == "onebit"
        else quantize.payload_bytes(n, block=block)
    )


def results(
    kernels: ctypes.CDLL | None,
    stem: str,
    dtype: torch.dtype,
    n: int,
    block: int,
    rule: int,
    shift: int,
    bad: bool,
    random: tuple[int, int] | None = None,
) -> list[torch.Tensor]:
    """Encode, and the server's step over three rows: by the kernels, or by the reference when there
    are none."""
    module = onebit if stem == "onebit" else quantize
    name = {"rule": onebit.RULES[rule]} if stem == "onebit" else {"format": quantize.FORMATS[rule]}
    rounding = (
        {"stochastic_rounding": True, "seed": random[0], "offset": random[1]} if random else {}
    )
    x = place(numbers(n, dtype, CPU), shift)
    errors = [place(numbers(n, torch.float32, CPU, seed=s), shift) for s in (2, 3)]
    payloads = [
        place(torch.full((bytes_of(stem, n, block),), 9, dtype=torch.uint8), shift)
        for _ in range(3)
    ]
    if bad:
        x[n // 3], x[-1], errors[0][2] = torch.inf, torch.nan, -torch.inf
    getattr(module, f"{stem}_encode_reference")(
        payloads[1], place(numbers(n, dtype, CPU, seed=5), 0), block=block, **name
    )
    rows, flags = [payloads[0], payloads[1], payloads[0]], [torch.zeros(1), torch.zeros(1)]
    if kernels is None:
        getattr(module, f"{stem}_encode_reference")(
            payloads[0], x, errors[0], flags[0], block=block, **name, **rounding
        )
        options = {**name, **rounding, "n": n, "block": block, "scale": 0.3}
        getattr(module, f"{stem}_reencode_reference")(
            payloads[2], rows, errors[1], flags[1], **options
        )
    else:
        encode(
            kernels,
            stem,
            payloads[0],
            x,
            errors[0],
            flags[0],
            n=n,
            block=block,
            rule=rule,
            random=random,
        )
        encode(
            kernels,
            stem,
            payloads[2],
            rows,
            errors[1],
            flags[1],
            n=n,
            block=block,
            rule=rule,
            scale=0.3,
            random=random,
        )
    assert all(untouched(t) for t in (*payloads, *errors))
    return [*payloads, *errors, *flags]


def dealt(sizes: Sequence[int], blocks: Sequence[tuple[int, int]], part: int) -> Any:
    """(size, block, shift): of a chessboard of sizes and blocks the fields of one colour. The last
    size meets the last block in part 0: alone it has more than one of these."""
    for i, n in enumerate(reversed(sizes)):
        for j, (block, shift) in enumerate(reversed(blocks)):
            if (i + j) % 2 == part:
                yield n, block, shift


PARTS = [0, full(1)]


# Each dtype and each rule: how a number is read does not depend on what is summed of it.
ENCODED = tuple(zip(F, (0, 1, 0), strict=True))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("dtype", "rule"), cut(itertools.product(F, (0, 1)), keep=ENCODED), ids=str
)
def test_onebit_encode(kernels, dtype, rule, part):
    blocks = ((64, 0), (192, 1), (2048, 0), (2048, 3), (4160, 0))
    for n, block, shift in dealt(SIZES, blocks, part):
        for bad in {False, n > 20}:
            pair = [
                results(k, "onebit", dtype, n, block, rule, shift, bad) for k in (kernels, None)
            ]
            for actual, expected in zip(*pair, strict=True):
                same(actual, expected)
            assert pair[0][-1].item() == bad


# Each format and each way of rounding, and the two kinds of formats rounded both ways.
NEAREST, STOCHASTIC, IN_LINE = None, (-12345, 13), (7, 4)
ROUNDED = ((0, NEAREST), (0, STOCHASTIC), (1, NEAREST), (1, IN_LINE), (2, STOCHASTIC))


@pytest.mark.parametrize(
    ("format", "random"),
    cut(itertools.product((0, 1, 2), (NEAREST, STOCHASTIC, IN_LINE)), keep=ROUNDED),
    ids=str,
)
@pytest.mark.parametrize("part", PARTS)
def test_quantize_encode(kernels, format, random, part):
    for dtype in F:
        for n, block, shift in dealt(SIZES[1:], ((32, 0), (256, 1), (256, 0), (1056, 3)), part):
            bad = n > 20 and block == 256
            pair = [
                results(k, "quantize", dtype, n, block, format, shift, bad, random)
                for k in (kernels, None)
            ]
            for actual, expected in zip(*pair, strict=True):
                same(actual, expected)
            assert pair[0][-1].item() == bad


# Each dtype in line and out of line, and each shift.
DECODED = ((F[0], 0), (F[0], 1), (F[1], 0), (F[1], 2), (F[2], 0), (F[2], 4))


@pytest.mark.parametrize(
    ("dtype", "shift"), cut(itertools.product(F, (0, 1, 2, 4)), keep=DECODED), ids=str
)
def test_decoding(kernels, dtype, shift):
    for n in SIZES:
        rows = [
            place(torch.randint(0, 120, (bytes_of("onebit", n, 192),), dtype=torch.uint8), shift)
            for _ in range(3)
        ]
        codes = [
            place(torch.randint(0, 120, (bytes_of("quantize", n, 192),), dtype=torch.uint8), shift)
            for _ in range(3)
        ]
        scales, blocks = torch.tensor([0.3, -1.7, 0.4]), -(-n // 192)
        for row in (*rows, *codes):
            row[: 4 * blocks] = torch.randn(blocks).view(torch.uint8)
        for accumulate in (False, True):
            for count in (1, 3) if not accumulate else (1,):
                for own in (True, False):
                    out = place(numbers(n, dtype, CPU, seed=9), shift)
                    expected, given = out.clone(), None if own else scales[:count].contiguous()
                    bits = (
                        rows[:count] if own else [row[4 * blocks :].clone() for row in rows[:count]]
                    )
                    kernels.emulated_onebit_decode(
                        GRID,
                        pointer(out),
                        CODES[dtype],
                        addresses(bits),
                        count,
                        ctypes.c_int64(4 * blocks if own else 0),
                        pointer(given),
                        ctypes.c_float(0.7),
                        ctypes.c_int64(n),
                        ctypes.c_int64(192),
                        accumulate,
                    )
                    if count == 1:
                        onebit.onebit_decode_reference(
                            expected, bits[0], given, block=192, scale=0.7, accumulate=accumulate
                        )
                    else:
                        onebit.onebit_sum_rows_reference(
                            expected, bits, given, block=192, scale=0.7
                        )
                    same(out, expected)
                    assert untouched(out)
                for format, name in enumerate(quantize.FORMATS):
                    out = place(numbers(n, dtype, CPU, seed=9), shift)
                    expected = out.clone()
                    kernels.emulated_quantize_decode(
                        GRID,
                        pointer(out),
                        CODES[dtype],
                        addresses(codes[:count]),
                        count,
                        ctypes.c_int64(4 * blocks),
                        ctypes.c_float(0.7),
                        ctypes.c_int64(n),
                        ctypes.c_int64(192),
                        format,
                        accumulate,
                    )
                    if count == 1:
                        quantize.quantize_decode_reference(
                            expected,
                            codes[0],
                            block=192,
                            format=name,
                            scale=0.7,
                            accumulate=accumulate,
                        )
                    else:
                        quantize.quantize_sum_rows_reference(
                            expected, codes, block=192, format=name, scale=0.7
                        )
                    same(out, expected)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, full(torch.float16), full(torch.float32)], ids=str
)
def test_one_scale_for_a_whole_tensor(kernels, dtype):
    for n in SIZES:
        for scale in (0.8, torch.nan):
            given = torch.tensor([scale])
            x, error = (
                place(numbers(n, dtype, CPU), 1),
                place(numbers(n, torch.float32, CPU, seed=2), 1),
            )
            x[n // 2] = torch.inf
            bits = place(torch.zeros((n + 7) // 8, dtype=torch.uint8), 3)
            expected, wanted = bits.clone(), error.clone()
            told = Encode(
                n,
                512,
                pointer(error),
                pointer(bits),
                None,
                0,
                0,
                0,
                0,
                pointer(x),
                CODES[dtype],
                None,
                0,
                1.0,
            )
            total = torch.zeros(3, dtype=torch.float64)
            kernels.emulated_onebit_norm(GRID, ctypes.byref(told), pointer(total))
            assert torch.equal(total, onebit.onebit_norm_reference(x, error)), (
                "inf, inf and how many"
            )
            kernels.emulated_onebit_scaled(GRID, ctypes.byref(told), pointer(given))
            onebit.onebit_encode_scaled_reference(expected, x, wanted, given)
            same(bits, expected)
            same(error, wanted)
            assert untouched(bits)
            assert untouched(error)
            x[n // 2] = 2.0
            kernels.emulated_onebit_norm(GRID, ctypes.byref(told), pointer(total))
            torch.testing.assert_close(
                total, onebit.onebit_norm_reference(x, error), rtol=1e-13, atol=0
            )


def test_the_reciprocal_gives_the_bits_of_the_division(kernels):
    """Also of quotients as near to the middle between two numbers as there are any: for an odd
    mantissa b of a scale, a 2^s = (b m + 1) / 2 or (b m - 1) / 2, with m odd."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        b = int(torch.randint(1 << 22, 1 << 23, (1,), generator=generator)) * 2 + 1
        exponent = int(torch.randint(-90, 45, (1,), generator=generator))
        values = [0.0, -0.0, 1e-44, -1e-38]
        for s in (23, 24):
            inverse = pow(b, -1, 1 << (s + 1))
            for sign in (1, -1):
                m = sign * -inverse % (1 << (s + 1))  # b m = -sign modulo 2^(s + 1)
                m += (1 << (s + 1)) if m < 1 << 24 else 0
                a = (b * m + sign) >> (s + 1)
                if a < 1 << 24 and m < 1 << 25:
                    values += [
                        y * a * 2.0 ** (exponent + shift) for y in (1, -1) for shift in (0, 3, -9)
                    ]
        scale = torch.tensor(b * 2.0**exponent)
        assert float(scale) == b * 2.0**exponent
        u = torch.cat([torch.tensor(values), torch.randn(64, generator=generator) * scale * 40])
        got = torch.empty_like(u)
        exact = kernels.emulated_quotients(
            pointer(got), pointer(u), ctypes.c_float(float(scale)), ctypes.c_int64(u.numel())
        )
        assert exact == (2.0**-60 < float(scale) < 2.0**60)
        if exact:
            normal = (u == 0) | (u.abs() > 2.0**-101)
            assert torch.equal(
                (got[normal]).view(torch.int32), (u / scale)[normal].view(torch.int32)
            )
            assert (got[~normal].abs() < 2.0**-41).all()


@pytest.mark.full  # seconds
def test_every_quotient_near_the_middle_between_two_numbers(kernels):
    """The proof that the reciprocal gives the bits of the division: see Reciprocal."""
    cases = ctypes.c_int64()
    assert kernels.emulated_nearest_quotients(ctypes.byref(cases)) == 0
    assert cases.value == 17_444_290


@pytest.mark.parametrize("stem", ["onebit", "quantize"])
@pytest.mark.parametrize("largest", [1e-30, 1e-44, 3e38], ids=str)
def test_scales_beyond_the_reciprocal(kernels, stem, largest):
    """Blocks whose scale is so small, or so large, that they are divided by it."""
    module, n, block = (onebit if stem == "onebit" else quantize), 2048, 256
    name = {"rule": "l1"} if stem == "onebit" else {"format": "e4m3"}
    x = numbers(n, torch.float32, CPU)
    x = (x / x.abs().max()) * largest
    got, expected = (torch.zeros(bytes_of(stem, n, block), dtype=torch.uint8) for _ in range(2))
    getattr(module, f"{stem}_encode_reference")(expected, x, None, None, block=block, **name)
    encode(kernels, stem, got, x, None, None, n=n, block=block, rule=0 if stem == "onebit" else 1)
    same(got, expected)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("stem", ["onebit", "quantize"])
def test_the_servers_step_over_any_number_of_rows(kernels, stem, count):
    """Four rows at a time, and what is left; whole groups of lines, and what is left."""
    module, block = (onebit, 2048) if stem == "onebit" else (quantize, 256)
    name = {"rule": "rms"} if stem == "onebit" else {"format": "e5m2"}
    n, rows = 3 * block + 72, []
    for seed in range(count):
        rows.append(torch.zeros(bytes_of(stem, n, block), dtype=torch.uint8))
        getattr(module, f"{stem}_encode_reference")(
            rows[-1], numbers(n, torch.float32, CPU, seed=seed), None, None, block=block, **name
        )
    for errors in (False, True):
        before = numbers(n, torch.float32, CPU, seed=99) if errors else None
        got, expected = (torch.zeros_like(rows[0]) for _ in range(2))
        error, wanted = (None if before is None else before.clone() for _ in range(2))
        getattr(module, f"{stem}_reencode_reference")(
            expected, rows, wanted, None, n=n, block=block, scale=0.3, **name
        )
        rule = 1 if stem == "onebit" else 2
        encode(kernels, stem, got, rows, error, None, n=n, block=block, rule=rule, scale=0.3)
        same(got, expected)
        if before is not None:
            same(error, wanted)


def test_operands_of_two_devices_are_refused(emulated):
    """With a tensor that says of itself where it is, in the place of torch's."""
    error_of = emulated("codec_devices").error_of
    error_of.restype = ctypes.c_char_p
    one_encoded, rows_encoded = -1, 0
    for rows in (one_encoded, rows_encoded):
        assert error_of(0, 0, 0, 0, rows) is None
        for operands, name in (
            ((0, 1, 0, 0), "a payload"),
            ((0, 0, 1, 0), "error"),
            ((0, 0, 0, 1), "flag"),
            ((0, 0, -1, 0), "error"),
        ):
            text = error_of(*operands, rows)
            assert text is not None
            assert f"{name} is on another device" in text.decode(), operands
    assert error_of(1, 1, 1, 1, one_encoded) is None
    assert "a payload is on another device" in error_of(0, 0, 0, 0, 1).decode()
