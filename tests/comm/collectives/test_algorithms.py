"""The algorithms over virtual ranks: many sizes, dtypes and numbers of ranks; sums against float64,
bits against each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyops.comm.collectives import ring, two_shot
from pyops.comm.collectives.arithmetic import summable_view
from pyops.comm.collectives.transport import PeerError, exchange_bytes, run_staggered, run_virtual
from pyops.ops.communication.reduce import sum_rows_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 7, 63, 200, 1001)


def inputs(
    size: int, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * size + numel)
    if dtype.is_floating_point:
        rows = torch.randn(size, numel, generator=generator, dtype=torch.float64).to(dtype)
    elif dtype == torch.bool:
        rows = torch.rand(size, numel, generator=generator) > 0.7
    else:
        rows = torch.randint(0, 120, (size, numel), generator=generator).to(dtype)
    return [row.clone().to(device) for row in rows]


def reduced(
    rows: list[Tensor], name: str, *, segment: int = 50, scale: float = 1.0, offset: int = 0
) -> list[Tensor]:
    """Every rank's result of an all-reduce of `rows`."""

    def body(transport):
        x = rows[transport.rank].clone()
        options = {"offset": offset} if name == "ring" else {}
        module = ring if name == "ring" else two_shot
        module.all_reduce(x, transport=transport, segment=segment, scale=scale, **options)
        return x

    return run_virtual(len(rows), body)


def assert_rounded_once(found: Tensor, rows: list[Tensor], *, scale: float) -> None:
    """The error is that of one rounding to the dtype of a sum in fp32 (fp64 for float64)."""
    exact = torch.stack([row.double() for row in rows]).sum(0) * scale
    size = torch.stack([row.double().abs() for row in rows]).sum(0) * scale
    inner = torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    limit = exact.abs() * torch.finfo(found.dtype).eps / 2 + size * inner * len(rows)
    assert bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("name", ["ring", "two_shot"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_reduce_of_floats(device, name, size, dtype):
    for numel in SIZES:
        rows = inputs(size, numel, dtype, device)
        scale = 1.0 / size
        found = reduced(rows, name, scale=scale)
        assert all(torch.equal(result, found[0]) for result in found)
        assert_rounded_once(found[0], rows, scale=scale)
        if name == "two_shot" and numel:
            expected = torch.empty_like(rows[0])
            sum_rows_reference(expected, rows, scale=scale)
            assert torch.equal(found[0], expected), "two_shot sums in the order of the ranks"


@pytest.mark.parametrize("name", ["ring", "two_shot"])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
def test_all_reduce_of_integers_wraps_and_of_bool_is_or(device, name, dtype):
    for numel in (1, 130):
        rows = inputs(3, numel, dtype, device)
        stacked = torch.stack(rows)
        expected = (
            stacked.any(0) if dtype == torch.bool else stacked.sum(0, dtype=torch.int64).to(dtype)
        )
        assert all(torch.equal(found, expected) for found in reduced(rows, name))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32], ids=str)
def test_views_of_other_dtypes_have_the_same_sums(dtype):
    a = (
        torch.arange(5).to(torch.float32).to(dtype)
        if dtype.is_complex
        else torch.tensor([1, 2, 3, 60000, 5]).to(dtype)
    )
    rows = [summable_view(a.clone()) for _ in range(2)]
    found = reduced(rows, "ring")[0].view(dtype)
    expected = (a.to(torch.complex128) if dtype.is_complex else a.to(torch.int64)) * 2
    assert torch.equal(
        found.to(expected.dtype), expected % 2**16 if dtype == torch.uint16 else expected
    )


