"""Ranks that share one GPU: virtual ones, processes that speak by Gloo, and NCCL as far as it goes
on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyops.comm import (
    Communicator,
    ErrorFeedback,
    all_gather,
    all_reduce,
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
    reduce_scatter,
)
from pyops.comm.buckets.ddp import ddp_hook
from pyops.comm.collectives.transport import Transport, run_virtual
from pyops.comm.compression import compressed_shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.topk import TopK
from pyops.data_parallel import DataParallel
from pyops.optim import AdamW
from tests.conftest import DEVICE
from tests.workers import spawn_ranks
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part, rows

pytestmark = pytest.mark.skipif(
    not DEVICE.startswith("cuda"), reason="needs a GPU: PYOPS_TEST_DEVICE=cuda"
)

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 4
CODECS: list[Codec] = [OneBit(), OneBit(block=None), Int8(), FP8(), BF16(), TopK(ratio=0.1)]


def numbers(seed: int, numel: int, device: torch.device) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


# --------------------------------------------------------------------------------------------------
# virtual ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_compressed_over_virtual_ranks(device, codec, size):
    """What was seen and what is left out make up the means; all ranks see the same."""
    numel, count = 5003, 3
    errors = [
        ErrorFeedback(numel, codec=codec, rank=rank, size=size, device=device)
        for rank in range(size)
    ]

    def body(transport: Transport) -> Tensor:
        error, seen = errors[transport.rank], torch.zeros(numel, dtype=torch.float64, device=device)
        memory = compressed_shots.Memory(error.worker, error.server, error.overflowed)
        for k in range(count):
            x = numbers(10 * k + transport.rank, numel, device)
            compressed_shots.all_reduce(
                x,
                codec=codec,
                transport=transport,
                segment=1024,
                memory=memory,
                scale=1 / transport.size,
            )
            seen += x
        return seen

    found = run_virtual(size, body)
    assert all(torch.equal(seen, found[0]) for seen in found)
    means = (
        sum(
            numbers(10 * k + rank, numel, device).double()
            for k in range(count)
            for rank in range(size)
        )
        / size
    )
    left = (
        sum(e.worker.double() for e in errors) / size
        + torch.cat([e.server for e in errors]).double()
    )
    assert float(left.abs().max()) > 0, "nothing was left out"
    largest = float(torch.cat([part.abs() for e in errors for part in (e.worker, e.server)]).max())
    assert float((found[0] + left - means).abs().max()) <= count * 5 * 2.0**-24 * (5 + 2 * largest)
    assert not any(bool(e.overflowed) for e in errors)


# -------------------------------------------------------------------------------------------------
# Gloo, two processes


@contextlib.contextmanager
def _busy_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: a stream that is not the default one, with long work before what the block puts on
    it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(100_000_000)
        yield


def _beside(rank: int, group: Any, device: torch.device) -> None:
    """Operands that are still being computed when the collective is called, and results that are
    used on another stream."""
    n, numel = dist.get_world_size(group), 3 * (1 << 16)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda x: all_reduce(x, group=group, async_op=True, algorithm="two_shot"),
        "reduce_scatter": lambda x: reduce_scatter(
            x, group=group, async_op=True, algorithm="two_shot"
        ),
        "all_gather": lambda x: all_gather(x, group=group, async_op=True, algorithm="two_shot"),
        "compressed": lambda x: compressed_all_reduce(
            x, codec=Identity(), op="sum", group=group, async_op=True
        ),
    }
    total = n * (n + 1) / 2
    for name, call in calls.items():
        for _ in range(2):
            x = torch.zeros(numel, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            with _busy_stream(device):
                x.fill_(rank + 1.0)
                work = call(x)
            found = work.wait().clone()
            del x, work  # memory that was only used elsewhere would be taken by the next round
            expected = torch.full_like(found, total)
            if name == "all_gather":
                expected = torch.arange(1.0, n + 1, device=device).repeat_interleave(numel)
            assert torch.equal(found, expected), (name, found.unique()[:5])


def test_collectives_wait_for_their_operands(world, device):
    world(2).run(_beside, device)


def _compressed(rank: int, group: Any, device: torch.device, codec: Codec) -> list[Tensor]:
    """An all-reduce, a reduce-scatter and an all-gather, here and now or not."""
    found, comm = [], Communicator.of(group)
    for asynchronous in (False, True):
        error = ErrorFeedback(5003, codec=codec, communicator=comm, device=device)
        common: dict[str, Any] = {
            "codec": codec,
            "group": group,
            "async_op": asynchronous,
            "segment_bytes": 4096,
        }
        x = numbers(rank, 5003, device)
        works = [
            compressed_all_reduce(x, error=error, **common),
            compressed_reduce_scatter(numbers(rank, 5003, device), **common),
            compressed_all_gather(numbers(rank, 501, device), **common),
        ]
        found += [(work.wait() if asynchronous else work).cpu() for work in works]
    return found


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_compressed_by_gloo(world, device, codec):
    first, second = world(2).run(_compressed, device, codec)
    mean = (numbers(0, 5003, torch.device("cpu")) + numbers(1, 5003, torch.device("cpu"))) / 2
    for k in (0, 3):
        assert torch.equal(first[k], second[k]), "one result on all ranks"
        assert torch.equal(first[k + 2], second[k + 2])
        assert torch.equal(first[k], first[0])
        seen = torch.cat([first[k + 1], second[k + 1]])
        for each in (first[k], seen):
            assert nn.functional.cosine_similarity(each, mean, dim=0) > 0.4
        assert first[k + 2].shape == (1002,)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _alone(device: torch.device, max_grad_norm: float | None) -> dict[str, Tensor]:
    """One process with whole batches."""
    model = Net(mixed=False).to(device)
    optimizer = AdamW(groups(model), max_grad_norm=max_grad_norm, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (t.to(device) for t in rows(step))
        mean_loss(model, x, y, sometimes=step % 2 == 0).backward()
        optimizer.step()
    return _parameters(model)


def _take_steps(
    rank: int,
    group: Any,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero_grad: Callable[[], None],
) -> None:
    """STEPS steps on this rank's part of the rows."""
    for step in range(STEPS):
        zero_grad()
        x, y = (t.to(device) for t in part(step, rank, dist.get_world_size(group)))
        mean_loss(model, x, y, sometimes=step % 2 == 0).backward()
        optimizer.step()


