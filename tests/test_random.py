"""pyops.random: known answers, slices of the whole, the same bits from kernel and plain torch, and
the right distributions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pyops import random
from pyops.ops import random as ops
from pyops.random import RandomStates
from tests.ops.conftest import isa  # noqa: F401 - a fixture, found by name

WHOLE = (5, 4, 6, 3)
SLICES = [
    ((0, 0, 0, 0), WHOLE),
    ((1, 1, 2, 0), (2, 3, 4, 3)),
    ((1, 1, 2, 1), (2, 3, 4, 2)),
    ((0, 2, 0, 0), (5, 1, 6, 3)),
    ((4, 0, 5, 2), (1, 4, 1, 1)),
    ((0, 0, 0, 1), (5, 4, 6, 1)),
    ((2, 3, 5, 2), (1, 1, 1, 1)),
    ((0, 0, 3, 0), (5, 4, 0, 3)),
]


@pytest.mark.parametrize(
    ("counter", "high", "key", "words"),
    [
        (0, (0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (-1, (0xFFFFFFFF, 0xFFFFFFFF), -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x85A308D3243F6A88 - (1 << 64),
            (0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter: int, high: tuple[int, int], key: int, words: str):
    """The vectors kat_vectors of Salmon et al.'s Random123 for philox4x32-10."""
    out = ops.philox_words(torch.tensor(counter), key=ops.signed64(key), high=high)
    assert " ".join(f"{w:08x}" for w in out.tolist()) == words


