"""The steps that all methods share: clipped, each with dropout of its own, and ended by a loss that
is not finite."""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.compress.learning import MAX_NORM, learn
from pyops.compress.steps import FinetuneStep
from pyops.config import ConfigError
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import Ranks

pytestmark = pytest.mark.cpu_only

TOKENS = torch.arange(16).view(2, 8)


def taught(factor: float, *, num_steps: int = 3) -> tuple[Any, list[int], Tensor]:
    """A small GPT after some steps of plain gradient descent, the steps that its dropout was told,
    and how far it moved."""
    model: Any = GPT(
        GPTConfig(vocab_size=16, sequence_length=8, num_layers=1, num_heads=2, dim=8), seed=0
    )
    told: list[int] = []
    plain = model.set_dropout

    def set_dropout(*args: Any, step: int, **kwargs: Any) -> None:
        told.append(step)
        plain(*args, step=step, **kwargs)

    model.set_dropout = set_dropout
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    texts: Any = SimpleNamespace(to_learn=lambda step: repeat((TOKENS, TOKENS)))
    learn(
        model,
        texts,
        FinetuneStep(num_steps=num_steps, lr=0.1, warmup_steps=0),
        loss_of=lambda batch: factor * model.loss(*batch),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ranks=Ranks.of(ALONE),
    )
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return model, told, (after - before).norm()


def test_gradients_are_clipped() -> None:
    _, _, moved = taught(1000.0, num_steps=1)
    torch.testing.assert_close(moved, torch.tensor(0.1 * MAX_NORM), rtol=1e-4, atol=0)


def test_each_step_has_dropout_of_its_own_and_the_model_is_left_in_eval_mode() -> None:
    model, told, moved = taught(1.0)
    assert told == [0, 1, 2]
    assert not model.training
    assert float(moved) > 0


def test_a_loss_that_is_not_finite_ends_it() -> None:
    with pytest.raises(ConfigError, match=r"the loss is inf in step 0 of 3; lower lr, .* 0\.1"):
        taught(float("inf"))
