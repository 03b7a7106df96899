"""The backend's own collectives: how many calls they take, what they allocate and copy, and whose
mean it is."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.comm import Communicator, all_gather, all_reduce, reduce_scatter

pytestmark = pytest.mark.cpu_only

FORMS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class Traffic(TorchDispatchMode):
    """Bytes that are allocated, and bytes that are copied from tensor to tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.copied = 0
        self.inside = False  # what a backend copies is its own affair

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = "" if self.inside else func.overloadpacket.__name__
        if name in ("new_empty", "new_zeros", "empty", "zeros", "clone"):
            self.allocated += out.numel() * out.element_size()
        if name in ("copy_", "cat", "clone", "zero_", "mul_", "div_"):
            self.copied += out.numel() * out.element_size()
        return out


def _counted(rank: int, group: Any, collective: str, rows: int) -> tuple[list[str], int, int]:
    """Names of the calls, bytes allocated, bytes copied."""
    n, calls = dist.get_world_size(group), []
    x = torch.arange(8.0 * rows).view(rows, 8) + rank
    own = x.tensor_split(n)[rank].clone()
    whole, part, traffic = torch.empty(rows, 8), torch.empty_like(own), Traffic()

    def recorded(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            traffic.inside = True
            try:
                return real(*args, **kwargs)
            finally:
                traffic.inside = False

        return mock.patch.object(dist, name, call)

    options: dict[str, Any] = {"group": group, "algorithm": "native"}
    with contextlib.ExitStack() as stack:
        for name in FORMS:
            stack.enter_context(recorded(name))
        stack.enter_context(traffic)
        if collective == "gather":
            all_gather(own, length=rows, out=whole, **options)
        else:
            reduce_scatter(x, out=part, **options)
    if collective == "gather":
        expected = torch.cat([(x - rank + r).tensor_split(n)[r] for r in range(n)])
        assert torch.equal(whole, expected)
    else:
        total = n * (x - rank) + sum(range(n))
        assert torch.equal(part, total.tensor_split(n)[rank])
    return calls, traffic.allocated, traffic.copied


@pytest.mark.parametrize("size", [2, 3])
def test_equal_parts_are_neither_padded_nor_copied(world, size):
    for collective, form in (("gather", FORMS[2]), ("scatter", FORMS[4])):
        for calls, allocated, copied in world(size).run(_counted, collective, 6 * size):
            assert calls == [form]
            assert allocated == copied == 0, collective


@pytest.mark.parametrize("size", [2, 3])
def test_unequal_parts_take_one_padded_call(world, size):
    rows = 6 * size + 1
    row, padded = 8 * 4, 7 * size * 8 * 4
    for calls, allocated, copied in world(size).run(_counted, "gather", rows):
        assert calls == [FORMS[2]]
        assert allocated == padded + 7 * row  # the ranks' parts and what is sent
        assert copied <= rows * row + 2 * 7 * row  # out once, and what is sent: cleared and filled
    for calls, allocated, copied in world(size).run(_counted, "scatter", rows):
        assert calls == [FORMS[4]]
        assert allocated == padded + 7 * row
        assert copied <= padded + rows * row + 7 * row


def _mean_on_nccl(rank: int, group: Any) -> list[str]:
    """Means of this group as if it were NCCL's, whose average scales before it adds."""
    n, asked = dist.get_world_size(group), []
    comm = Communicator.of(group)

    def averaging(real: Any) -> Any:
        def call(*tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
            asked.append(str(op).rsplit(".", 1)[-1])
            if op == dist.ReduceOp.AVG:
                tensors[-1].div_(n)
            return real(*tensors, op=dist.ReduceOp.SUM, group=group)

        return call

    options: dict[str, Any] = {"algorithm": "native", "communicator": comm}
    with (
        mock.patch.object(comm, "backend", return_value="nccl"),
        mock.patch.object(dist, "all_reduce", averaging(dist.all_reduce)),
        mock.patch.object(dist, "reduce_scatter_tensor", averaging(dist.reduce_scatter_tensor)),
    ):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = torch.full((2 * n,), 40000.0).to(dtype)
            expected = x.clone()
            assert torch.equal(all_reduce(x.clone(), op="mean", **options), expected)
            part = reduce_scatter(x.clone(), op="mean", **options)
            assert torch.equal(part, expected[:2])
            part = reduce_scatter(x.clone()[1:], op="mean", **options)  # unequal parts
            assert torch.equal(part, expected[: len(part)])
        summed = all_reduce(torch.ones(3), op="sum", **options)
        assert torch.equal(summed, torch.full((3,), float(n)))
        turned = all_reduce(torch.full((3,), 1 + 2j), op="mean", **options)  # as pairs of reals
        assert torch.equal(turned, torch.full((3,), 1 + 2j))
    return asked


def test_a_mean_on_nccl_does_not_overflow(world):
    for asked in world(2).run(_mean_on_nccl):
        assert asked == ["AVG"] * 9 + ["SUM", "AVG"]
