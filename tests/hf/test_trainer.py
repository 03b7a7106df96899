"""ZeroTrainer beside the Trainer and DistributedDataParallel: losses, norms, weights, and runs that go on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hf.runs import CLIPPED, finished, gpt2, launched, trainer

pytestmark = pytest.mark.cpu_only
STAGES = (0, 1, 2, 3)


def _trained(rank: int, group: Any, folder: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Any]:
    found = []
    with launched(rank, group):
        for stage in (None, *STAGES):
            run = trainer(folder, gpt2(dtype=dtype), None if stage is None else {"stage": stage}, **options)
            run.train()
            found.append(finished(run))
    return found


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)


@pytest.mark.parametrize("accumulated", [1, 2], ids=["each_batch", "two_batches"])
def test_the_trainer_over_zero_is_the_trainer_over_ddp(world, tmp_path, accumulated: int):
    """Clipped, with weight decay and a schedule, in float64: what is left is the order of sums."""
    start = {name: p.detach() for name, p in gpt2().named_parameters()}
    options = {"gradient_accumulation_steps": accumulated}
    for plain, *spread in world(2).run(_trained, str(tmp_path), torch.float64, options, timeout=240.0):
        losses, norms, weights = plain
        assert len(losses) == 5 * accumulated
        assert min(norms) > CLIPPED
        assert _differences(start, weights) > 1e-2
        for found in spread:
            assert found[0] == pytest.approx(losses, rel=1e-12)
            assert found[1] == pytest.approx(norms, rel=1e-12)
            assert _differences(found[2], weights) < 1e-12


def test_without_clipping_the_bits_are_those_of_ddp(world, tmp_path):
    """Of two ranks, whose sum has one order; norms are summed otherwise, and clipping multiplies by them."""
    for plain, *spread in world(2).run(_trained, str(tmp_path), torch.float32, {"max_grad_norm": 0.0}, timeout=240.0):
        for found in spread:
            assert found[0] == plain[0]
            assert all(torch.equal(found[2][name], weight) for name, weight in plain[2].items())