def _replicas(
    rank: int, group: Any, device: torch.device, codec: Codec | None
) -> dict[str, Tensor]:
    model = DataParallel(
        Net(seed=rank, mixed=False).to(device), group=group, bucket_bytes=3000, codec=codec
    )
    optimizer = AdamW(groups(model), **OPTIONS)
    _take_steps(rank, group, device, model, optimizer, model.zero_grad)
    return _parameters(model.module)


def _hooked(rank: int, group: Any, device: torch.device, codec: Codec) -> dict[str, Tensor]:
    """torch's own data parallelism, with pyops' hook."""
    net = Net(mixed=False).to(device)
    model = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=0.003, find_unused_parameters=True
    )
    model.register_comm_hook(*ddp_hook(codec, group=group, model=model))
    optimizer = AdamW(groups(net), **OPTIONS)
    _take_steps(rank, group, device, model, optimizer, optimizer.zero_grad)
    return _parameters(net)


def _zero(
    rank: int, group: Any, device: torch.device, stage: int, max_grad_norm: float | None
) -> dict[str, Tensor]:
    model = Net(seed=rank, mixed=False).to(device)
    optimizer = zero_optimizer(
        model,
        AdamW,
        stage=stage,
        bucket_bytes=3000,
        max_grad_norm=max_grad_norm,
        group=group,
        params=groups(model),
        **OPTIONS,
    )
    _take_steps(rank, group, device, model, optimizer, optimizer.zero_grad)
    with optimizer.whole_parameters():
        return _parameters(model)


