"""Shared memory among threads that play ranks: every dtype at sizes around its chunks, signatures,
and what it refuses."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import pytest
import torch

from pyops.comm.collectives.shared_memory import SharedMemory
from pyops.comm.collectives.transport import run_virtual
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.library import native
from tests.comm.collectives.test_algorithms import inputs

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]

CHUNK, SMALL = 8192, 4096


def run_ranks(size: int, body: Any, *, timeout: float = 20.0) -> list[Any]:
    """body(shared memory with tiny chunks) on `size` threads."""
    name, made = f"/pyops-test-{secrets.token_hex(8)}", threading.Barrier(size)

    def start(transport: Any) -> Any:
        shared = SharedMemory.__new__(SharedMemory)
        shared.rank, shared.size, shared.timeout = transport.rank, size, timeout
        if transport.rank == 0:
            shared._ring = native().SharedMemoryRing(name, 0, size, True, CHUNK, SMALL)
        made.wait()
        if transport.rank > 0:
            shared._ring = native().SharedMemoryRing(
                name, transport.rank, size, False, CHUNK, SMALL
            )
        made.wait()
        if transport.rank == 0:
            shared._ring.unlink()
        return body(shared)

    return run_virtual(size, start)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.bool],
    ids=str,
)
def test_sums_are_those_of_sum_rows_at_every_size(size, dtype):
    item = dtype.itemsize
    chunk = CHUNK // item
    sizes = [
        0,
        1,
        7,
        SMALL // item,
        SMALL // item + 1,
        chunk - 1,
        chunk,
        chunk + 1,
        5 * chunk + 77,
        12 * chunk,
    ]
    rows_of = {numel: inputs(size, numel, dtype) for numel in sizes}
    scale = 1.0 / size if dtype.is_floating_point else 1.0

    def body(shared: SharedMemory) -> dict[int, torch.Tensor]:
        results = {}
        for numel in sizes:
            x = rows_of[numel][shared.rank].clone()
            shared.all_reduce(x, scale=scale, spins=10)
            results[numel] = x
        return results

    found = run_ranks(size, body)
    for numel, rows in rows_of.items():
        if dtype.is_floating_point:
            expected = torch.empty_like(rows[0])
            sum_rows_reference(expected, rows, scale=scale)
        else:
            stacked = torch.stack(rows)
            expected = (
                stacked.any(0)
                if dtype == torch.bool
                else stacked.sum(0, dtype=torch.int64).to(dtype)
            )
        for of_rank in found:
            assert torch.equal(of_rank[numel], expected), (numel, dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_many_collectives_of_all_kinds_in_a_row(size):
    """Slots are taken over again and again, by collectives of other kinds and sizes, with ranks at
    different speeds."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(1, 9000, (60,), generator=generator).tolist()

    def body(shared: SharedMemory) -> None:
        for turn, numel in enumerate(lengths):
            if (turn + shared.rank) % 7 == 0:
                threading.Event().wait(0.002)
            starts = [numel * p // size for p in range(size + 1)]
            x = torch.arange(numel, dtype=torch.float32) + shared.rank + turn
            total = size * (torch.arange(numel, dtype=torch.float32) + turn) + size * (size - 1) / 2
            mine = slice(starts[shared.rank], starts[shared.rank + 1])
            if turn % 3 == 0:
                shared.all_reduce(x, spins=10)
                assert torch.equal(x, total)
            elif turn % 3 == 1:
                part = torch.empty(mine.stop - mine.start)
                shared.reduce_scatter(x, part, starts=starts, spins=10)
                assert torch.equal(part, total[mine])
            else:
                out = torch.empty(numel)
                shared.all_gather(total[mine].clone(), out, starts=starts, spins=10)
                assert torch.equal(out, total)

    run_ranks(size, body)


def test_ranks_that_disagree_all_raise_and_go_on():
    def body(shared: SharedMemory) -> str:
        x = torch.ones(100 if shared.rank < 2 else 100_000)
        with pytest.raises(DisagreementError) as caught:
            shared.all_reduce(x)
        with pytest.raises(DisagreementError, match="called all_gather"):
            if shared.rank == 1:
                shared.all_gather(x[:1], torch.empty(3), starts=[0, 1, 2, 3])
            else:
                shared.reduce_scatter(x[:3], torch.empty(1), starts=[0, 1, 2, 3])
        y = torch.full((3,), float(shared.rank))
        shared.all_reduce(y)
        assert y.tolist() == [3.0, 3.0, 3.0]
        return str(caught.value)

    found = run_ranks(3, body)
    assert (
        "this rank called all_reduce of 100 elements of torch.float32, rank 2 called "
        "all_reduce of 100000 elem" in found[0]
    )
    assert "rank 0 called all_reduce of 100 elements" in found[2]


def test_a_late_rank_is_named_and_told():
    everyone_gave_up = threading.Barrier(3)

    def body(shared: SharedMemory) -> None:
        x = torch.ones(10)
        if shared.rank == 2:
            everyone_gave_up.wait()
            with pytest.raises(
                CommunicationError, match="the others gave up, because this rank came too late"
            ):
                shared.all_reduce(x)
            return
        with pytest.raises(
            CommunicationError,
            match=r"rank 2 stalled: no sign of it within the group's timeout of 0\.3 s",
        ) as caught:
            shared.all_reduce(x)
        assert caught.value.ranks == (2,)
        everyone_gave_up.wait()

    run_ranks(3, body, timeout=0.3)


def test_the_native_class_checks_its_arguments():
    ring = native().SharedMemoryRing
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ring("/pyops-test-none", 2, 2, True)
    with pytest.raises(ValueError, match="multiples of 4096"):
        ring("/pyops-test-none", 0, 2, True, 1000, 4096)
    with pytest.raises(RuntimeError, match="shm_open: No such file"):
        ring("/pyops-test-none", 1, 2, False)
    made = ring(f"/pyops-test-{secrets.token_hex(8)}", 0, 1, True)
    made.unlink()
    with pytest.raises(ValueError, match="starts must be 2 numbers, increasing from 0"):
        made.all_gather(0, 0, [0, 4, 2], 0, 0, 1.0)
    with pytest.raises(ValueError, match="dtype code 99"):
        made.all_reduce(0, 1, 99, 1.0, 0, 0, 1.0)
