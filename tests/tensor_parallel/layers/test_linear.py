"""Linear layers on 1 to 4 ranks against one rank in float64; what they send; what they refuse."""

from __future__ import annotations

import subprocess
import sys
import types
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory

from pyops.comm import Communicator
from pyops.mesh import ALONE, Axes, Mesh
from pyops.tensor_parallel import ColumnParallelLinear, Ranks, RowParallelLinear
from pyops.tensor_parallel.functional import symmetric
from tests.grids import cut, full
from tests.tensor_parallel.shared_layers import Case, configured, errors_on_rank, mean

pytestmark = pytest.mark.on_device


class Pair(nn.Module):
    """Column, a function of zero at zero, row."""

    def __init__(self, width: int, inner: int, *, bias: bool = True, **shared: Any) -> None:
        super().__init__()
        self.column = configured(ColumnParallelLinear, width, inner, bias=bias, **shared)
        self.row = configured(RowParallelLinear, inner, width, bias=bias, **shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(torch.tanh(self.column(x)))


def skipped(layer: nn.Module, x: Tensor, shape: Any) -> Tensor:
    y, bias = layer(x)
    return y + bias


CASES = {
    "column": Case(partial(configured, ColumnParallelLinear, 6, 12), 6, y_unit=1),
    "column, padded": Case(partial(configured, ColumnParallelLinear, 6, 7), 6, y_unit=1),
    "column, padded units": Case(
        partial(configured, ColumnParallelLinear, 6, 10, unit=2), 6, y_unit=2
    ),
    "column, no bias": Case(
        partial(configured, ColumnParallelLinear, 6, 12, bias=False), 6, y_unit=1
    ),
    "column, bias skipped": Case(
        partial(configured, ColumnParallelLinear, 6, 12, skip_bias=True), 6, skipped, y_unit=1
    ),
    "row": Case(partial(configured, RowParallelLinear, 12, 6), 12, x_unit=1),
    "row, padded": Case(partial(configured, RowParallelLinear, 7, 6), 7, x_unit=1),
    "row, no bias": Case(partial(configured, RowParallelLinear, 12, 6, bias=False), 12, x_unit=1),
    "row, bias skipped": Case(
        partial(configured, RowParallelLinear, 12, 6, skip_bias=True), 12, skipped, x_unit=1
    ),
    "pair": Case(partial(Pair, 6, 12), 6),
    "pair, padded": Case(partial(Pair, 6, 7), 6),
}
SHAPES = ((2, 6), (1, 5))
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}


def errors(rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        for shape in SHAPES:  # 12 tokens, and 5: of 4 ranks the last has padding only
            for sp in (False, True)[: 1 if group is None else 2]:
                key = f"{name}, {shape}, sequence_parallel={sp}"
                found[key] = errors_on_rank(
                    group, case, shape=shape, dtype=dtype, sequence_parallel=sp
                )
    return found


GRID = [(size, dtype) for size in (1, 2, 3, 4) for dtype in BOUND]
# float64 shows what is added where; float32, on two ranks, that sums of parts lose nothing.
IN_SUITE = [(1, torch.float64), (2, torch.float32), (3, torch.float64)]


@pytest.mark.parametrize(("size", "dtype"), cut(GRID, keep=IN_SUITE), ids=str)
def test_output_and_gradients_are_those_of_one_rank(world, size: int, dtype: torch.dtype):
    results = world(size).run(errors, dtype) if size > 1 else [errors(0, None, dtype)]
    for found in results:
        assert len(found) == len(CASES) * (2 if size == 1 else 4)
        for name, (shared, _) in found.items():
            assert max(shared.values()) <= BOUND[dtype], (name, shared)


def wide_errors(rank: int, group: dist.ProcessGroup, reduce: str) -> dict[str, Any]:
    """Rows wide enough that a sum of rounded parts differs from a rounded sum."""
    torch.manual_seed(1)
    found = {}
    for name, case in {
        "column": Case(partial(configured, ColumnParallelLinear, 32, 1024), 32, y_unit=1),
        "row": Case(partial(configured, RowParallelLinear, 1024, 32), 1024, x_unit=1),
    }.items():
        for sp in (False, True):
            found[f"{name} {sp}"] = rms(group, case, sp, reduce)
    return found


def rms(group: dist.ProcessGroup, case: Case, sp: bool, reduce: str) -> Any:
    return errors_on_rank(
        group,
        case,
        shape=(4, 32),
        dtype=torch.bfloat16,
        sequence_parallel=sp,
        reduce=reduce,
        distance=mean,
    )


@pytest.mark.parametrize("size", [full(2), 4])
def test_bf16_error_is_that_of_one_rank(world, size: int):
    wide, native = (world(size).run(wide_errors, reduce) for reduce in ("fp32", "native"))
    for name in wide[0]:
        what = "y" if "row" in name else "dx"
        ours, alone, rounded = (
            sum(f[name][i][what] for f in found) / size
            for found, i in ((wide, 0), (wide, 1), (native, 0))
        )
        assert ours <= 1.1 * alone, (name, ours, alone)
        assert rounded > 1.1 * alone, (name, rounded, alone)  # so the bound can tell


def traffic(
    rank: int, group: dist.ProcessGroup, sp: bool, dtype: torch.dtype, reduce: str
) -> dict[str, Any]:
    """(collectives, bytes) of forward and backward of a pair over 16 tokens, 8 wide."""
    comm = Communicator.of(group)
    layer = Pair(8, 16, group=group, sequence_parallel=sp, reduce=reduce).to(dtype)
    x = torch.randn(16 // (comm.size if sp else 1), 8, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()  # what only a group's first collectives do is done
    found = {}
    before = comm.sequence, comm.bytes_sent
    y = layer(x)
    found["forward"] = comm.sequence - before[0], comm.bytes_sent - before[1]
    before = comm.sequence, comm.bytes_sent
    y.sum().backward()
    found["backward"] = comm.sequence - before[0], comm.bytes_sent - before[1]
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "native")],
)
def test_collectives_and_bytes(world, size: int, dtype: torch.dtype, reduce: str):
    """Without sequence parallelism one all-reduce each way; with it a gather and a reduce_scatter
    each way, and the column's input gathered once more. A gather or a reduce_scatter of n elements
    sends n (t - 1) / t, an all-reduce twice that."""
    share = 16 * 8 * (size - 1) // size
    item = dtype.itemsize
    summed = 4 if reduce == "fp32" else item  # parts of sums travel in fp32
    for found in world(size).run(traffic, False, dtype, reduce):
        assert found == {"forward": (1, 2 * share * summed), "backward": (1, 2 * share * summed)}
    for found in world(size).run(traffic, True, dtype, reduce):
        assert found["forward"] == (2, share * (item + summed))
        assert found["backward"] == (3, share * (2 * item + summed))


