"""Symmetric memory of a group, from the tensor to the kernel: threads play ranks, their buffers are
memory of this process that they find as torch's rendezvous gives it, and the kernel is the one of
the host.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.arithmetic import row_starts
from pyops.comm.collectives.symmetric import (
    SymmetricBuffer,
    SymmetricMemory,
    Unavailable,
    memory_of,
)
from pyops.comm.collectives.symmetric import memory as module
from pyops.comm.failure import CommunicationError
from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.communication.symmetric import PAD_WORDS, Peers
from pyops.ops.optimizers.grad_norm import squared_norm_reference
from tests.cuda.symmetric.mapped_files import sum_of_rank
from tests.cuda.symmetric.test_kernel import BF16, FP16, FP32, FP64, bits, buffers
from tests.grids import full

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")


class Ranks:
    """As many threads as ranks, and what torch and the device do for them."""

    def __init__(self, kernels: ctypes.CDLL, size: int, *, timeout: float = 30.0) -> None:
        assert kernels.emulated_pad_bytes() <= PAD_WORDS * 8
        self.kernels, self.size, self.timeout = kernels, size, timeout
        self.store = dist.HashStore()
        self.met = threading.Barrier(size)
        self.rank = threading.local()
        self.here: list[Tensor | None] = [None] * size
        self.without: dict[int, int] = {}  # rank: how many buffers it can have
        self.multicast = [1] * size
        self.launches: list[int] = []

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        left = self.without.get(self.rank.number)
        if left is not None:
            if left == 0:
                raise RuntimeError("CUDA driver error: no room for it\nat some line")
            self.without[self.rank.number] = left - 1
        return torch.full((numel,), 7, dtype=dtype)

    def rendezvous(self, tensor: Tensor, group: Any) -> Any:
        self.here[self.rank.number] = tensor
        self.met.wait()
        found = list(self.here)
        self.met.wait()
        return types.SimpleNamespace(
            multicast_ptr=self.multicast[self.rank.number],
            get_remote_tensor=lambda rank, shape, dtype: found[rank].view(shape),
        )

    def sum(
        self,
        whole: Tensor,
        outs: list[Tensor],
        rows: list[Tensor],
        peers: Peers,
        *,
        ctas: int,
        scale: float,
        norm: Tensor | None,
    ) -> None:
        self.launches.append(ctas)
        sum_of_rank(self.kernels, whole, outs, rows, peers, ctas=ctas, scale=scale, norm=norm)

    def run(self, body: Any) -> list[Any]:
        """body(communicator) on every rank; results, or what was raised, in the order of ranks."""
        results: list[Any] = [None] * self.size

        def play(rank: int) -> None:
            self.rank.number = rank
            comm = types.SimpleNamespace(
                rank=rank,
                size=self.size,
                group=types.SimpleNamespace(group_name="all"),
                symmetric={},
                timeout=lambda device: self.timeout,
                run=lambda call, **_: call(64),
            )
            try:
                results[rank] = body(comm)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=play, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def values(self, body: Any) -> list[Any]:
        found = self.run(body)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found


@pytest.fixture
def ranks(symmetric: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(size: int, **options: Any) -> Ranks:
        found = Ranks(symmetric, size, **options)
        monkeypatch.setattr(module, "_problem", lambda device, size: "")
        monkeypatch.setattr(module, "group_store", lambda group: found.store)
        monkeypatch.setattr(module, "symmetric_empty_tensor", found.empty)
        monkeypatch.setattr(module, "symmetric_rendezvous", found.rendezvous)
        monkeypatch.setattr(module, "symmetric_sum_", found.sum)
        monkeypatch.setattr(module, "WORKSPACE_BYTES", 32 << 10)
        monkeypatch.setattr(module, "ONE_SHOT_BYTES", 8 << 10)
        return found

    return make


def expected_of(x: list[Tensor], to: torch.dtype, scale: float) -> Tensor:
    out = torch.empty(x[0].numel(), dtype=to)
    sum_rows_reference(out, x, scale=scale)
    return out


@pytest.mark.parametrize("dtype", [FP32, BF16, full(FP16)], ids=str)
@pytest.mark.parametrize("size", [2, 3, full(4)])
def test_any_tensor_goes_through_the_workspace(ranks, size, dtype):
    """One shot, two shots, several pieces of a workspace; parts that are not alike."""
    group = ranks(size)
    numels = (0, 1, 777, 5003, 20001)
    inputs = {numel: buffers(size, numel, dtype, shift=1) for numel in numels}
    scattered = {numel: buffers(size, numel, dtype) for numel in (1, 5003, 40001)}

    def body(comm: Any) -> dict[tuple[str, int], Tensor]:
        memory, found = memory_of(comm, CPU), {}
        for numel in numels:
            x = inputs[numel][comm.rank].clone()
            memory.all_reduce(x, scale=1 / size)
            found["all", numel] = x
        for numel, of in scattered.items():
            starts = row_starts(numel, size)
            out = torch.zeros(starts[comm.rank + 1] - starts[comm.rank], dtype=dtype)
            memory.reduce_scatter(of[comm.rank], out, starts=starts, scale=0.3)
            found["scatter", numel] = out
        return found

    for rank, found in enumerate(group.values(body)):
        for numel, x in inputs.items():
            assert torch.equal(bits(found["all", numel]), bits(expected_of(x, dtype, 1 / size)))
        for numel, x in scattered.items():
            starts = row_starts(numel, size)
            want = expected_of(x, dtype, 0.3)[starts[rank] : starts[rank + 1]]
            assert torch.equal(bits(found["scatter", numel]), bits(want)), numel


@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_is_reduced_where_it_lies(ranks, size):
    group = ranks(size)
    x = buffers(size, 5003, BF16)

    def body(comm: Any) -> list[Tensor]:
        memory = memory_of(comm, CPU)
        buffer, main = (memory.allocate(5003, dtype) for dtype in (BF16, FP32))
        norm, part_norm = (torch.zeros(2, dtype=FP64) for _ in range(2))
        buffer.tensor.copy_(x[comm.rank])
        buffer.all_reduce(op="mean", main=main, norm=norm)
        assert torch.equal(buffer.tensor, x[comm.rank]), "left as it is"
        starts = [0, *row_starts(5000, size)[1:-1], 5003]
        part = torch.zeros(starts[comm.rank + 1] - starts[comm.rank], dtype=FP32)
        buffer.reduce_scatter(part, starts=starts, norm=part_norm)
        before = memory.workspace.tensor.clone()
        memory.all_reduce(buffer.tensor[64:4000], scale=0.5)  # a bucket of it
        assert torch.equal(memory.workspace.tensor, before), "copied"
        parts = buffer.tensor.new_zeros(4000 // size)
        cut = [0, *(4000 // size * (r + 1) for r in range(size))]
        buffer.tensor.copy_(x[comm.rank])
        memory.reduce_scatter(buffer.tensor[: cut[-1]], parts, starts=cut)
        buffer.all_reduce()
        return [main.tensor, norm, part, part_norm, parts, buffer.tensor]

    found = group.values(body)
    mean, total = expected_of(x, FP32, 1 / size), expected_of(x, FP32, 1.0)
    starts = [0, *row_starts(5000, size)[1:-1], 5003]
    for rank, (main, norm, part, part_norm, parts, buffer) in enumerate(found):
        wanted = total[starts[rank] : starts[rank + 1]]
        assert torch.equal(bits(main), bits(mean))
        assert torch.equal(bits(part), bits(wanted))
        assert torch.equal(norm, found[0][1]), "the same bits on all ranks"
        for got, of in ((norm, mean), (part_norm, wanted)):
            torch.testing.assert_close(got, squared_norm_reference([of]), rtol=1e-13, atol=0)
        each = 4000 // size
        assert torch.equal(
            bits(parts), bits(expected_of(x, BF16, 1.0)[rank * each : (rank + 1) * each])
        )
        assert torch.equal(bits(buffer), bits(expected_of(x, BF16, 1.0)))


@pytest.mark.parametrize("buffers_before", [0, 1])
def test_all_ranks_fall_back_where_one_has_none(ranks, buffers_before):
    """Said once, by rank 0, with the name of the rank; nobody waits in a rendezvous."""
    group = ranks(3)
    group.without[1] = buffers_before
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = group.run(lambda comm: [memory_of(comm, CPU) for _ in range(3)])
    assert found == [[None] * 3] * 3
    assert len(said) == 1
    assert "rank 1: CUDA driver error: no room for it" in str(said[0].message)
    assert "'native' instead" in str(said[0].message)


def test_a_later_buffer_that_one_rank_can_not_have_is_refused_alike(ranks):
    group = ranks(2)

    def body(comm: Any) -> None:
        memory = memory_of(comm, CPU)
        group.met.wait()
        group.without[1] = 0
        memory.allocate(64, FP32)

    assert all(
        isinstance(error, Unavailable) and "rank 1: CUDA driver" in str(error)
        for error in group.run(body)
    )


def test_memory_that_a_peer_reads_is_not_freed(ranks):
    """One rank's kernel is still on its way: all ranks refuse alike, and free it later."""
    group = ranks(2)

    def body(comm: Any) -> tuple[str, int, SymmetricBuffer]:
        memory = memory_of(comm, CPU)
        buffer = memory.allocate(64, FP32)
        held = len(memory.buffers)
        buffer.used = types.SimpleNamespace(query=lambda: comm.rank == 0)
        with pytest.raises(ValueError, match=r"in use by the kernels of ranks \[1\]") as refused:
            buffer.free()
        assert buffer.ranks
        assert len(memory.buffers) == held
        buffer.used = types.SimpleNamespace(query=lambda: True)
        buffer.free()
        with pytest.raises(ValueError, match="was freed"):
            buffer.all_reduce()
        return str(refused.value), held - len(memory.buffers), buffer

    for text, fewer, buffer in group.values(body):
        assert "synchronize the device on all ranks" in text
        assert fewer == 1
        assert not buffer.ranks
        assert buffer.tensor.numel() == 0


