"""Eight-bit compression: the bits of its definition everywhere, errors that are exact, nothing bad
kept."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.ops.communication import quantize
from tests.ops.communication.test_onebit import F, numbers, same

SIZES = (0, 1, 7, 31, 32, 33, 257, 8 * 311 - 1, 4099)
BLOCKS = (32, 256, 4128)
FORMAT = pytest.mark.parametrize("format", quantize.FORMATS)


def empty(n: int, block: int, device: torch.device, *, shift: int = 1) -> torch.Tensor:
    size = quantize.payload_bytes(n, block=block)
    return torch.full((size + shift + 8,), 77, dtype=torch.uint8, device=device)[
        shift : shift + size
    ]


def encoded(u: torch.Tensor, block: int = 256, **options: object) -> torch.Tensor:
    payload = empty(u.numel(), block, u.device)
    quantize.quantize_encode_(payload, u, block=block, **options)  # type: ignore[arg-type]
    return payload


def decoded(payload: torch.Tensor, n: int, block: int = 256, format: str = "int8") -> torch.Tensor:
    out = torch.full((n,), -9.0, device=payload.device)
    quantize.quantize_decode_(out, payload, block=block, format=format)
    return out


def test_by_hand(device: torch.device, isa: str):
    x = torch.tensor([254.0, -254.0, 1.0, 3.0, -3.0, 0.0, 100.9], device=device)
    payload, error = (
        torch.zeros(11, dtype=torch.uint8, device=device),
        torch.zeros(7, device=device),
    )
    quantize.quantize_encode_(payload, x, error)
    assert payload[:4].clone().view(torch.float32).item() == 2.0
    assert payload[4:].view(torch.int8).tolist() == [127, -127, 0, 2, -2, 0, 50], (
        "half-way cases go to the even neighbour"
    )
    assert error.tolist() == [0.0, 0.0, 1.0, -1.0, 1.0, 0.0, (x[6] - 100).item()]
    x = torch.tensor([448.0, -0.001953125, 17.0, 0.0009765625], device=device)
    assert decoded(encoded(x, format="e4m3"), 4, format="e4m3").tolist() == [
        448.0,
        -0.001953125,
        16.0,
        0.0,
    ]
    x = torch.tensor([57344.0, -9.0, 2.0**-16, 2.0**-17], device=device)
    assert decoded(encoded(x, format="e5m2"), 4, format="e5m2").tolist() == [
        57344.0,
        -8.0,
        2.0**-16,
        0.0,
    ]
    assert not encoded(torch.zeros(3, device=device)).any()


@FORMAT
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_bits_are_those_of_the_definition(
    format: str, stochastic: bool, device: torch.device, isa: str
):
    options = {
        "format": format,
        "stochastic_rounding": stochastic,
        "seed": (1 << 63) + 12345,
        "offset": 13,
    }
    for dtype in F:
        for n in SIZES:
            for block in BLOCKS:
                bad = n > 20 and block == 256
                x, before = numbers(n, dtype, device), numbers(n, torch.float32, device, seed=2)
                if bad:
                    x[n // 3], x[-1], before[2] = torch.inf, torch.nan, -torch.inf
                results = []
                for encode, reencode in (
                    (quantize.quantize_encode_, quantize.quantize_reencode_),
                    (quantize.quantize_encode_reference, quantize.quantize_reencode_reference),
                ):
                    payload, again = empty(n, block, device), empty(n, block, device, shift=2)
                    error, server = before.clone(), before.flip(0).contiguous()
                    flags = torch.zeros(2, device=device)
                    encode(payload, x, error, flags[:1], block=block, **options)
                    rows = [
                        payload,
                        encoded(numbers(n, dtype, device, seed=3), block, format=format),
                        payload,
                    ]
                    reencode(again, rows, server, flags[1:], n=n, block=block, scale=0.3, **options)
                    results.append([payload, error, again, server, flags])
                for actual, expected in zip(*results, strict=True):
                    same(actual, expected)
                assert results[0][4].tolist() == [float(bad)] * 2


@FORMAT
def test_decoding_is_its_definition(format: str, device: torch.device, isa: str):
    for n in SIZES:
        rows = [
            encoded(numbers(n, torch.float32, device, seed=s), 96, format=format) for s in range(3)
        ]
        for dtype in F:
            before = numbers(n, dtype, device, seed=9)
            for op, reference, payloads, options in (
                (
                    quantize.quantize_decode_,
                    quantize.quantize_decode_reference,
                    rows[0],
                    {"accumulate": False},
                ),
                (
                    quantize.quantize_decode_,
                    quantize.quantize_decode_reference,
                    rows[1],
                    {"accumulate": True},
                ),
                (quantize.quantize_sum_rows_, quantize.quantize_sum_rows_reference, rows, {}),
                (quantize.quantize_sum_rows_, quantize.quantize_sum_rows_reference, rows[:1], {}),
            ):
                actual, expected = before.clone(), before.clone()
                op(actual, payloads, block=96, format=format, scale=0.7, **options)
                reference(expected, payloads, block=96, format=format, scale=0.7, **options)
                same(actual, expected)


@FORMAT
def test_every_code_decodes(format: str, device: torch.device, isa: str):
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    codes = torch.arange(256, dtype=torch.uint8).to(device)
    payload = torch.cat([torch.ones(1, device=device).view(torch.uint8), codes])
    wanted = codes.view(dtype).float()
    known = wanted.isfinite()
    assert torch.equal(decoded(payload, 256, format=format)[known], wanted[known])
    assert known.sum() >= 248


@FORMAT
def test_no_error_is_lost(format: str, device: torch.device, isa: str):
    """decoded + error' == x + error as real numbers: rounded to nearest, the difference is an fp32
    number."""
    n = 1_000_003
    x, error = numbers(n, torch.float32, device), numbers(n, torch.float32, device, seed=2)
    u = x + error
    payload = empty(n, 256, device)
    quantize.quantize_encode_(payload, x, error, format=format)
    value = decoded(payload, n, format=format).double()
    assert torch.equal(value + error.double(), u.double())
    largest = (
        torch.nn.functional.pad(u.abs(), (0, -n % 256))
        .view(-1, 256)
        .amax(1)
        .repeat_interleave(256)[:n]
        .double()
    )
    step = {
        "int8": largest / 127,
        "e4m3": torch.maximum(u.abs().double() / 8, largest / 448 / 512),
        "e5m2": torch.maximum(u.abs().double() / 4, largest / 57344 / 65536),
    }[format]
    # Half a step; ratio and scale have a rounding of 2^-24 each, by which the half-way point moves.
    assert (error.double().abs() <= step / 2 + 2.0**-23 * u.abs().double()).all()
    assert (error != 0).double().mean() > 0.5


@FORMAT
def test_the_sum_telescopes(format: str, device: torch.device, isa: str):
    n, error = 5003, torch.zeros(5003, device=device)
    given, sent, allowed = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(3))
    for step in range(50):
        x = numbers(n, torch.float32, device, seed=step)
        payload = empty(n, 64, device)
        allowed += 2.0**-24 * (x + error).abs().double()  # of x + error; nothing else is rounded
        quantize.quantize_encode_(payload, x, error, block=64, format=format)
        given += x.double()
        sent += decoded(payload, n, 64, format).double()
    assert ((sent + error.double() - given).abs() <= allowed).all()
    assert float(error.abs().max()) > 0.001


@FORMAT
def test_stochastic_rounding_is_unbiased_and_knows_its_place(
    format: str, device: torch.device, isa: str
):
    n = 1 << 17
    x = torch.full((n,), 0.3137, device=device)
    x[::256] = 1.0  # the largest of each block
    options = {"format": format, "stochastic_rounding": True, "seed": 99}
    value = decoded(encoded(x, **options), n, format=format)
    chosen = value[x != 1.0].double()
    assert len(chosen.unique()) == 2
    assert abs(float(chosen.mean() - x[1].double())) < 5 * float(chosen.std()) / n**0.5
    part = decoded(encoded(x[512:1300].clone(), **options, offset=512), 788, format=format)
    assert torch.equal(part, value[512:1300]), "a shard draws its part of the whole"
    assert not torch.equal(decoded(encoded(x, **{**options, "seed": 98}), n, format=format), value)


@FORMAT
def test_what_is_not_finite_stays_out_of_the_errors(format: str, device: torch.device, isa: str):
    n, before = 300, numbers(300, torch.float32, device, seed=2)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x, error, flag = (
            numbers(n, torch.float32, device),
            before.clone(),
            torch.zeros(1, device=device),
        )
        clean = before.clone()
        quantize.quantize_encode_(empty(n, 64, device), x, clean, flag, block=64, format=format)
        assert flag.item() == 0.0
        x[70] = bad
        payload = empty(n, 64, device)
        quantize.quantize_encode_(payload, x, error, flag, block=64, format=format)
        assert flag.item() == 1.0
        assert torch.equal(error[64:128], before[64:128])
        assert torch.equal(error[:64], clean[:64])
        assert torch.equal(error[128:], clean[128:])
        result = decoded(payload, n, 64, format)
        assert result[64:128].isnan().all()
        assert result.isnan().sum() == 64
        server = torch.zeros(n, device=device)
        quantize.quantize_reencode_(
            empty(n, 64, device), [payload] * 2, server, flag, n=n, block=64, format=format
        )
        assert server.isfinite().all()


def test_the_smallest_numbers(device: torch.device, isa: str):
    """Where the scale is subnormal or zero, what can't be sent stays in the error."""
    for size in (1e-44, 3e-42, 1e-38):
        for format in quantize.FORMATS:
            x, error = (
                size * torch.linspace(-1, 1, 65, device=device),
                torch.zeros(65, device=device),
            )
            payload = empty(65, 256, device)
            quantize.quantize_encode_(payload, x, error, format=format)
            value = decoded(payload, 65, format=format)
            assert torch.equal(value.double() + error.double(), x.double())
            assert value.abs().max() <= 1.5 * size


