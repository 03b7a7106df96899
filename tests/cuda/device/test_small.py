"""Every CUDA kernel at small, odd sizes, and how it is launched: one launch, current stream, no
wait, inside a CUDA graph.

Small on purpose: `make gpu` runs this file under compute-sanitizer too. The numbers at length are
tests/ops' business.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyops.ops import random
from pyops.ops.communication import reduce
from pyops.ops.optimizers import grad_norm, optim
from pyops.ops.optimizers.table import optimizer_table
from tests.conftest import DEVICE

pytestmark = pytest.mark.skipif(
    not DEVICE.startswith("cuda"), reason="needs a GPU: PYOPS_TEST_DEVICE=cuda"
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SCALARS = {
    "lr": 0.03,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-3,
    "weight_decay": 0.2,
    "decoupled": True,
    "maximize": False,
    "zero_grads": False,
    "seed": 7,
}
DTYPES = [
    (FP32, FP32, FP32, None),
    (BF16, BF16, FP32, FP32),
    (BF16, BF16, BF16, None),
    (FP16, BF16, FP16, FP16),
]


def make_lists(
    p: torch.dtype,
    g: torch.dtype,
    m: torch.dtype,
    master: torch.dtype | None,
    *,
    sizes: tuple[int, ...] = (1, 77, 4101, 0, 9000),
    shift: int = 0,
) -> list[list[torch.Tensor]]:
    """The eight lists of `adam_` on the CPU, every tensor `shift` elements into its buffer."""
    torch.manual_seed(1)

    def several(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
        return [(torch.randn(n + shift) * scale).to(dtype)[shift:] for n in sizes]

    return [
        several(p),
        several(g),
        several(m, 0.1),
        [v.abs() for v in several(m)],
        [],
        several(master) if master else [],
        several(FP16),
        [torch.tensor(float(2 + i % 3)) for i in range(len(sizes))],
    ]


def on(device: torch.device, lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The lists on a device, with the storage offsets they had."""

    def move(t: torch.Tensor) -> torch.Tensor:
        whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).to(
            device
        )
        return whole.as_strided(t.shape, t.stride(), t.storage_offset())

    return [[move(t) for t in column] for column in lists]


def close(ours: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for column, wanted in zip(ours, expected, strict=True):
        for a, b in zip(column, wanted, strict=True):
            eps = torch.finfo(b.dtype).eps
            torch.testing.assert_close(
                a.cpu().float(), b.float(), rtol=2 * eps, atol=4 * eps if b.dtype != FP32 else 1e-6
            )


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("p", "g", "m", "master"), DTYPES, ids=str)
def test_adam_agrees_with_plain_torch(device, p, g, m, master, stochastic, shift):
    lists = make_lists(p, g, m, master, shift=shift)
    ours = on(device, lists)
    before = ours[0][4].clone()
    factor = torch.tensor(0.5)
    optim.adam_(
        *ours, None, factor.to(device), None, **SCALARS, stochastic_rounding=stochastic, offsets=[]
    )
    optim.adam_reference(
        *lists, None, factor, None, **SCALARS, stochastic_rounding=stochastic, offsets=[]
    )
    close(ours, lists)
    assert not torch.equal(ours[0][4], before)


def test_a_list_longer_than_the_arguments_of_a_launch(device):
    lists = make_lists(FP32, FP32, FP32, None, sizes=tuple(1 + i % 5 for i in range(1301)))
    ours = on(device, lists)
    expected = grad_norm.squared_norm_reference(lists[1])
    torch.testing.assert_close(grad_norm.squared_norm(ours[1]).cpu(), expected, rtol=1e-12, atol=0)
    optim.adam_(*ours, **SCALARS, stochastic_rounding=False, offsets=[])
    optim.adam_reference(*lists, **SCALARS, stochastic_rounding=False, offsets=[])
    close(ours, lists)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_norm(device, dtype):
    tensors = [t.to(dtype)[1:] for t in (torch.randn(2), torch.randn(4100), torch.randn(70001))]
    tensors[1][3] = float("inf")
    ours = grad_norm.squared_norm([t.to(device) for t in tensors])
    assert ours.tolist() == [float("inf"), 1.0]
    tensors[1][3] = 0.5
    moved = [t.to(device) for t in tensors]
    ours, again = grad_norm.squared_norm(moved), grad_norm.squared_norm(moved)
    torch.testing.assert_close(
        ours.cpu(), grad_norm.squared_norm_reference(tensors), rtol=1e-12, atol=0
    )
    assert torch.equal(ours, again)