def draws(
    place: dict[str, int], n: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(kernel, reference) for each kind of number."""
    pairs = []
    for op, reference, dtype, more in (
        (ops.philox_uniform_, ops.philox_uniform_reference, torch.float32, {}),
        (ops.philox_normal_, ops.philox_normal_reference, torch.float32, {}),
        (ops.philox_dropout_mask_, ops.philox_dropout_mask_reference, torch.bool, {"p": 0.3}),
    ):
        a, b = (torch.zeros(n, dtype=dtype, device=device) for _ in range(2))
        op(a, **more, **place)  # type: ignore[operator]
        reference(b, **more, **place)  # type: ignore[operator]
        pairs.append((a, b))
    return pairs


@pytest.mark.parametrize("key", [0, -1, 0x0123456789ABCDEF])
def test_kernel_is_the_reference_bit_for_bit(key: int, device: torch.device, isa: str):  # noqa: F811
    for n, offset, (row, stride) in itertools.product(
        (0, 1, 5, 300, 33001), (0, 3, (1 << 34) - 7), ((33001, 33001), (7, 10), (1, 3), (260, 1000))
    ):
        if n < 1000 or (row > 1000 and offset > 3):
            for kernel, reference in draws(
                {"key": key, "offset": offset, "row": row, "row_stride": stride}, n, device
            ):
                assert torch.equal(kernel, reference)


def test_kernel_on_the_cpu_is_the_kernel_here(device: torch.device):
    for draw in (random.uniform, random.normal):
        here, cpu = draw(5, "x", (1000,), device=device), draw(5, "x", (1000,), device="cpu")
        assert torch.equal(here.cpu(), cpu)


@pytest.mark.parametrize(("offset", "shape"), SLICES)
def test_slice_of_the_whole_is_the_whole_sliced(
    offset: tuple[int, ...], shape: tuple[int, ...], device: torch.device
):
    cut = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    place = {"offset": offset, "global_shape": WHOLE, "device": device}
    assert torch.equal(
        random.uniform(3, "w", shape, **place), random.uniform(3, "w", WHOLE, device=device)[cut]
    )
    assert torch.equal(
        random.normal(3, "w", shape, std=0.5, **place),
        random.normal(3, "w", WHOLE, std=0.5, device=device)[cut],
    )
    assert torch.equal(
        random.dropout_mask(3, "w", shape, p=0.4, **place),
        random.dropout_mask(3, "w", WHOLE, p=0.4, device=device)[cut],
    )


def test_flat_offset(device: torch.device):
    whole = random.uniform(3, "w", (50,), device=device)
    assert torch.equal(random.uniform(3, "w", (7,), offset=11, device=device), whole[11:18])
    assert torch.equal(random.uniform(3, "w", (10, 5), device=device).flatten(), whole)


def test_seed_and_name_make_different_streams(device: torch.device):
    streams = [
        random.uniform(seed, name, (64,), device=device)
        for seed, name in ((1, "a"), (2, "a"), (1, "b"), (12, ""), (1, "2/"))
    ]
    for a, b in itertools.combinations(streams, 2):
        assert (a == b).sum() == 0
    assert torch.equal(streams[0], random.uniform(1, "a", (64,), device=device))


def kolmogorov_smirnov(x: torch.Tensor, cdf: torch.Tensor) -> float:
    """sqrt(n) times the largest distance between the empirical distribution and `cdf` at the sorted
    x."""
    n = x.numel()
    upper = torch.arange(1, n + 1, dtype=torch.float64) / n
    return max((upper - cdf).max().item(), (cdf - upper + 1 / n).max().item()) * n**0.5


def test_distributions(device: torch.device):
    """Each bound is passed by a right generator with probability above 0.9999; the seed is
    fixed."""
    n = 1 << 18
    u = random.uniform(0, "u", (n,), device=device).double().cpu().sort().values
    assert 0.0 <= u[0].item() < u[-1].item() < 1.0
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12) ** 0.5 / n**0.5
    assert kolmogorov_smirnov(u, u) < 2.2
    z = random.normal(0, "z", (n,), device=device).double().cpu()
    assert abs(z.mean().item()) < 4 / n**0.5
    assert abs(z.var().item() - 1) < 4 * 2**0.5 / n**0.5
    pairs = z.view(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean().item()) < 4 / (n / 2) ** 0.5
    z = z.sort().values
    assert kolmogorov_smirnov(z, 0.5 * (1 + torch.erf(z / 2**0.5))) < 2.2
    assert 4.0 < z[-1].item() < math.sqrt(62 * math.log(2)) + 1e-5
    for p in (0.0, 0.1, 0.9, 1.0):
        kept = random.dropout_mask(0, "d", (n,), p=p, device=device).double().mean().item()
        assert abs(kept - (1 - p)) <= 4 * (p * (1 - p) / n) ** 0.5


def test_dtype_is_cast_at_the_end(device: torch.device):
    x = random.normal(1, "n", (33,), std=0.02, device=device)
    assert torch.equal(
        random.normal(1, "n", (33,), std=0.02, dtype=torch.bfloat16, device=device), x.bfloat16()
    )


def test_refusals(device: torch.device):
    with pytest.raises(ValueError, match="p must be a probability"):
        random.dropout_mask(0, "x", (3,), p=1.5, device=device)
    with pytest.raises(ValueError, match="std must be"):
        random.normal(0, "x", (3,), std=-1.0, device=device)
    with pytest.raises(ValueError, match="reaches outside global_shape"):
        random.uniform(0, "x", (3, 3), offset=(0, 4), global_shape=(3, 6), device=device)
    with pytest.raises(ValueError, match="needs global_shape"):
        random.uniform(0, "x", (3, 3), offset=(0, 4), device=device)
    with pytest.raises(ValueError, match="reach outside a whole of 10"):
        random.uniform(0, "x", (3,), offset=8, global_shape=(10,), device=device)
    with pytest.raises(ValueError, match="an offset for each dimension"):
        random.uniform(0, "x", (3, 2), global_shape=(3, 6), device=device)
    with pytest.raises((RuntimeError, ValueError), match="row >= 1"):
        ops.philox_uniform_(torch.zeros(3, device=device), key=0, offset=0, row=0, row_stride=3)


def test_random_states_begin_again():
    states = RandomStates()
    first = torch.rand(3)
    with states.restored():
        assert torch.equal(torch.rand(3), first)
    second = torch.rand(3)
    states.restore()
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), second)
