"""One-bit compression: the bits of its definition everywhere, nothing lost but one rounding,
nothing bad kept."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.communication import onebit

F = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 64, 65, 128, 8 * 311 - 1, 4099)
BLOCKS = (
    64,
    192,
    2048,
    4160,
)  # half a line of sums, lines in part, the default, more than a kernel holds


def numbers(n: int, dtype: torch.dtype, device: torch.device, *, seed: int = 1) -> torch.Tensor:
    """Numbers of many sizes; zeros of both signs and subnormals among them."""
    torch.manual_seed(seed)
    x = (torch.randn(n) * torch.exp2(torch.randint(-6, 7, (n,)))).to(dtype)
    if n > 20:
        x[3], x[n // 2], x[11] = 0.0, -0.0, torch.finfo(dtype).tiny / 4
    return x.to(device)


def empty(n: int, block: int | None, device: torch.device, *, shift: int = 1) -> torch.Tensor:
    """A payload `shift` bytes into a buffer with room behind it."""
    size = onebit.payload_bytes(n, block=block)
    return torch.full((size + shift + 8,), 77, dtype=torch.uint8, device=device)[
        shift : shift + size
    ]


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = (t.clone().nan_to_num(nan=3.25) for t in (actual, expected))
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def encoded(u: torch.Tensor, block: int = 64, rule: str = "l1") -> torch.Tensor:
    payload = empty(u.numel(), block, u.device)
    onebit.onebit_encode_(payload, u, block=block, rule=rule)
    return payload


def decoded(payload: torch.Tensor, n: int, block: int = 64) -> torch.Tensor:
    out = torch.full((n,), -9.0, device=payload.device)
    onebit.onebit_decode_(out, payload, block=block)
    return out


def test_by_hand(device: torch.device, isa: str):
    x = torch.tensor([1.0, -3.0, 0.0, -0.0, -1.0], device=device)
    payload, error = torch.zeros(5, dtype=torch.uint8, device=device), torch.zeros(5, device=device)
    onebit.onebit_encode_(payload, x, error)
    assert payload[:4].clone().view(torch.float32).item() == 1.0, "the mean of five magnitudes"
    assert payload[4].item() == 0b01101, "1 where >= 0, lowest bit first, nothing beyond"
    assert error.tolist() == [0.0, -2.0, -1.0, -1.0, 0.0]
    onebit.onebit_encode_(payload, x, rule="rms")
    assert payload[:4].clone().view(torch.float32).item() == torch.tensor((11 / 5) ** 0.5).item()
    assert decoded(payload, 5, 2048).sign().tolist() == [1.0, -1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("rule", onebit.RULES)
@pytest.mark.parametrize("dtype", F, ids=str)
def test_bits_are_those_of_the_definition(
    dtype: torch.dtype, rule: str, device: torch.device, isa: str
):
    for n in SIZES:
        for block in BLOCKS:
            for bad in (False, True):
                x, before = numbers(n, dtype, device), numbers(n, torch.float32, device, seed=2)
                if bad and n > 20:
                    x[n // 3], x[-1], before[2] = torch.inf, torch.nan, -torch.inf
                results = []
                for encode, reencode in (
                    (onebit.onebit_encode_, onebit.onebit_reencode_),
                    (onebit.onebit_encode_reference, onebit.onebit_reencode_reference),
                ):
                    payload, again = empty(n, block, device), empty(n, block, device, shift=2)
                    error, server = before.clone(), before.flip(0).contiguous()
                    flags = torch.zeros(2, device=device)
                    encode(payload, x, error, flags[:1], block=block, rule=rule)
                    rows = [payload, encoded(numbers(n, dtype, device, seed=3), block), payload]
                    reencode(again, rows, server, flags[1:], n=n, block=block, scale=0.3, rule=rule)
                    results.append([payload, error, again, server, flags])
                for actual, expected in zip(*results, strict=True):
                    same(actual, expected)
                assert results[0][4].tolist() == [float(bad and n > 20)] * 2


@pytest.mark.parametrize("dtype", F, ids=str)
def test_decoding_is_its_definition(dtype: torch.dtype, device: torch.device, isa: str):
    for n in SIZES:
        rows = [encoded(numbers(n, dtype, device, seed=s), 192) for s in range(3)]
        bits = [row[4 * -(-n // 192) :].clone() for row in rows]
        scales = torch.tensor([0.3, 1.7, -0.4], device=device)
        before = numbers(n, dtype, device, seed=9)
        for op, reference, payloads, given, options in (
            (
                onebit.onebit_decode_,
                onebit.onebit_decode_reference,
                rows[0],
                None,
                {"accumulate": False},
            ),
            (
                onebit.onebit_decode_,
                onebit.onebit_decode_reference,
                rows[0],
                None,
                {"accumulate": True},
            ),
            (
                onebit.onebit_decode_,
                onebit.onebit_decode_reference,
                bits[1],
                scales[1:2],
                {"accumulate": True},
            ),
            (onebit.onebit_sum_rows_, onebit.onebit_sum_rows_reference, rows, None, {}),
            (onebit.onebit_sum_rows_, onebit.onebit_sum_rows_reference, rows[:1], None, {}),
            (onebit.onebit_sum_rows_, onebit.onebit_sum_rows_reference, bits, scales, {}),
        ):
            actual, expected = before.clone(), before.clone()
            op(actual, payloads, given, block=192, scale=0.7, **options)
            reference(expected, payloads, given, block=192, scale=0.7, **options)
            same(actual, expected)


@pytest.mark.parametrize("rule", onebit.RULES)
def test_nothing_is_lost_but_one_rounding(rule: str, device: torch.device, isa: str):
    """scale * sgn + error' = x + error: error' is the fp32 number nearest to the difference, often
    the difference itself."""
    n = 1_000_003
    x, error = numbers(n, torch.float32, device), numbers(n, torch.float32, device, seed=2)
    u = (x + error).double()
    payload = empty(n, 2048, device)
    onebit.onebit_encode_(payload, x, error, rule=rule)
    s = decoded(payload, n, 2048).double()
    assert torch.equal(error, (u - s).float())
    lost = (s + error.double() - u).abs()
    assert (lost <= 2.0**-24 * error.abs().double()).all()
    near = (u.abs() >= s.abs() / 2) & (u.abs() <= 2 * s.abs())
    assert near.double().mean() > 0.1
    assert not lost[near].any()
    assert not torch.equal(error, torch.zeros_like(error))


def test_the_sum_telescopes(device: torch.device, isa: str):
    """What was sent in 50 rounds, and the error that is left, is what was given: no round's error
    is dropped or doubled."""
    n = 5003
    error = torch.zeros(n, device=device)
    given, sent, allowed = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(3))
    for step in range(50):
        x = numbers(n, torch.float32, device, seed=step)
        payload = empty(n, 256, device)
        allowed += 2.0**-24 * ((x + error).abs() + 2.0**-149).double()
        onebit.onebit_encode_(payload, x, error, block=256)
        allowed += 2.0**-24 * error.abs().double()
        given += x.double()
        sent += decoded(payload, n, 256).double()
    assert ((sent + error.double() - given).abs() <= allowed).all()
    assert float(error.abs().mean()) > 0.1


def test_the_server_step_is_sum_then_encode(device: torch.device, isa: str):
    for n in (1, 65, 8 * 311 - 1):
        rows = [encoded(numbers(n, torch.float32, device, seed=s), 128) for s in range(4)]
        one, other = (numbers(n, torch.float32, device, seed=7) for _ in range(2))
        payload, two_steps, total = (
            empty(n, 128, device),
            empty(n, 128, device),
            torch.empty(n, device=device),
        )
        onebit.onebit_reencode_(payload, rows, one, n=n, block=128, scale=0.25)
        onebit.onebit_sum_rows_(total, rows, block=128, scale=0.25)
        onebit.onebit_encode_(two_steps, total, other, block=128)
        same(payload, two_steps)
        same(one, other)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_out_of_the_errors(bad: float, device: torch.device, isa: str):
    n, before = 300, numbers(300, torch.float32, device, seed=2)
    for where in ("x", "error"):
        x, error, flag = (
            numbers(n, torch.float32, device),
            before.clone(),
            torch.zeros(1, device=device),
        )
        clean = before.clone()
        onebit.onebit_encode_(empty(n, 64, device), x, clean, flag, block=64)
        assert flag.item() == 0.0
        (x if where == "x" else error)[70] = bad
        kept = error.clone()
        payload = empty(n, 64, device)
        onebit.onebit_encode_(payload, x, error, flag, block=64)
        assert flag.item() == 1.0
        same(error[64:128], kept[64:128])
        assert torch.equal(error[:64], clean[:64])
        assert torch.equal(error[128:], clean[128:])
        result = decoded(payload, n)
        assert result[64:128].isnan().all()
        assert result.isnan().sum() == 64
        total, server = torch.empty(n, device=device), torch.zeros(n, device=device)
        onebit.onebit_sum_rows_(total, [encoded(clean), payload], block=64)
        assert torch.equal(total.isnan(), result.isnan())
        onebit.onebit_reencode_(
            empty(n, 64, device), [encoded(clean), payload], server, flag, n=n, block=64
        )
        assert server.isfinite().all()
        onebit.onebit_encode_(payload, clean, clean, flag, block=64)
        assert flag.item() == 1.0, "the flag is never cleared"


def test_a_sum_that_overflows_is_not_finite_either(device: torch.device, isa: str):
    x, error = torch.full((64,), 3e38, device=device), torch.full((64,), 1e38, device=device)
    flag = torch.zeros(1, device=device)
    onebit.onebit_encode_(empty(64, 64, device), x, error, flag, block=64)
    assert flag.item() == 1.0
    assert (error == 1e38).all()
    for rule in onebit.RULES:  # each is finite, and so is their mean, however large
        error.zero_()
        assert (decoded(encoded(x, rule=rule), 64) == 3e38).all()
        tiny = torch.full((64,), 1e-30, device=device)
        assert (decoded(encoded(tiny, rule=rule), 64) == 1e-30).all()


def test_padding_enters_no_scale(device: torch.device, isa: str):
    for n in (1, 65, 8 * 9 - 1):
        payload = encoded(torch.full((n,), -2.5, device=device))
        assert (decoded(payload, n) == -2.5).all()
        assert not payload[4 * -(-n // 64) :].any(), (
            "negative everywhere, and the bits beyond are 0"
        )
        around = payload.as_strided((payload.numel() + 9,), (1,), 0)
        assert around[0] == 77
        assert (around[-8:] == 77).all()


def test_one_scale_for_a_whole_tensor(device: torch.device, isa: str):
    for n in (0, 1, 65, 40_007):
        for dtype in F:
            x, before = numbers(n, dtype, device), numbers(n, torch.float32, device, seed=2)
            total = onebit.onebit_norm(x, before)
            torch.testing.assert_close(
                total, onebit.onebit_norm_reference(x, before), rtol=1e-13, atol=0
            )
            assert n < 2 or 0 < total[0] != total[1]
            for scale in (0.8, torch.nan):
                results = []
                for encode in (onebit.onebit_encode_scaled_, onebit.onebit_encode_scaled_reference):
                    payload, error = empty(n, None, device), before.clone()
                    encode(payload, x, error, torch.tensor([scale], device=device))
                    results.append((payload, error))
                same(results[0][0], results[1][0])
                same(results[0][1], results[1][1])
                assert torch.equal(results[0][1], before) == (n == 0 or scale != scale)
    x = torch.tensor([1.0, torch.nan, -torch.inf, torch.inf], device=device)
    assert onebit.onebit_norm(x)[2] == 3
    error = torch.full((4,), 0.5, device=device)
    onebit.onebit_encode_scaled_(empty(4, None, device), x, error, torch.ones(1, device=device))
    assert error.tolist() == [0.5, 0.5, 0.5, 0.5]


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
            payload, error, out = empty(n, 2048, x.device), start.clone(), start.clone()
            onebit.onebit_encode_(payload, x, error)
            onebit.onebit_decode_(out, payload, accumulate=True)
            results.append([payload.clone(), error, out, onebit.onebit_norm(x, start)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_refusals(device: torch.device):
    x, payload = torch.zeros(70, device=device), empty(70, 64, device)
    for text, call in (
        ("multiple of 64, got 100", lambda: onebit.onebit_encode_(payload, x, block=100)),
        (
            "rule must be one of l1, rms, got max",
            lambda: onebit.onebit_encode_(payload, x, block=64, rule="max"),
        ),
        (
            "must have 17 bytes for these numbers, got 13",
            lambda: onebit.onebit_encode_(payload[4:], x, block=64),
        ),
        ("payload must be uint8", lambda: onebit.onebit_encode_(payload.char(), x, block=64)),
        (
            "x must be float32, bfloat16 or float16",
            lambda: onebit.onebit_encode_(payload, x.double(), block=64),
        ),
        (
            "x must be float32, bfloat16 or float16",
            lambda: onebit.onebit_encode_(payload, x.long(), block=64),
        ),
        (
            "error must have 70 elements, got 3",
            lambda: onebit.onebit_encode_(payload, x, x[:3], block=64),
        ),
        ("error must be float32", lambda: onebit.onebit_encode_(payload, x, x.half(), block=64)),
        ("flag must have 1 elements", lambda: onebit.onebit_encode_(payload, x, x, x, block=64)),
        (
            "contiguous",
            lambda: onebit.onebit_encode_(payload, torch.zeros(140, device=device)[::2], block=64),
        ),
        (
            "scales must have 2 elements",
            lambda: onebit.onebit_sum_rows_(x, [payload[:9]] * 2, x[:1]),
        ),
        ("at least one payload", lambda: onebit.onebit_sum_rows_(x, [])),
        ("at least one payload", lambda: onebit.onebit_reencode_(payload, [], n=70, block=64)),
        (
            "must have 17 bytes",
            lambda: onebit.onebit_reencode_(payload, [payload[1:]], n=70, block=64),
        ),
    ):
        with pytest.raises((RuntimeError, ValueError), match=text):
            call()
    assert (payload == 77).all()
