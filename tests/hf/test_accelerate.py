"""pyops.hf.prepare: a loop of Accelerate over ZeroOptimizer beside the same loop over
DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.hf.runs import CLIPPED, gpt2, launched, loss_of, rows
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.cpu_only


def _loop(
    stage: int | None, dtype: torch.dtype
) -> tuple[list[float], list[float], list[float], dict[str, Any]]:
    """(losses of this rank's micro-batches, norms, what a scheduler set, weights) of two epochs, a
    step every two batches."""
    from accelerate import Accelerator

    import pyops

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2(dtype=dtype).to(accelerator.device)
    data = accelerator.prepare(torch.utils.data.DataLoader(rows(20), batch_size=2))
    zero = None
    if stage is None:
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=3e-2)
        )
    else:
        zero = ZeroOptimizer(model, torch.optim.AdamW, ZeroConfig(stage=stage), lr=3e-2)
        model, optimizer = pyops.hf.prepare(accelerator, model, zero)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20))
    losses, norms, rates = [], [], []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch["input_ids"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIPPED)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
    if zero is not None:
        zero.close()
    return (
        losses,
        norms,
        rates,
        {
            name: p.detach().clone()
            for name, p in accelerator.unwrap_model(model).named_parameters()
        },
    )


def _loops(rank: int, group: Any) -> list[Any]:
    with launched(rank, group):
        return [_loop(stage, torch.float64) for stage in (None, 0, 1, 2, 3)]


def test_a_loop_of_accelerate_over_zero_is_the_loop_over_ddp(world):
    for plain, *spread in world(2).run(_loops, timeout=240.0):
        losses, norms, rates, weights = plain
        assert len(losses) == 10
        assert len(norms) == 6  # five batches an epoch: the last one steps by itself
        assert min(norms) > CLIPPED
        for found in spread:
            assert found[0] == pytest.approx(losses, rel=1e-12)
            assert found[1] == pytest.approx(norms, rel=1e-12)
            assert found[2] == rates
            for name, weight in weights.items():
                assert (found[3][name] - weight).abs().max() < 1e-12 * weight.abs().max()


def _sent(rank: int, group: Any, stage: int) -> list[int]:
    """Gradient buckets that had left after each of three backwards, the first two of which are
    accumulated."""
    from accelerate import Accelerator

    from pyops.hf import prepare

    with launched(rank, group):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = nn.Linear(4, 4)
        zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), lr=0.1)
        model, optimizer = prepare(accelerator, model, zero)
        found = []
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 4)).sum())
                found.append(len(zero.reduced_gradients()))
                optimizer.step()
                optimizer.zero_grad()
        zero.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_sends_once_where_gradients_are_whole_anyway(world, stage: int):
    assert world(2).run(_sent, stage) == [[0, 0, 1] if stage < 2 else [1, 1, 1]] * 2


def _refusals(rank: int, group: Any, folder: str) -> list[str]:
    from accelerate import Accelerator
    from accelerate.utils import DynamoBackend

    from pyops.hf import prepare

    found = []

    def refused(call: Any) -> None:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")

    def zero_of(model: nn.Module, **options: Any) -> ZeroOptimizer:
        return zero_optimizer(model, torch.optim.SGD, stage=1, lr=0.1, **options)

    with launched(rank, group):
        accelerator = Accelerator(cpu=True)
        model, other, summed, scaled = (nn.Linear(4, 4) for _ in range(4))
        zero = zero_of(model)
        refused(lambda: prepare(accelerator, other, zero))
        refused(lambda: prepare(accelerator, other, torch.optim.SGD(other.parameters())))
        refused(lambda: accelerator.prepare(model, zero))
        refused(lambda: prepare(accelerator, summed, zero_of(summed, reduction="sum")))
        refused(lambda: prepare(accelerator, scaled, zero_of(scaled, precision="fp16")))
        _, optimizer = prepare(accelerator, model, zero)
        refused(lambda: accelerator.save_state(folder))
        refused(lambda: optimizer.load_state_dict({}))
    with launched(rank, group):
        refused(
            lambda: prepare(Accelerator(cpu=True, dynamo_backend=DynamoBackend.EAGER), model, zero)
        )
    zero.close()
    return found


def test_what_cannot_work_is_refused_with_what_to_do_instead(world, tmp_path):
    expected = [
        "ValueError: model is a Linear and not the Linear that the ZeroOptimizer is of",
        "TypeError: optimizer is a SGD; expected a pyops.zero.ZeroOptimizer",
        "RuntimeError: the model is wrapped in DistributedDataParallel",
        "ValueError: ZeroOptimizer: reduction='sum'",
        "ValueError: ZeroOptimizer: its precision is scaled",
        "RuntimeError: this rank has only its part of the optimizer's states",
        "RuntimeError: Accelerate has no states of a ZeroOptimizer",
        "ValueError: ZeroOptimizer: this Accelerator compiles the model",
    ]
    for said in world(2).run(_refusals, str(tmp_path)):
        assert [line.startswith(start) for line, start in zip(said, expected, strict=True)] == [
            True
        ] * len(expected), said