def test_pieces_by_hand():
    # The tensor is elements 8 to 20 of its buffer; pieces of 5 of the buffer, three ranks.
    assert ring.pieces_of(12, size=3, segment=5, offset=8) == [
        [(0, 0), (0, 2), (2, 7)],
        [(7, 12), (0, 0), (0, 0)],
    ]
    assert ring.pieces_of(0, size=3, segment=5) == []


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 90),
    st.integers(1, 40),
    st.lists(st.integers(1, 300), max_size=4),
    st.booleans(),
)
def test_the_ring_does_not_depend_on_the_buckets(size, segment, head, cuts, half):
    """Any cut of a buffer into tensors gives the bits of the whole buffer."""
    numel = 300
    rows = inputs(size, numel, torch.bfloat16 if half else torch.float32)
    whole = reduced(rows, "ring", segment=segment, scale=1 / size)[0]
    edges = sorted({0, numel, *(c % numel for c in cuts), head})
    parts = [
        reduced([row[a:b] for row in rows], "ring", segment=segment, scale=1 / size, offset=a)[0]
        for a, b in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_the_ring_without_offsets_would_depend_on_them():
    """The guard of the test above: three ranks sum in another order when the position is not
    told."""
    rows = inputs(3, 300, torch.float32)
    whole = reduced(rows, "ring", segment=50)[0]
    second = reduced([row[50:] for row in rows], "ring", segment=50)[0]
    assert not torch.equal(second, whole[50:])


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(0, 400),
    st.integers(1, 200),
    st.sampled_from(["ring", "two_shot"]),
)
def test_reduce_scatter_and_all_gather_make_an_all_reduce(size, numel, segment, name):
    module = ring if name == "ring" else two_shot
    rows = inputs(size, numel, torch.bfloat16)
    starts = [min(numel, -(-numel // size) * p) for p in range(size + 1)]

    def body(transport):
        x = rows[transport.rank].clone()
        part = x.new_empty(starts[transport.rank + 1] - starts[transport.rank])
        module.reduce_scatter(
            x, part, starts=starts, transport=transport, segment=segment, scale=1 / size
        )
        assert torch.equal(x, rows[transport.rank]), "the input is left as it is"
        out = x.new_empty(numel)
        module.all_gather(part, out, starts=starts, transport=transport, segment=segment)
        return out

    found = run_virtual(size, body)
    assert all(torch.equal(result, found[0]) for result in found)
    assert_rounded_once(found[0], rows, scale=1 / size)


def test_sixteen_bits_are_rounded_once():
    """256 + 1 + 1 in bf16: rounded at every hop it stays 256."""
    rows = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    for name in ("ring", "two_shot"):
        assert reduced(rows, name)[0].item() == 258


def test_a_rank_that_ends_is_named():
    def body(transport):
        if transport.rank == 1:
            raise KeyError("an early end")
        ring.all_reduce(torch.ones(100), transport=transport, segment=10)

    with pytest.raises(KeyError, match="an early end"):
        run_virtual(3, body)

    def stall(transport):
        if transport.rank != 1:
            two_shot.all_reduce(torch.ones(100), transport=transport, segment=10)

    with pytest.raises(PeerError, match=r"rank 1 failed: nothing came within 0\.2 s"):
        run_virtual(2, stall, timeout=0.2)


def test_rounds_overlap_within_the_window():
    log: list[str] = []

    class Note:
        def __init__(self, text: str) -> None:
            self.text = text

        def wait(self) -> None:
            log.append(f"wait {self.text}")

    def steps(name: str):
        for step in range(2):
            log.append(f"post {name}{step}")
            yield Note(f"{name}{step}")

    run_staggered((steps(name) for name in "ab"), window=2)
    assert log == [
        "post a0",
        "post b0",
        "wait a0",
        "post a1",
        "wait b0",
        "post b1",
        "wait a1",
        "wait b1",
    ]


def test_bytes_go_round():
    found = run_virtual(3, lambda t: exchange_bytes(t, b"x" * t.rank, width=4))
    assert found == [[b"\0\0\0\0", b"x\0\0\0", b"xx\0\0"]] * 3
    with pytest.raises(ValueError, match="5 bytes does not fit"):
        run_virtual(1, lambda t: exchange_bytes(t, b"x" * 5, width=4))


@pytest.mark.parametrize(
    "pieces", [1, ring.AHEAD - 1, ring.AHEAD, ring.AHEAD + 1, 3 * ring.AHEAD + 5]
)
def test_a_ring_of_two_with_more_pieces_than_it_receives_ahead(pieces: int):
    segment = 7
    rows = torch.randn(2, pieces * segment - 3, generator=torch.Generator().manual_seed(pieces))

    def body(transport):
        x = rows[transport.rank].clone()
        ring.all_reduce(x, transport=transport, segment=segment, scale=0.5)
        return x

    first, second = run_virtual(2, body)
    assert torch.equal(first, (rows[0] + rows[1]) * 0.5)
    assert torch.equal(first, second)
