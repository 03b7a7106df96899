"""Errors kept from call to call: nothing is lost over many rounds, and their sum outlives a change
of the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm.collectives.transport import Transport, run_virtual
from pyops.comm.compression import compressed_shots as shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int4, Int8
from pyops.comm.compression.error_feedback import ErrorFeedback, chunk_starts, merge
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.flat import FlatLayout, Shard
from tests.grids import cut

CODECS: list[Codec] = [
    OneBit(),
    OneBit(block=64),
    OneBit(block=64, rule="rms"),
    OneBit(block=None),
    Int8(),
    FP8(),
    FP8(format="e5m2"),
    BF16(),
    Int4(),
    Int8(block=64, stochastic_rounding=True),
]
LAYOUT = FlatLayout.plan([("head", (7, 30)), ("bias", (5,)), ("body", (41, 10))])


def numbers(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def memory(error: ErrorFeedback, *, seed: int = 0) -> shots.Memory:
    return shots.Memory(error.worker, error.server, error.overflowed, seed)


def rounds(
    codec: Codec, errors: list[ErrorFeedback], *, count: int, first: int = 0
) -> list[Tensor]:
    """The results of `count` means over as many virtual ranks as there are errors, equal on all of
    them."""

    def body(transport: Transport) -> list[Tensor]:
        error, found = errors[transport.rank], []
        for k in range(first, first + count):
            x = numbers(100 * k + transport.rank, error.numel)
            shots.all_reduce(
                x,
                codec=codec,
                transport=transport,
                segment=128,
                memory=memory(error, seed=k),
                scale=1 / transport.size,
            )
            found.append(x)
        return found

    results = run_virtual(len(errors), body)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))
    return results[0]


def left_out(errors: list[ErrorFeedback]) -> Tensor:
    """What the ranks have not seen yet, in float64."""
    workers = sum(e.worker.double() for e in errors) / len(errors)
    return workers + torch.cat([e.server for e in errors]).double()


def make(codec: Codec, size: int, *, tensors: FlatLayout | int = LAYOUT) -> list[ErrorFeedback]:
    return [ErrorFeedback(tensors, codec=codec, rank=rank, size=size) for rank in range(size)]


GRID = [(number, size) for number in range(len(CODECS)) for size in (1, 2, 3, 4)]
# Every codec on three ranks, whose chunks are of two lengths; one of a bit and one of eight on any.
IN_SUITE = [(number, size) for number, size in GRID if size == 3 or number in (1, 4)]


@pytest.mark.parametrize(("number", "size"), cut(GRID, keep=IN_SUITE))
def test_what_was_seen_and_what_is_left_make_up_the_means(number: int, size: int) -> None:
    codec = CODECS[number]
    errors = make(codec, size, tensors=1000)
    count = 50
    seen = sum(x.double() for x in rounds(codec, errors, count=count))
    means = (
        sum(numbers(100 * k + rank, 1000).double() for k in range(count) for rank in range(size))
        / size
    )
    largest = float(torch.cat([part.abs() for e in errors for part in (e.worker, e.server)]).max())
    assert largest > 0  # else there was nothing to remember
    # Each round rounds x + error twice at each end, and the sum once: 5 roundings of numbers below
    # 4 + the largest error.
    assert (seen + left_out(errors) - means).abs().max() <= count * 5 * 2.0**-24 * (4 + 2 * largest)


@pytest.mark.parametrize("numel", [0, 1, 7, 31, 1000, 5003])
def test_one_round_is_the_mean_less_the_errors(numel: int) -> None:
    for size in (1, 2, 3, 4):
        errors = make(Int8(block=64), size, tensors=numel)
        (out,) = rounds(Int8(block=64), errors, count=1)
        mean = sum(numbers(rank, numel).double() for rank in range(size)) / size
        # The encoders of 8 bits are exact; the owner's fp32 sum and its scaling round.
        assert torch.allclose(
            out.double() + left_out(errors), mean, rtol=0, atol=(size + 1) * 2.0**-23
        )


def test_a_large_tensor_in_many_segments() -> None:
    codec, numel = OneBit(), 1_000_003
    errors = make(codec, 3, tensors=numel)

    def body(transport: Transport) -> Tensor:
        x = numbers(transport.rank, numel)
        error = memory(errors[transport.rank])
        shots.all_reduce(
            x, codec=codec, transport=transport, segment=1 << 14, memory=error, scale=1 / 3
        )
        return x

    first, *others = run_virtual(3, body)
    assert all(torch.equal(first, x) for x in others)
    mean = sum(numbers(rank, numel).double() for rank in range(3)) / 3
    assert torch.allclose(first.double() + left_out(errors), mean, rtol=0, atol=2e-6)


def test_chunks_are_whole_blocks_and_cover_the_tensor() -> None:
    for numel in (0, 1, 63, 64, 65, 8 * 3 - 1, 10_007):
        for size in (1, 2, 3, 4):
            starts = chunk_starts(numel, size=size, multiple=64)
            assert starts[0] == 0
            assert starts[-1] == numel
            assert starts == sorted(starts)
            assert all(start % 64 == 0 or start == numel for start in starts)


def test_a_state_restores_every_bit() -> None:
    codec = OneBit(block=64)
    straight = make(codec, 2, tensors=1000)
    expected = rounds(codec, straight, count=6)[3:]
    before = make(codec, 2, tensors=1000)
    rounds(codec, before, count=3)
    after = make(codec, 2, tensors=1000)
    for old, new in zip(before, after, strict=True):
        old.rounds = 3
        new.load_state_dict(old.state_dict())
        assert new.rounds == 3
    found = rounds(codec, after, count=3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_sum_of_the_errors_outlives_changes_of_the_number_of_ranks() -> None:
    codec = OneBit(block=64)
    errors = make(codec, 2)
    rounds(codec, errors, count=3)
    for size in (3, 4, 1, 2):
        before = left_out(errors)
        state = merge([e.state_dict() for e in errors])
        errors = make(codec, size)
        for error in errors:
            error.load_state_dict(state)
        covered = torch.cat(
            [torch.arange(s.start, s.stop) for s in (LAYOUT.slice(n) for n in LAYOUT.names)]
        )
        assert before[covered].abs().max() > 0
        largest = float(max(e.worker.abs().max() for e in errors))
        assert (left_out(errors) - before)[
            covered
        ].abs().max() <= 2.0**-24 * largest  # one rounding of the mean
        rounds(codec, errors, count=2)


def test_shards_say_where_they_belong() -> None:
    state: dict[str, Any] = make(OneBit(block=64), 3)[1].state_dict()
    assert state["worker"]["body"].global_shape == (3, 41, 10)
    assert state["worker"]["body"].offset == (1, 0, 0)
    parts = [e.state_dict()["server"].get("body") for e in make(OneBit(block=64), 3)]
    assert sum(p.tensor.numel() for p in parts if isinstance(p, Shard)) == 410


def test_states_that_can_not_be_loaded_change_nothing() -> None:
    errors = make(OneBit(block=64), 2)
    rounds(OneBit(block=64), errors, count=1)
    state = errors[0].state_dict()
    with pytest.raises(ValueError, match=r"onebit\(block=64, rule=l1\).*int8\(block=64\)"):
        make(Int8(block=64), 2)[0].load_state_dict(state)
    other = make(OneBit(block=64), 3)[2]
    with pytest.raises(ValueError, match="merge"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="no errors of 'tensor'"):
        ErrorFeedback(10, codec=OneBit(block=64)).load_state_dict(state)
    assert not other.worker.any()
    assert not other.server.any()
    with pytest.raises(ValueError, match="lack a part"):
        merge([state])
    with pytest.raises(ValueError, match="there are no states"):
        merge([])
    with pytest.raises(ValueError, match="rank is 2 of size 2"):
        ErrorFeedback(10, codec=Identity(), rank=2, size=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "codec", [OneBit(block=64), Int8(block=64), BF16(), OneBit(block=None)], ids=lambda c: c.name
)
def test_a_number_that_is_not_finite_reaches_all_and_enters_no_error(
    codec: Codec, bad: float
) -> None:
    errors = make(codec, 3, tensors=640)
    rounds(codec, errors, count=1)
    kept = [(e.worker.clone(), e.server.clone()) for e in errors]
    place = 70  # in block 1, of rank 0's chunk

    def body(transport: Transport) -> Tensor:
        x = numbers(transport.rank, 640)
        if transport.rank == 1:
            x[place] = bad
        shots.all_reduce(
            x,
            codec=codec,
            transport=transport,
            segment=128,
            memory=memory(errors[transport.rank]),
            scale=1 / 3,
        )
        return x

    results = run_virtual(3, body)
    block = (
        slice(64, 128)
        if codec.multiple == 64 and codec != BF16() and codec.streams
        else slice(place, place + 1)
    )
    for x in results:
        assert x[block].isnan().all()
        assert not x.isinf().any()
        assert codec == OneBit(block=None) or (x[:64].isfinite().all() and x[128:].isfinite().all())
    assert all(bool(e.worker.isfinite().all() and e.server.isfinite().all()) for e in errors)
    assert torch.equal(errors[1].worker[block], kept[1][0][block])
    assert torch.equal(errors[0].server[block], kept[0][1][block])
    assert float(errors[1].overflowed) == 1.0
    assert float(errors[0].overflowed) == 1.0