@pytest.mark.cpu_only
def test_threads_change_no_bit(isa: str):
    n, before = 300_007, torch.get_num_threads()
    x, start = (
        numbers(n, torch.float32, torch.device("cpu")),
        numbers(n, torch.float32, torch.device("cpu"), seed=2),
    )
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            payload, error, out = empty(n, 256, x.device), start.clone(), start.clone()
            quantize.quantize_encode_(payload, x, error, stochastic_rounding=True, seed=4)
            quantize.quantize_decode_(out, payload, accumulate=True)
            results.append([payload.clone(), error, out])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_refusals(device: torch.device):
    x, payload = torch.zeros(70, device=device), empty(70, 64, device)
    for text, call in (
        ("multiple of 32, got 100", lambda: quantize.quantize_encode_(payload, x, block=100)),
        (
            "format must be one of int8, e4m3, e5m2, got int4",
            lambda: quantize.quantize_encode_(payload, x, block=64, format="int4"),
        ),
        (
            "must have 78 bytes for these numbers, got 74",
            lambda: quantize.quantize_encode_(payload[4:], x, block=64),
        ),
        ("uint8", lambda: quantize.quantize_decode_(x, payload.char(), block=64)),
        (
            "x must be float32, bfloat16 or float16",
            lambda: quantize.quantize_encode_(payload, x.long(), block=64),
        ),
        (
            "error must have 70 elements, got 3",
            lambda: quantize.quantize_encode_(payload, x, x[:3], block=64),
        ),
        (
            "flag must have 1 elements",
            lambda: quantize.quantize_encode_(payload, x, x, x, block=64),
        ),
        ("at least one payload", lambda: quantize.quantize_sum_rows_(x, [], block=64)),
        (
            "must have 78 bytes",
            lambda: quantize.quantize_reencode_(payload, [payload[1:]], n=70, block=64),
        ),
    ):
        with pytest.raises((RuntimeError, ValueError), match=text):
            call()
    assert (payload == 77).all()


@pytest.mark.cpu_only
@FORMAT
def test_the_definition_divides_by_tensors(format: str):
    """By a Python number, torch multiplies with its reciprocal on CUDA, so that the last bit would
    be another one there."""

    class Divisors(TorchDispatchMode):
        found: tuple[object, ...] = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
                self.found += (args[1],)
            return func(*args, **(kwargs or {}))

    with Divisors() as divisors:
        quantize.quantize_encode_reference(
            empty(64, 32, torch.device("cpu")), torch.randn(64), block=32, format=format
        )
    assert len(divisors.found) == 2
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors.found)