def test_a_lost_rank_is_named_and_its_result_is_nan(ranks):
    group = ranks(3, timeout=1.0)

    def body(comm: Any) -> tuple[Tensor, str, tuple[int, ...]] | None:
        memory = memory_of(comm, CPU)
        if comm.rank == 1:
            return None
        x = torch.ones(5003)
        memory.all_reduce(x)
        with pytest.raises(CommunicationError, match="did not come to a sum") as error:
            memory.all_reduce(torch.ones(3))
        return x, str(error.value), error.value.ranks

    for rank, found in enumerate(group.values(body)):
        if rank != 1:
            assert found[0].isnan().any()
            assert "rank 1 died or stalled" in found[1]
            assert found[2] == (1,)


def test_who_does_not_come_to_agree_is_named(ranks):
    group = ranks(2, timeout=0.5)
    found = group.run(lambda comm: memory_of(comm, CPU) if comm.rank == 0 else None)
    assert isinstance(found[0], CommunicationError)
    assert found[0].ranks == (1,)


def test_a_group_can_start_anew(ranks):
    """Notes of a communicator that was released are not taken for answers, nor its buffers used."""
    group = ranks(2)

    def body(comm: Any) -> SymmetricMemory:
        memory = memory_of(comm, CPU)
        buffer = memory.allocate(64, FP32)
        memory.close()
        assert not memory.buffers
        with pytest.raises(ValueError, match="was freed"):
            buffer.all_reduce()
        return memory

    group.values(body)
    group.without = {0: 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert group.run(lambda comm: memory_of(comm, CPU)) == [None, None]


@pytest.mark.parametrize("multicast", [[1, 1], [1, 0]])
def test_the_switch_adds_where_all_ranks_have_one(ranks, monkeypatch, multicast):
    group = ranks(2)
    group.multicast = multicast
    called: list[int] = []
    op = types.SimpleNamespace(
        multimem_all_reduce_=lambda x, op, name: called.append(group.rank.number)
    )
    monkeypatch.setattr(torch.ops, "symm_mem", op, raising=False)

    def body(comm: Any) -> None:
        memory = memory_of(comm, CPU)
        buffers = [memory.allocate(64, dtype) for dtype in (FP32, FP16)]
        for buffer, allowed in itertools.product(buffers, (False, True)):
            buffer.all_reduce(multimem=allowed)
        buffers[0].all_reduce(multimem=True, norm=torch.zeros(2, dtype=FP64))

    group.values(body)
    assert sorted(called) == ([0, 1] if all(multicast) else [])
