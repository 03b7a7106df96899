"""The public collectives on gloo ranks: every algorithm, odd tensors, asynchronous order,
disagreement, what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm import (
    Communicator,
    DisagreementError,
    Identity,
    all_gather,
    all_reduce,
    compressed_all_reduce,
    reduce_scatter,
    release,
)
from pyops.mesh import ALONE
from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.library import native
from tests.comm.collectives.test_algorithms import assert_rounded_once, inputs
from tests.grids import cut

SHARED_MEMORY = pytest.param(
    "shared_memory", marks=pytest.mark.skipif(native() is None, reason="built without kernels")
)
OWN = ["auto", "ring", "two_shot", SHARED_MEMORY]
ALGORITHMS = [*OWN, "native"]


def _all_reduce(rank: int, group: Any, device: torch.device, algorithm: str) -> list[torch.Tensor]:
    found = []
    size = dist.get_world_size(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (0, 1, 7, 3001, 300_000):  # the last one is beyond a small message and a chunk
            x = inputs(size, numel, dtype, device)[rank]
            returned = all_reduce(
                x, group=group, op="mean", algorithm=algorithm, segment_bytes=64 << 10
            )
            assert returned is x
            found.append(x.cpu())
    return found


NAMES = ("auto", "ring", "two_shot", "shared_memory")
# Each on three ranks, which divide no size of a tensor here; two where auto takes another
# algorithm, four where there are more turns of a ring and more parts of shared memory.
KEPT = [
    *((3, name) for name in NAMES),
    *((2, "shared_memory"), (4, "shared_memory")),
]


@pytest.mark.parametrize(("size", "algorithm"), cut(itertools.product((2, 3, 4), NAMES), keep=KEPT))
def test_all_reduce(world, device, size, algorithm):
    if algorithm == "shared_memory" and native() is None:
        pytest.skip("built without kernels")
    if device.type == "cuda" and algorithm == "shared_memory":
        pytest.skip("shared memory takes CPU tensors")
    found = world(size).run(_all_reduce, device, algorithm)
    case = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (0, 1, 7, 3001, 300_000):
            rows = inputs(size, numel, dtype)
            results = [of_rank[case] for of_rank in found]
            assert all(torch.equal(r, results[0]) for r in results)
            assert_rounded_once(results[0], rows, scale=1.0 / size)
            if algorithm != "ring" and (algorithm != "auto" or size > 2) and numel:
                expected = torch.empty_like(rows[0])
                sum_rows_reference(expected, rows, scale=1.0 / size)
                assert torch.equal(results[0], expected)
            case += 1


def _odd_tensors(rank: int, group: Any, device: torch.device, algorithm: str) -> None:
    n = dist.get_world_size(group)

    def check(x: torch.Tensor, expected: torch.Tensor) -> None:
        assert all_reduce(x, group=group, algorithm=algorithm) is x
        assert torch.equal(x, expected)

    base = torch.arange(24.0, device=device).view(4, 6) + rank
    total = sum(torch.arange(24.0, device=device).view(4, 6) + r for r in range(n))
    whole = base.clone()
    check(whole[:, 1:4], total[:, 1:4])  # a view with gaps: what lies between stays as it was
    assert torch.equal(whole[:, 4:], base[:, 4:])
    check(base.clone().t(), total.t())
    check(torch.tensor(2.0, device=device), torch.tensor(2.0 * n, device=device))
    check(torch.ones(3, 0, device=device), torch.ones(3, 0, device=device))
    check(torch.full((5,), 1 + 2j, device=device), torch.full((5,), n * (1 + 2j), device=device))
    check(
        torch.full((5,), 1 + 2j, device=device).conj(),
        torch.full((5,), n * (1 - 2j), device=device),
    )
    check(
        torch.full((9,), 100, dtype=torch.uint8, device=device),
        torch.full((9,), 100 * n % 256, dtype=torch.uint8, device=device),
    )
    check(
        torch.tensor([rank == 0, False], device=device), torch.tensor([True, False], device=device)
    )
    leaf = torch.nn.Parameter(torch.ones(3, device=device))
    check(leaf, torch.full((3,), float(n), device=device))
    assert leaf.requires_grad


@pytest.mark.parametrize("algorithm", OWN)
def test_odd_tensors(world, device, algorithm):
    if device.type == "cuda" and algorithm == "shared_memory":
        pytest.skip("shared memory takes CPU tensors")
    world(3).run(_odd_tensors, device, algorithm)


def _scatter_and_gather(rank: int, group: Any, device: torch.device, algorithm: str) -> None:
    n = dist.get_world_size(group)
    for rows, width in ((0, 3), (1, 1), (7, 2), (4096, 33)):
        parts = inputs(n, rows * width, torch.float32, device)
        x = parts[rank].view(rows, width)
        expected = torch.stack(parts).double().sum(0).view(rows, width) / n
        mine = reduce_scatter(x, group=group, op="mean", algorithm=algorithm)
        want = expected.tensor_split(n)[rank]
        assert mine.shape == want.shape
        torch.testing.assert_close(mine.double(), want, rtol=1e-6, atol=1e-6)
        assert torch.equal(x, parts[rank].view(rows, width))
        whole = all_gather(mine, group=group, length=rows, algorithm=algorithm)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-6)
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.bfloat16):
        own = torch.full((2, 3), rank + 1, device=device).to(dtype)
        gathered = all_gather(own, group=group, algorithm=algorithm)
        assert gathered.dtype == dtype
        assert gathered.shape == (2 * n, 3)
        for r in range(n):
            assert torch.equal(
                gathered[2 * r : 2 * r + 2].cpu().float(),
                torch.full((2, 3), r + 1).to(dtype).float(),
            )
    assert all_gather(
        torch.tensor(rank, device=device), group=group, algorithm=algorithm
    ).tolist() == list(range(n))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_reduce_scatter_and_all_gather(world, device, size, algorithm):
    if device.type == "cuda" and algorithm in ("shared_memory", "native"):
        pytest.skip("not on CUDA tensors of a gloo group")
    world(size).run(_scatter_and_gather, device, algorithm)


def _native(rank: int, group: Any, device: torch.device) -> None:
    x = torch.full((5,), rank + 1.0, device=device)
    assert torch.equal(
        all_reduce(x, group=group, op="mean", algorithm="native").cpu(), torch.full((5,), 1.5)
    )


def test_native(world, device):
    world(2).run(_native, device)


def _in_order(rank: int, group: Any, device: torch.device, algorithm: str) -> None:
    n = dist.get_world_size(group)
    xs = [torch.full((1000 * (i % 3) + 1,), float(i + rank), device=device) for i in range(20)]
    works = [all_reduce(x, group=group, algorithm=algorithm, async_op=True) for x in xs[:-1]]
    dist.barrier(group)  # the backend's own collectives don't meet ours
    all_reduce(xs[-1], group=group, algorithm=algorithm)  # waits for its turn
    assert all(work.is_completed() for work in works)
    for i, (x, work) in enumerate(zip(xs, [*works, None], strict=True)):
        if work is not None:
            assert work.wait() is x
        assert torch.equal(x.cpu(), torch.full_like(x, float(sum(i + r for r in range(n)))).cpu())
    part = reduce_scatter(torch.ones(4, 2, device=device), group=group, async_op=True).wait()
    whole = all_gather(part, group=group, length=4, async_op=True).wait()
    assert torch.equal(whole.cpu(), torch.full((4, 2), float(n)))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "two_shot"])
def test_asynchronous_collectives_run_in_the_order_of_calls(world, device, algorithm):
    world(3).run(_in_order, device, algorithm)


def _disagree(rank: int, group: Any, algorithm: str) -> list[str]:
    messages = []
    odd = dist.get_world_size(group) - 1

    def expect(call: Any) -> None:
        with pytest.raises(DisagreementError) as caught:
            call()
        messages.append(str(caught.value))

    size = 100_000
    expect(
        lambda: all_reduce(
            torch.ones(size + (rank == odd)),
            group=group,
            algorithm=algorithm,
            label="bucket 3 of 7",
        )
    )
    expect(
        lambda: all_reduce(
            torch.ones(8, dtype=torch.int32 if rank == odd else torch.float32),
            group=group,
            algorithm=algorithm,
        )
    )
    expect(
        lambda: all_reduce(
            torch.ones(8), op="mean" if rank == odd else "sum", group=group, algorithm=algorithm
        )
    )
    if rank == odd:
        expect(lambda: reduce_scatter(torch.ones(8), group=group, algorithm=algorithm))
    else:
        expect(lambda: all_reduce(torch.ones(8), group=group, algorithm=algorithm))
    # The group is as good as before.
    assert all_reduce(torch.ones(2), group=group, algorithm=algorithm)[0] == dist.get_world_size(
        group
    )
    return messages


@pytest.mark.cpu_only
@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_all_raise_and_none_hangs(world, size, algorithm):
    found = world(size).run(_disagree, algorithm)
    for rank, messages in enumerate(found):
        assert "bucket 3 of 7" in messages[0]
        assert "100000 elements of" in messages[0]
        assert "100001 elements of" in messages[0]
        assert f"rank {size - 1 if rank < size - 1 else 0}" in messages[0]
        assert all(
            "ranks must call the same collectives in the same order" in text for text in messages
        )


def _refuse(rank: int, group: Any) -> None:
    x = torch.ones(4)
    for call, error, words in [
        (
            lambda: all_reduce(x, group=group, op="max"),
            ValueError,
            "op must be 'sum' or 'mean', got 'max'",
        ),
        (
            lambda: all_reduce(x, group=group, algorithm="rings"),
            ValueError,
            "algorithm must be one of .* got 'rings'",
        ),
        (lambda: all_reduce(x.int(), group=group, op="mean"), TypeError, "the mean of torch.int32"),
        (
            lambda: all_reduce(x.to(torch.float8_e5m2), group=group),
            TypeError,
            "float8_e5m2 tensors can't be summed",
        ),
        (lambda: all_reduce(x.to_sparse(), group=group), ValueError, "to_dense"),
        (lambda: all_reduce(x[:1].expand(3), group=group), ValueError, "expanded tensor"),
        (
            lambda: all_reduce(x.to("meta"), group=group, algorithm="shared_memory"),
            ValueError,
            "a tensor on meta",
        ),
        (lambda: all_gather(x.to("meta"), group=group), ValueError, "a tensor on meta"),
        (lambda: all_reduce(x, group=group, segment_bytes=5), ValueError, "segment_bytes is 5"),
        (lambda: all_reduce(x, group=group, offset=-1), ValueError, "offset is -1"),
        (lambda: all_reduce(x, group="world"), ValueError, "group must be a process group"),
        (lambda: reduce_scatter(x[0], group=group), ValueError, "cuts dim 0"),
        (lambda: all_gather(x, group=group, length=5), ValueError, "gives 4 rows"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert torch.equal(x, torch.ones(4))


@pytest.mark.cpu_only
def test_what_is_refused_is_refused_before_anything_changes(world):
    world(2).run(_refuse)


def test_one_process_is_one_rank():
    x = torch.ones(3)
    for group in (None, ALONE):
        assert all_reduce(x, op="mean", group=group) is x
        assert all_reduce(x, group=group, async_op=True).wait() is x
        assert torch.equal(reduce_scatter(x, group=group), x)
        assert torch.equal(all_gather(x, group=group), x)
        assert Communicator.of(group).size == 1
    assert torch.equal(x, torch.ones(3))


def _some_alone(rank: int, group: Any) -> list[float]:
    """Rank 0 is alone for one collective; the group's go on."""
    x = torch.full((2,), 1.0 + rank)
    if rank == 0:
        all_reduce(x, group=ALONE)
        compressed_all_reduce(x, codec=Identity(), group=ALONE)
    return all_reduce(x, group=group).tolist()


