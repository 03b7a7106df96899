"""Weight gradients that are put off, with recomputation, autocast, whole models, ranks and
strategies that reduce gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import deferred, recompute
from pyops.data_parallel import DataParallel
from pyops.deferred import Deferred
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import ParallelAttention
from tests.deferred_models import Shared, Twice, assert_same_bits, batches, found, split, whole
from tests.tensor_parallel.shared_layers import configured
from tests.tolerance import assert_close_to_reference
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device


def test_main_grad_of_a_recomputed_layer():
    plain, model = Shared(), Shared()
    for each in (plain, model):
        each.up.weight.main_grad = torch.zeros_like(each.up.weight)
    recompute.apply(model, ["up"])
    assert_same_bits(whole(model, batches()), whole(plain, batches()))
    assert model.up.weight.grad is None


@pytest.mark.parametrize("make", [Twice, Shared])
def test_recomputed_layers_put_off_too(make: Callable[[], nn.Module]):
    plain, model = make(), make()
    deferred.linears(model)
    recompute.apply(model, [nn.Linear, nn.LayerNorm] if make is Twice else ["up", "down"])
    queue = Deferred(model.parameters())
    inputs = batches(count=1)
    with queue.collecting():
        model(inputs[0]).square().sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "norm" not in name)
    queue.take().accumulate()
    assert_same_bits(found(model, inputs), whole(plain, batches(count=1)))


def test_sixteen_bits_and_autocast():
    for make in (Twice, Shared):
        plain, model, wide = make(), make(), make().double()
        deferred.linears(model)
        deferred.linears(plain)
        Deferred(plain.parameters())
        reference = whole(wide, [x.detach().double().requires_grad_() for x in batches()])
        torchs = make()
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = split(model, batches()), whole(plain, batches())
            unmarked = whole(torchs, batches())
        assert all(g.dtype == torch.float32 for g in ours)
        assert_same_bits(ours, theirs)
        for a, b, c in zip(ours, unmarked, reference, strict=True):
            assert_close_to_reference(a, b, c, tiny=0.02 * c.abs().max().item())


def test_a_gpt_of_which_every_matrix_is_put_off():
    def make() -> GPT:
        return GPT(GPTConfig(vocab_size=11, sequence_length=8, num_layers=2, num_heads=2, dim=8))

    plain, model = make(), make()
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1))
    queue = Deferred(model.parameters())
    plain(tokens).square().sum().backward()
    loss = model(tokens).square().sum()
    with queue.collecting():
        loss.backward()
    put_off = {name for name, p in model.named_parameters() if p.grad is None}
    assert {n for n, p in model.named_parameters() if "blocks" in n and p.dim() > 1} <= put_off
    queue.take().accumulate()
    assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.full
@pytest.mark.real_device
def test_a_compiled_model_puts_nothing_off():
    model = nn.Sequential(Shared(), nn.Linear(6, 4))
    plain = copy.deepcopy(model)
    assert deferred.linears(model) == ["1"]
    queue, inputs = Deferred(model.parameters()), batches(count=1)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(inputs[0]).square().sum()
    with queue.collecting():
        loss.backward()
    assert queue.take().nbytes == 0
    for a, b in zip(found(model, inputs), whole(plain, batches(count=1)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def on_ranks(rank: int, group: dist.ProcessGroup) -> None:
    for sequence_parallel in (False, True):
        plain, model = (Shared(group, sequence_parallel) for _ in range(2))
        attention, other = (
            configured(ParallelAttention, 8, 2, group=group, std=0.5) for _ in range(2)
        )
        assert_same_bits(split(attention, batches(8), together=True), whole(other, batches(8)))
        rows = [x.detach().flatten(0, 1).requires_grad_() for x in batches()]
        again = [x.detach().clone().requires_grad_() for x in rows]
        assert_same_bits(split(model, rows, together=True), whole(plain, again))


def test_layers_shared_by_ranks(world):
    world(2).run(on_ranks)


def trained(rank: int, group: dist.ProcessGroup, strategy: str, *, apart: bool) -> list[Tensor]:
    """Parameters after two steps of three micro-batches, of which the last one's gradients are
    reduced."""
    model = Twice()
    if apart:
        deferred.linears(model)
    wrapped: Any = (
        DataParallel(model, group=group, bucket_bytes=200) if strategy == "data_parallel" else model
    )
    options = {"lr": 0.1, "momentum": 0.5}
    if strategy == "data_parallel":
        optimizer: Any = torch.optim.SGD(model.parameters(), **options)
        no_sync = wrapped.no_sync
    else:
        stage = int(strategy[-1])
        optimizer = zero_optimizer(
            model, torch.optim.SGD, stage=stage, bucket_bytes=200, group=group, **options
        )
        no_sync = optimizer.no_sync
    queue = Deferred(model.parameters())
    for step in range(2):
        for k in range(3):
            x = torch.randn(
                2, 5, 6, generator=torch.Generator().manual_seed(10 * step + 2 * k + rank)
            )
            loss = wrapped(x).square().mean()
            syncing = contextlib.nullcontext if k == 2 else no_sync
            if not apart:
                with syncing():
                    loss.backward()
                continue
            with no_sync(), queue.collecting():
                loss.backward()
            with syncing():
                queue.take().accumulate()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def reduced(rank: int, group: dist.ProcessGroup) -> None:
    for strategy in ("data_parallel", "stage 1", "stage 2"):
        together, apart = (trained(rank, group, strategy, apart=apart) for apart in (False, True))
        assert_same_bits(apart, together)
        assert not any(torch.equal(a, b) for a, b in zip(apart, Twice().parameters(), strict=True))


def test_reduced_with_the_last_accumulate(world):
    world(2).run(reduced)
