"""DataParallel(algorithm="symmetric") over ranks of several processes: see mapped_files.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyops.comm
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.symmetric import memory_of
from pyops.data_parallel import DataParallel
from pyops.flat import FlatBuffer
from tests.cuda.symmetric.mapped_files import MappedFiles
from tests.grids import full

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
WIDTH = 23


class Net(nn.Module):
    """Parameters of three dtypes, one of which is not summed in symmetric memory; one is not used
    by every rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.sometimes = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.last = nn.Linear(WIDTH, 1).double()

    def forward(self, x: Tensor, *, sometimes: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.sometimes(x) if sometimes else x[:, :WIDTH]
        return self.last(torch.tanh(self.narrow(x.bfloat16())).double())


def _gradients(rank: int, group: Any, algorithm: str) -> tuple[list[Tensor], int]:
    """Of three backwards, two of which add up; and how many of the flat gradients lie in symmetric
    memory."""
    model = DataParallel(Net(rank), group=group, bucket_bytes=4000, algorithm=algorithm)
    found, comm = [], Communicator.of(group)
    memory = memory_of(comm, CPU) if algorithm == "symmetric" else None
    before = None if memory is None else memory.workspace.tensor.clone()
    held = 0 if memory is None else len(memory.buffers)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model.zero_grad(set_to_none=step != 1)
        for k in range(1 + step % 2):
            loss = model(torch.randn(5, WIDTH), sometimes=step > 0 or rank == 0).square().mean()
            with model.no_sync() if k < step % 2 else warnings.catch_warnings():
                loss.backward()
        found += [p.grad.clone() for p in model.module.parameters()]
    inside = 0
    if memory is not None:
        inside = sum(memory.buffer_of(flat.grad) is not None for flat in model.flat)
        assert torch.equal(memory.workspace.tensor, before), "a bucket was copied"
    values = [p.detach().clone() for p in model.module.parameters()]
    model.close()
    if memory is not None:
        assert held - len(memory.buffers) == inside, "given back"
    model.close()
    assert all(torch.equal(p, q) for p, q in zip(model.module.parameters(), values, strict=True))
    return found, inside


def _both(rank: int, group: Any, folder: str, library: str) -> tuple[int, int, list[bool], Any]:
    want, _ = _gradients(rank, dist.new_group(), "two_shot")
    fresh = dist.new_group()
    with MappedFiles(folder, library, fresh, buffers=None) as files:
        got, inside = _gradients(rank, fresh, "symmetric")
    pyops.comm.release(fresh)
    same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    return inside, files.sums, same, max(float(g.abs().max()) for g in got)


@pytest.mark.parametrize("size", [full(2), 3])
def test_buckets_are_reduced_where_they_lie_with_the_bits_of_two_shot(
    world, symmetric, tmp_path: Path, size: int
):
    for inside, sums, same, largest in world(size).run(_both, str(tmp_path), symmetric._name):
        assert inside == 2, "float64 is not summed there"
        assert sums >= 3 * 3, "buckets of both dtypes, three times"
        assert all(same)
        assert largest > 1e-3


def _without_room(rank: int, group: Any, folder: str, library: str, buffers: int) -> Any:
    """What becomes of a model where rank 1 can have so many buffers."""
    fresh, net = dist.new_group(), Net(0)
    before = [(p, p.data_ptr()) for p in net.parameters()]
    text, said = "", list[str]()
    with (
        warnings.catch_warnings(record=True) as seen,
        MappedFiles(folder, library, fresh, buffers=buffers if rank == 1 else None) as files,
    ):
        warnings.simplefilter("always")
        try:
            model = DataParallel(net, group=fresh, algorithm="symmetric")
            model(torch.ones(2, WIDTH), sometimes=True).sum().backward()
            model.close()
        except torch.OutOfMemoryError as error:
            text = str(error)
            assert all(p.data_ptr() == at for p, at in before), "nothing was changed"
            memory = memory_of(Communicator.of(fresh), CPU)
            assert len(memory.buffers) == 2, "pads and workspace"
            model = DataParallel(net, group=fresh)
            model.close()
        said = [str(w.message) for w in seen if "rank 1: CUDA driver error" in str(w.message)]
    pyops.comm.release(fresh)
    return text, len(said), files.sums


def test_ordinary_memory_where_a_rank_has_no_symmetric_memory(world, symmetric, tmp_path: Path):
    found = world(2).run(_without_room, str(tmp_path), symmetric._name, 1)
    assert [(text, said, sums) for text, said, sums in found] == [("", 1, 0), ("", 0, 0)]


@pytest.mark.parametrize("buffers", [2, 3])  # beside pads and workspace: none, or one of two
def test_no_room_on_one_rank_is_refused_on_all(world, symmetric, tmp_path: Path, buffers: int):
    for text, said, sums in world(2).run(_without_room, str(tmp_path), symmetric._name, buffers):
        assert "no symmetric buffer of" in text
        assert "rank 1: CUDA driver error" in text
        assert "with algorithm='auto'" in text
        assert (said, sums) == (0, 0)


@pytest.mark.parametrize(
    "grad",
    [
        torch.zeros(64),
        torch.zeros(128, dtype=torch.bfloat16),
        torch.zeros(2, 64),
        torch.zeros(256)[::2],
    ],
    ids=lambda grad: f"{grad.dtype} {tuple(grad.shape)} {grad.stride()}",
)
def test_memory_that_the_gradient_does_not_fit_is_refused(grad: Tensor):
    named = [("weight", nn.Parameter(torch.ones(64))), ("bias", nn.Parameter(torch.ones(3)))]
    assert FlatBuffer.layout_of(named).numel == 128
    before = [p.data_ptr() for _, p in named]
    with pytest.raises(ValueError, match=r"give a contiguous tensor of \(128,\) of torch.float32"):
        FlatBuffer(named, grad=grad)
    assert [p.data_ptr() for _, p in named] == before
    right = torch.full((128,), 7.0)
    assert FlatBuffer(named, grad=right).grad is right
    assert not right.any()