def test_a_rank_alone_among_others(world):
    assert world(2).run(_some_alone) == [[3.0, 3.0]] * 2


def test_unknown_details_are_refused():
    with pytest.raises(TypeError, match=r"all_reduce\(\) got an unexpected .* 'lable'"):
        all_reduce(torch.ones(1), lable="bucket")
    with pytest.raises(TypeError, match=r"all_reduce: the argument reduction .* op"):
        all_reduce(torch.ones(1), reduction="mean")


def _groups_come_and_go(rank: int, group: Any) -> None:
    for turn in range(3):
        half = dist.new_group([0, 1])
        if rank < 2:
            for algorithm in ("auto", "two_shot"):
                assert all_reduce(torch.ones(2), group=half, algorithm=algorithm)[0] == 2
            all_reduce(torch.ones(2), group=half, async_op=True).wait()
            first = Communicator.of(half)
            assert first is Communicator.of(half)
            if turn == 1:
                release(half)
                assert Communicator.of(half) is not first
                assert all_reduce(torch.ones(2), group=half)[0] == 2
        else:
            with pytest.raises(
                ValueError, match="group must be a process group that this rank is in"
            ):
                all_reduce(torch.ones(2), group=half)
        dist.barrier(group)
        if rank < 2:
            dist.destroy_process_group(half)
            with pytest.raises(RuntimeError, match="was destroyed"):
                del half
                import gc

                gc.collect()
                _ = first.group


@pytest.mark.cpu_only
def test_groups_come_and_go(world):
    world(3).run(_groups_come_and_go)