def overlapped(rank: int, group: dist.ProcessGroup, sp: bool, overlap: bool) -> list[Tensor]:
    layer = Pair(32, 64, group=group, sequence_parallel=sp, overlap=overlap)
    torch.manual_seed(rank)
    x = torch.randn(24, 32, requires_grad=True)
    torch.tanh(layer(x)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.parameters())
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("sp", [False, True])
def test_overlap_changes_no_bit(world, sp: bool):
    with_, without = (world(2).run(overlapped, sp, overlap) for overlap in (True, False))
    for a, b in zip(with_, without, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fused(rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    """`errors` with torch's own stand-ins for its fused kernels, which no CPU has; and how often
    they were called."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args)

        return call

    op = types.SimpleNamespace(
        fused_all_gather_matmul=counted(_symmetric_memory._fused_all_gather_matmul_fallback),
        fused_matmul_reduce_scatter=counted(
            _symmetric_memory._fused_matmul_reduce_scatter_fallback
        ),
    )
    before = symmetric.fuses, symmetric.torch
    try:
        symmetric.fuses = lambda x, ranks, *, rows: ranks.size > 1 and rows % ranks.size == 0
        symmetric.torch = types.SimpleNamespace(ops=types.SimpleNamespace(symm_mem=op))
        found = errors(rank, group, dtype)
    finally:
        symmetric.fuses, symmetric.torch = before
    return found, calls


def test_products_fused_with_their_collective(world):
    for dtype in (torch.float64, torch.float32):
        for found, calls in world(2).run(fused, dtype):
            assert calls > 8
            for name, (shared, _) in found.items():
                assert max(shared.values()) <= BOUND[dtype], (name, shared)


def test_products_are_fused_on_large_gpu_tensors_alone():
    ranks = Ranks.of(ALONE)
    assert not symmetric.fuses(torch.empty(0), ranks, rows=1 << 30)


def shared(rank: int, group: dist.ProcessGroup) -> list[tuple[bool, int]]:
    """What ranks find, and how often they mapped memory: with it on all, and with one that has
    none, or can't map."""
    found = []
    for lacks, fails in ((-1, -1), (1, -1), (-1, 0)):
        mapped = []

        def memory(numel: int, lacks: int = lacks, **_: Any) -> Tensor:
            if rank == lacks:
                raise ImportError("no such memory")
            return torch.empty(16)

        def share(memory: Tensor, group: Any, fails: int = fails, mapped: Any = mapped) -> None:
            mapped.append(1)
            if rank == fails:
                raise RuntimeError("no peer access")

        patched = {"symmetric_empty_tensor": memory, "symmetric_rendezvous": share}
        symmetric._found.clear()
        with mock.patch.multiple(symmetric, **patched):
            answers = {symmetric.shares_memory(group, torch.device("cpu")) for _ in range(3)}
        symmetric._found.clear()
        found.append((*answers, len(mapped)))
    return found


@pytest.mark.cpu_only
def test_ranks_agree_whether_they_share_memory(world):
    assert world(2).run(shared) == [[(True, 1), (False, 0), (False, 1)]] * 2


@pytest.mark.full  # an interpreter of its own; test_torch_private.py finds private names by reading
@pytest.mark.cpu_only
def test_tensor_parallelism_needs_no_private_names_to_be_imported():
    """Of a torch that has no symmetric memory any more."""
    code = (
        "import sys, importlib.abc\n"
        "sys.modules['torch.distributed._symmetric_memory'] = None\n"
        "import pyops.tensor_parallel\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def frozen(rank: int, group: dist.ProcessGroup) -> tuple[int, int, bool]:
    comm = Communicator.of(group)
    layer = ColumnParallelLinear(8, 16, group=group, sequence_parallel=True)
    layer.weight.requires_grad_(False)
    saved = []
    x = torch.randn(4, 8, requires_grad=True)
    layer(x)
    before = comm.sequence
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    y.sum().backward()
    return (
        sum(t.numel() for t in saved),
        comm.sequence - before,
        layer.weight.grad is None and bool(x.grad.any()),
    )


def test_a_frozen_weight_saves_no_input_and_gathers_none(world):
    assert world(2).run(frozen) == [(64, 2, True)] * 2


def main_gradients(rank: int, group: dist.ProcessGroup | None) -> None:
    for sp in (False, True):
        layer, plain = (Pair(8, 16, group=group, sequence_parallel=sp).bfloat16() for _ in range(2))
        for weight in (layer.column.weight, layer.row.weight):
            weight.main_grad = torch.zeros(weight.shape)
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(6, 8).bfloat16()
            for each in (layer, plain):
                each(x.clone().requires_grad_()).float().square().sum().backward()
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            if hasattr(ours, "main_grad"):
                assert ours.grad is None
                assert (
                    ours.main_grad - theirs.grad.float()
                ).abs().max() <= 0.02 * theirs.grad.abs().max()
                assert ours.main_grad.abs().max() > 0
            else:
                assert torch.equal(ours.grad, theirs.grad)


def test_weight_gradients_add_up_in_main_grad(world):
    main_gradients(0, None)
    world(2).run(main_gradients)


def options(rank: int, group: dist.ProcessGroup | None) -> None:
    whole_column = ColumnParallelLinear(6, 7, group=ALONE)
    whole_row = RowParallelLinear(7, 6, group=ALONE)
    column = configured(ColumnParallelLinear, 6, 7, group=group, gather_output=True)
    row = configured(RowParallelLinear, 7, 6, group=group, scatter_input=True)
    results = []
    for a, b in ((column, row), (whole_column, whole_row)):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = a(x)
        z = b(y)
        z.square().sum().backward()
        results.append((y, z, x.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    assert results[0][2].abs().max() > 0


def test_gathered_output_and_scattered_input(world):
    options(0, None)
    world(3).run(options)


def autocast(rank: int, group: dist.ProcessGroup) -> None:
    layer, alone = Pair(8, 16, group=group), Pair(8, 16, group=ALONE)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, y1 = layer(x), alone(x)
    assert y.dtype == y1.dtype == torch.bfloat16
    torch.testing.assert_close(y, y1, rtol=0.02, atol=1e-4)
    y.float().square().sum().backward()
    assert layer.column.weight.grad.dtype == torch.float32
    assert layer.column.weight.grad.abs().max() > 0


@pytest.mark.cpu_only
def test_autocast(world):
    world(2).run(autocast)


def different_shapes(rank: int, group: dist.ProcessGroup) -> list[str]:
    texts = []
    for sp in (False, True):
        layer = Pair(8, 16, group=group, sequence_parallel=sp)
        with pytest.raises(RuntimeError) as caught:
            layer(torch.randn(3 + rank, 8))
        texts.append(str(caught.value))
    return texts


def test_ranks_with_different_shapes_fail_together(world):
    for texts in world(2).run(different_shapes):
        assert all("same collectives in the same order" in text for text in texts)


def test_one_rank_alone_computes_what_torch_does():
    column, row = ColumnParallelLinear(6, 4), RowParallelLinear(4, 5)
    x = torch.randn(2, 3, 6)
    assert torch.equal(column(x), nn.functional.linear(x, column.weight, column.bias))
    assert torch.equal(row(column(x)), nn.functional.linear(column(x), row.weight, row.bias))
    assert Ranks.of(None) == Ranks.of(ALONE) == Ranks.of(Mesh(Axes())) == Ranks(ALONE, 0, 1)


def test_refusals():
    for make, words in (
        (lambda: ColumnParallelLinear(0, 4), "in_features is 0"),
        (
            lambda: configured(RowParallelLinear, 4, 4, reduce="bf16"),
            "reduce is 'bf16'; choose one of fp32, native",
        ),
        (lambda: configured(ColumnParallelLinear, 4, 5, unit=2), "multiple of 2"),
        (
            lambda: configured(ColumnParallelLinear, 4, 4, stacked=2, gather_output=True),
            "gather_output",
        ),
        (lambda: ColumnParallelLinear(4, 4, group="tp"), "group is 'tp'"),
        (lambda: ColumnParallelLinear(4, 4)(torch.ones(2, 5)), "takes [..., 4] here"),
        (lambda: RowParallelLinear(4, 4)(torch.ones(2, 5)), "takes [..., 4] here"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            make()
        assert words in str(caught.value)
