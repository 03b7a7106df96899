"""algorithm="symmetric" on ranks that have no symmetric memory: all take the backend's own, alike,
and say so once. What it does where there is some: tests/cuda/symmetric."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm import all_gather, all_reduce, reduce_scatter
from pyops.comm.collectives import two_shot
from pyops.comm.collectives.symmetric import symmetric_empty
from pyops.mesh import ALONE
from pyops.ops.optimizers.grad_norm import squared_norm

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")


def _calls(rank: int, group: Any) -> tuple[list[str], list[torch.Tensor]]:
    group = dist.new_group(range(dist.get_world_size(group)))  # that has said nothing so far
    size = dist.get_world_size(group)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = []
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            x = torch.arange(7 * size).to(dtype) + rank
            for options in ({}, {"async_op": True}):
                y = x.clone()
                out = all_reduce(y, group=group, algorithm="symmetric", **options)
                found.append(out.wait() if options else out)
            found.append(reduce_scatter(x, group=group, algorithm="symmetric"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(two_shot, "all_gather", None)  # it is not what gathers
                found.append(all_gather(x[rank : rank + 2], group=group, algorithm="symmetric"))
        buffer, main = (symmetric_empty(9, dtype=t, device=CPU, group=group) for t in _MAIN)
        norm = torch.zeros(2, dtype=torch.float64)
        buffer.tensor.copy_(torch.arange(9) + rank)
        buffer.all_reduce(op="mean", main=main, norm=norm)
        part = torch.zeros(9 if rank == 0 else 0)
        buffer.reduce_scatter(part, starts=[0, *[9] * size])
        buffer.all_reduce()
        found += [main.tensor, norm, part, buffer.tensor.clone()]
        buffer.free()
        with pytest.raises(ValueError, match="was freed"):
            buffer.all_reduce()
    dist.destroy_process_group(group)
    return [str(w.message) for w in said if "symmetric" in str(w.message)], found


_MAIN = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_the_cpu_take_the_backends_own_and_say_so_once(world, size):
    results = world(size).run(_calls)
    said, _ = zip(*results, strict=True)
    assert [len(texts) for texts in said] == [1] + [0] * (size - 1)
    assert "rank 0: tensors on the CPU have no symmetric memory" in said[0][0]
    more = size * (size - 1) // 2
    for rank, (_, found) in enumerate(results):
        for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.int32)):
            total = (size * torch.arange(7 * size) + more).to(dtype)
            one, later, part, whole = found[4 * k : 4 * k + 4]
            assert torch.equal(one, total)
            assert torch.equal(later, total)
            assert torch.equal(part, total[7 * rank : 7 * rank + 7])
            assert whole.tolist() == [2 * r + i for r in range(size) for i in (0, 1)]
        main, norm, part, buffer = found[-4:]
        total = (size * torch.arange(9) + more).float()
        torch.testing.assert_close(main, total / size)
        assert torch.equal(norm, squared_norm([main]))
        assert torch.equal(part, total if rank == 0 else total[:0])
        assert torch.equal(buffer.float(), total)


def test_one_process_has_nobody_to_share_with():
    x = torch.arange(5.0)
    assert torch.equal(all_reduce(x.clone(), group=ALONE, algorithm="symmetric"), x)
    buffer = symmetric_empty(5, dtype=torch.float32, device=CPU, group=ALONE)
    buffer.tensor.copy_(x)
    assert torch.equal(buffer.all_reduce(op="mean"), x)


@pytest.mark.parametrize(
    ("numel", "dtype", "message"),
    [(0, torch.float32, "numel is 0"), (4, torch.int32, "dtype must be one of")],
)
def test_refused(numel, dtype, message):
    with pytest.raises(ValueError, match=message):
        symmetric_empty(numel, dtype=dtype, device=CPU, group=ALONE)


def test_what_a_buffer_refuses():
    buffer = symmetric_empty(5, dtype=torch.bfloat16, device=CPU, group=ALONE)
    with pytest.raises(ValueError, match="op must be"):
        buffer.all_reduce(op="max")
    with pytest.raises(ValueError, match="give a symmetric buffer of 5 elements of float32"):
        buffer.all_reduce(main=symmetric_empty(4, dtype=torch.float32, device=CPU, group=ALONE))
    with pytest.raises(ValueError, match="out has 3 elements"):
        buffer.reduce_scatter(torch.zeros(3), starts=[0, 5])
