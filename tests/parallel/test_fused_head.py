"""The loss in the last layer: whole logits never exist, and models that change their logits keep
them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, Trainer, parallelize
from tests.grids import full
from tests.parallel.tiny_transformers import batch_for, make_model

pytestmark = pytest.mark.cpu_only

ROWS, TOKENS, VOCAB = 16, 64, 16384  # logits of 64 MiB, of which a chunk is 32


class Largest(TorchDispatchMode):
    """The number of elements of the largest floating-point tensor that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and each.is_floating_point():
                self.numel = max(self.numel, each.numel())
        return found


def trainer_of(name: str, plan: ParallelPlan, **config: Any) -> Trainer:
    return parallelize(make_model(name, **config), plan, optimizer=partial(AdamW, lr=3e-3))


@pytest.mark.parametrize("fused", [True, False])
def test_whole_logits_do_not_exist(fused):
    trainer = trainer_of("llama", ParallelPlan(fused_loss=fused), vocab_size=VOCAB)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS))
    with Largest() as largest:
        trainer.step({"input_ids": tokens, "labels": tokens})
        trainer.evaluate([{"input_ids": tokens, "labels": tokens}])
    assert (largest.numel < ROWS * TOKENS * VOCAB) == fused


def losses_of(name: str, plan: ParallelPlan, **config: Any) -> tuple[list[float], bool | None]:
    trainer = trainer_of(name, plan, **config)
    losses = [trainer.step(batch_for(name, rows=8, seed=step)) for step in range(5)]
    losses.append(trainer.evaluate([batch_for(name, rows=3)]))
    return losses, None if trainer.parts.head is None else trainer.parts.head.fits


def losses_on_rank(rank: int, group: object, *args: Any, **config: Any) -> Any:
    return losses_of(*args, attention_dropout=0.2)


PIPELINE = PipelineOptions("zb1p", recompute="always")


@pytest.mark.parametrize(
    ("name", "fits"), [("llama tied", True), ("gemma2", False), full("phi", True)]
)
def test_losses_are_those_of_whole_logits(name, fits, world):
    """Gemma 2 squashes its logits, which shows after the first call; that call drew dropout. The
    head of Phi has a bias."""
    whole, _ = losses_of(name, ParallelPlan(fused_loss=False), attention_dropout=0.2)
    alone, alone_fits = losses_of(name, ParallelPlan(), attention_dropout=0.2)
    assert alone_fits is fits
    assert abs(whole[0] - whole[4]) > 2e-3, "nothing is learnt"
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(whole), rtol=0, atol=1e-5)
    plan = ParallelPlan(pp=2, pipeline=PIPELINE) if name != "phi" else ParallelPlan(tp=2)
    found = world(2).run(losses_on_rank, name, plan)
    assert found[-1][1] is fits
    for losses, _ in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=0, atol=1e-5)
