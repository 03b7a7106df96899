"""Compressed collectives over process groups: one result everywhere, errors for all when ranks
disagree."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from pyops.comm import (
    Communicator,
    DisagreementError,
    ErrorFeedback,
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from pyops.comm.compression import compressed_shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.one_bit import OneBit

SIZES = (0, 1, 7, 8 * 3 - 1, 5003)


def numbers(rank: int, size: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _several(rank: int, group: dist.ProcessGroup, codec: Codec) -> list[torch.Tensor]:
    found = []
    for size in SIZES:
        error = ErrorFeedback(size, codec=codec, communicator=Communicator.of(group))
        for asynchronous in (False, True):
            x = numbers(rank, size)
            work = compressed_all_reduce(
                x, codec=codec, error=error, group=group, segment_bytes=4096, async_op=asynchronous
            )
            assert (work.wait() if asynchronous else work) is x
            found.append(x)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "codec", [OneBit(), OneBit(block=None), Int8(), FP8(), BF16()], ids=lambda c: c.name
)
def test_every_rank_has_the_same_bits(world, size: int, codec: Codec) -> None:
    results = world(size).run(_several, codec)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))
    mean = sum(numbers(rank, SIZES[-1]) for rank in range(size)) / size
    assert torch.nn.functional.cosine_similarity(results[0][-1], mean, dim=0) > 0.5


def _disagree(rank: int, group: dist.ProcessGroup, case: str) -> torch.Tensor:
    x = numbers(rank, 100)
    with pytest.raises(DisagreementError, match="rank"):
        if case == "codec":
            compressed_all_reduce(x, codec=OneBit() if rank else OneBit(block=64), group=group)
        elif case == "size":
            compressed_all_reduce(x[: 100 - rank], codec=OneBit(), group=group)
        elif case == "op":
            compressed_all_reduce(x, codec=OneBit(), op="sum" if rank else "mean", group=group)
        elif rank == 0:
            compressed_all_reduce(x, codec=OneBit(), group=group)
        else:
            compressed_reduce_scatter(x, codec=OneBit(), group=group)
    assert torch.equal(x, numbers(rank, 100))
    return compressed_all_reduce(x, codec=Identity(), op="sum", group=group)


@pytest.mark.parametrize("case", ["codec", "size", "op", "collective"])
def test_ranks_that_disagree_all_raise_and_go_on(world, case: str) -> None:
    first, second = world(2).run(_disagree, case)
    assert torch.equal(first, numbers(0, 100) + numbers(1, 100))
    assert torch.equal(first, second)


def _halves(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers(rank, 700).view(7, 100)
    part = compressed_reduce_scatter(x, codec=Identity(), op="sum", group=group, segment_bytes=1024)
    whole = compressed_all_gather(part, length=7, codec=Identity(), group=group, segment_bytes=1024)
    return part, whole


@pytest.mark.parametrize("size", [2, 3])
def test_scatter_and_gather_are_cut_as_tensor_split_does(world, size: int) -> None:
    total = sum(numbers(rank, 700) for rank in range(size)).view(7, 100)
    for rank, (part, whole) in enumerate(world(size).run(_halves)):
        assert torch.equal(part, torch.tensor_split(total, size)[rank])
        assert torch.equal(whole, total)


def _nodes(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    within, across = nodes[rank // 2], places[rank % 2]
    found = []
    for codec in (Identity(), OneBit()):
        for size in (0, 1, 7, 5003):
            part = len(torch.tensor_split(torch.empty(size), 2)[rank % 2])
            error = ErrorFeedback(part, codec=codec, communicator=Communicator.of(across))
            for asynchronous in (False, True):
                x = numbers(rank, size)
                work = compressed_all_reduce(
                    x, codec=codec, error=error, group=across, within=within, async_op=asynchronous
                )
                assert (work.wait() if asynchronous else work) is x
                found.append(x)
    return found


def test_two_nodes_of_two_ranks(world) -> None:
    results = world(4).run(_nodes)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))
    mean = sum(numbers(rank, 5003).double() for rank in range(4)) / 4
    exact = results[0][6]
    assert torch.allclose(exact.double(), mean, rtol=0, atol=1e-6)


def test_without_a_process_group_one_rank_runs_alone() -> None:
    x = numbers(0, 700)
    before = x.clone()
    error = ErrorFeedback(700, codec=OneBit())
    assert compressed_all_reduce(x, codec=OneBit(), error=error) is x
    assert torch.allclose(x + error.worker + error.server, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="compresses float32"):
        compressed_all_reduce(torch.zeros(3, dtype=dtype), codec=OneBit())


def test_memory_for_payloads_is_given_back_at_the_end_of_a_call():
    """Without waiting for the collector of cycles, which may not come for thousands of steps."""
    gc.collect()
    gc.disable()
    try:
        compressed_all_reduce(torch.ones(5000), codec=OneBit())
        assert not [o for o in gc.get_objects() if type(o) is compressed_shots._Slabs]
    finally:
        gc.enable()