@pytest.mark.parametrize(
    ("to", "source"),
    [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32), (FP16, FP16)],
    ids=str,
)
def test_sums(device, to, source):
    for numel in (1, 4097):
        rows = [torch.randn(numel + 1).to(source)[1:] for _ in range(7)]
        start = torch.randn(numel).to(to)
        for function, reference, operands in (
            (reduce.sum_rows_, reduce.sum_rows_reference, rows),
            (reduce.accumulate_, reduce.accumulate_reference, rows[0]),
            (reduce.scale_cast_, reduce.scale_cast_reference, rows[0]),
        ):
            expected, ours = start.clone(), start.to(device)
            reference(expected, operands, scale=0.3)
            function(
                ours,
                [r.to(device) for r in rows] if operands is rows else operands.to(device),
                scale=0.3,
            )
            assert torch.equal(ours.cpu(), expected)


def test_random_bits_are_those_of_the_cpu(device):
    place = {"key": -99, "offset": 6, "row": 10, "row_stride": 37}
    for ours, reference, dtype, extra in (
        (random.philox_uniform_, random.philox_uniform_reference, FP32, {}),
        (random.philox_normal_, random.philox_normal_reference, FP32, {}),
        (random.philox_dropout_mask_, random.philox_dropout_mask_reference, torch.bool, {"p": 0.3}),
    ):
        out, expected = (
            torch.zeros(10007, dtype=dtype, device=device),
            torch.zeros(10007, dtype=dtype),
        )
        ours(out, **extra, **place)
        reference(expected, **extra, **place)
        assert torch.equal(out.cpu(), expected)


def step_of(lists: list[list[torch.Tensor]], table: torch.Tensor | None) -> Callable[[], None]:
    """Norm, clip and step, as the optimizer does them; of the table or of the lists."""

    def step() -> None:
        norm = (
            grad_norm.squared_norm(lists[1])
            if table is None
            else grad_norm.squared_norm_from_table(table)
        )
        factor = (1.0 / norm[0].sqrt()).clamp(max=1.0).float()
        if table is None:
            optim.adam_(*lists, None, factor, None, **SCALARS, stochastic_rounding=True, offsets=[])
        else:
            optim.adam_from_table_(table, None, factor, None, **SCALARS, stochastic_rounding=True)

    return step


@pytest.mark.parametrize("from_table", [False, True])
def test_a_graph_replays_the_step(device, from_table):
    lists = on(device, make_lists(BF16, BF16, BF16, None))
    eager = on(device, make_lists(BF16, BF16, BF16, None))
    for _ in range(5):
        step_of(eager, None)()
    step = step_of(lists, optimizer_table(*lists) if from_table else None)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        graph.replay()
    assert all(
        torch.equal(a, b)
        for left, right in zip(lists, eager, strict=True)
        for a, b in zip(left, right, strict=True)
    )
    assert lists[7][0].item() == 7.0


@pytest.mark.real_device
@pytest.mark.parametrize("from_table", [False, True])
def test_nothing_waits_for_the_device(device, from_table):
    lists = on(device, make_lists(FP32, BF16, FP32, None))
    step = step_of(lists, optimizer_table(*lists) if from_table else None)
    step()  # loaded at its first launch, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        waited = busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the step returned only after the work before it was done"


@pytest.mark.real_device
def test_the_current_stream_is_used(device):
    out = torch.zeros(1 << 20, device=device)
    random.philox_uniform_(
        out, key=1, offset=0, row=1 << 20, row_stride=0
    )  # loaded at its first launch, which may wait
    out.zero_()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        random.philox_uniform_(out, key=1, offset=0, row=1 << 20, row_stride=0)
        early = torch.cuda.Event()
        early.record(side)
    assert not early.query(), "the kernel did not wait for the work before it on its stream"
    side.synchronize()
    assert out.max() > 0.5


@pytest.mark.real_device
def test_one_launch(device):
    lists = on(device, make_lists(FP32, FP32, FP32, None, sizes=tuple(range(1, 500))))
    table = optimizer_table(*lists)
    run = {"stochastic_rounding": False, **SCALARS}
    optim.adam_from_table_(table, **run)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optim.adam_from_table_(table, **run)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("the profiler sees no kernels on this machine")
    assert len(kernels) == 1, kernels