def _assert_trained(
    found: list[dict[str, Tensor]], expected: dict[str, Tensor], *, close: bool = True
) -> None:
    start = Net().state_dict()
    assert sum(float((p - start[name]).abs().max()) > 1e-3 for name, p in expected.items()) > 7, (
        "hardly anything moved"
    )
    for rank, parameters in enumerate(found):
        for name, p in parameters.items():
            assert torch.equal(p, found[0][name]), f"{name} differs between ranks"
            if close:
                torch.testing.assert_close(
                    p,
                    expected[name],
                    rtol=1e-4,
                    atol=1e-4,
                    msg=lambda m, n=name, r=rank: f"{n} of {r}: {m}",
                )


@pytest.mark.parametrize(
    "codec", [None, Identity(), Int8(), OneBit()], ids=lambda c: c.name if c else "exact"
)
def test_data_parallel_by_gloo(world, device, codec):
    found = world(2).run(_replicas, device, codec)
    _assert_trained(found, _alone(device, None), close=codec is None or not codec.feedback)


@pytest.mark.parametrize("codec", [Identity(), OneBit()], ids=lambda c: c.name)
def test_the_hook_by_gloo(world, device, codec):
    found = world(2).run(_hooked, device, codec)
    _assert_trained(found, _alone(device, None), close=not codec.feedback)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_by_gloo(world, device, stage, max_grad_norm):
    found = world(2).run(_zero, device, stage, max_grad_norm)
    _assert_trained(found, _alone(device, max_grad_norm))


# --------------------------------------------------------------------------------------------------
# NCCL


def _backend(device: torch.device, name: str) -> str:
    """On the CPU, where these bodies can be tried out, everything is Gloo's."""
    return name if device.type == "cuda" else "gloo"


def _by_nccl(rank: int, group: Any, device: torch.device, backend: str) -> list[dict[str, Tensor]]:
    """Everything above in a group that carries CUDA tensors by NCCL."""
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    nccl = dist.new_group(backend=_backend(device, backend))
    size = dist.get_world_size(nccl)
    probe = torch.ones(3, device=device)
    dist.all_reduce(probe, group=nccl)
    assert probe.tolist() == [size] * 3
    for algorithm in ("native", "two_shot", "ring", "auto"):
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.bool):
            common: dict[str, Any] = {"group": nccl, "algorithm": algorithm}
            if algorithm == "native" and dtype == torch.int16:
                continue  # NCCL has no sums of these
            x = torch.ones(1001, device=device).to(dtype)
            assert (
                all_reduce(x.clone(), **common).tolist()
                == [True if dtype == torch.bool else size] * 1001
            )
            assert (
                all_reduce(x.clone(), async_op=True, **common).wait().tolist()
                == all_reduce(x.clone(), **common).tolist()
            )
            mine = reduce_scatter(x, **common)
            assert torch.equal(
                all_gather(mine, length=1001, async_op=True, **common).wait(),
                all_reduce(x.clone(), **common),
            )
    _beside(rank, nccl, device)
    for codec in CODECS:
        _compressed(rank, nccl, device, codec)
    trained = [_replicas(rank, nccl, device, None), _hooked(rank, nccl, device, Identity())]
    trained += [_zero(rank, nccl, device, stage, None) for stage in (1, 2, 3)]
    expected = _alone(device, None)
    for found in trained:
        _assert_trained([found], expected)
    return trained


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_with_one_rank(world, device, backend):
    (trained,) = world(1).run(_by_nccl, device, backend)
    assert len(trained) == 5


def test_nccl_with_two_ranks(device):
    outcomes = spawn_ranks(2, _by_nccl, device, "cpu:gloo,cuda:nccl", timeout=90.0)
    errors = [
        o.error or f"it died with exit code {o.exitcode}"
        for o in outcomes
        if o.error or o.exitcode is not None
    ]
    if any("Duplicate GPU" in error for error in errors):
        pytest.skip("NCCL refuses two ranks on one GPU, and there is no second one")
    assert not errors, "\n".join(errors)
    for first, second in zip(outcomes[0].result, outcomes[1].result, strict=True):
        _assert_trained([first, second], first, close=False)
