"""Steps validated later leave parameters, losses and norms with the bits of a run that waits for
the norm before each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyops.optim
from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PostValidation, schedule
from tests.grids import cut
from tests.pipeline.reference import batch, mlp

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss
STEPS = 8
LIMIT = 0.5
ORDINARY = 0.01  # what gradients are multiplied by, but for those that are forced
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "ours": lambda parameters: pyops.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}


class Trial:
    """A pipeline with dropout whose gradients at one stage are forced at some steps."""

    def __init__(
        self, name: str, group: Any, optimizer: str, *, forced: dict[int, tuple[int, float]]
    ) -> None:
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        options = {"v": 2} if name == "interleaved_zb" else {}
        plan = schedule(name, num_stages=ranks, num_microbatches=4, **options)
        layers = mlp(8, dropout=0.2)
        layers[7][0].weight = layers[0][0].weight  # of the first and the last stage
        self.pipeline = Pipeline(layers, schedule=plan, group=group, loss=mse)
        self.optimizer = OPTIMIZERS[optimizer](self.pipeline.parameters())
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.step, self.data = 0, batch(10)
        for index, stage in self.pipeline.stages.items():
            stage.layers[0][0].bias.register_hook(lambda g, i=index: g * self._factor(forced, i))

    def _factor(self, forced: dict[int, tuple[int, float]], stage: int) -> float:
        at, factor = forced.get(self.step, (0, 1.0))
        return factor if stage == at else 1.0

    def values(self) -> list[Tensor]:
        states = [
            value
            for some in self.optimizer.state.values()
            for value in some.values()
            if isinstance(value, Tensor)
        ]
        return [
            *(p.detach().clone() for p in self.pipeline.parameters()),
            *(value.clone() for value in states),
        ]


def with_barrier(trial: Trial) -> tuple[list[float], list[float], list[Tensor]]:
    losses, norms = [], []
    torch.manual_seed(11)
    for trial.step in range(STEPS):
        losses.append(float(trial.pipeline.step(*trial.data, scale=ORDINARY)))
        norms.append(float(trial.pipeline.clip_grad_norm_(LIMIT)))
        if math.isfinite(norms[-1]):
            trial.optimizer.step()
        trial.optimizer.zero_grad()
        trial.rates.step()
    return losses, norms, trial.values()


def validated(trial: Trial) -> tuple[list[float], list[float], list[Tensor], tuple[int, int]]:
    losses, norms = [], []
    torch.manual_seed(11)
    validation = PostValidation(trial.pipeline, trial.optimizer, max_grad_norm=LIMIT)
    for trial.step in range(STEPS):
        losses.append(float(validation.step(*trial.data, scale=ORDINARY)))
        norms += [] if trial.step == 0 else [validation.grad_norm]
        trial.rates.step()
    norms.append(validation.finish())
    return losses, norms, trial.values(), (validation.redone, validation.skipped)


def forced_at(stages: int) -> dict[int, tuple[int, float]]:
    """Of every stage: a gradient that is clipped, or one that is not finite; at the first step, in
    a row, at the last."""
    return {
        0: (stages - 1, 1e6),
        2: (0, math.inf),
        3: (stages - 1, math.inf),
        4: (0, 1e6),
        5: (stages // 2, 1e6),
        7: (0, 1e6),
    }


def both(
    rank: int, group: Any, name: str, optimizer: str
) -> tuple[list[float], list[float], tuple[int, int]]:
    stages = (
        1
        if group is None
        else torch.distributed.get_world_size(group) * (1 if name == "zb1p" else 2)
    )
    forced = forced_at(stages)
    plain, ours = (Trial(name, group, optimizer, forced=forced) for _ in range(2))
    begun = plain.values()
    expected, found = with_barrier(plain), validated(ours)
    assert found[0] == expected[0], "losses"
    assert [str(n) for n in found[1]] == [str(n) for n in expected[1]], "norms"
    assert len(found[2]) == len(expected[2])
    for a, b in zip(found[2], expected[2], strict=True):
        assert torch.equal(a, b)
    assert all(not torch.equal(a, b) for a, b in zip(begun, expected[2], strict=False))
    assert all(p.grad is None for p in ours.pipeline.parameters())
    return expected[0], expected[1], found[3]


RANKS = (("zb1p", 2), ("zb1p", 3), ("interleaved_zb", 2))


# On three ranks one is neither first nor last.
@pytest.mark.parametrize(
    ("name", "ranks", "optimizer"),
    cut(
        [(*each, optimizer) for each in RANKS for optimizer in OPTIMIZERS],
        keep=[("interleaved_zb", 2, "adamw"), ("zb1p", 3, "ours")],
    ),
)
def test_parameters_states_losses_and_norms_have_the_same_bits(world, name, ranks, optimizer):
    everyone = world(ranks).run(both, name, optimizer)
    losses, norms, _ = everyone[0]
    assert len(set(losses)) == STEPS
    assert [step for step, n in enumerate(norms) if not math.isfinite(n)] == [2, 3]
    assert [step for step, n in enumerate(norms) if n > LIMIT and math.isfinite(n)] == [0, 4, 5, 7]
    for rank in range(ranks):
        redone, skipped = everyone[rank][2]
        assert skipped == 2
        assert 1 <= redone <= 6, "a rank that saw nothing wrong itself stepped, and took that back"
    assert sum(each[2][0] for each in everyone) < 6 * ranks, "a rank that knew better did not step"


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_alone_too():
    both(0, None, "zb1p", "adamw")


def untouched(rank: int, group: Any) -> int:
    """Nothing is forced: nothing is computed twice."""
    trial = Trial("zb1p", group, "adamw", forced={})
    ran: list[Any] = []
    trial.pipeline.before_forward = lambda stage, number: ran.append(number)
    assert validated(trial)[3] == (0, 0)
    return len(ran)


def test_what_stands_is_not_computed_again(world):
    assert world(2).run(untouched) == [STEPS * 4] * 2


def broken(rank: int, group: Any) -> list[str]:
    """Errors that have nothing to do with norms come through, and the next step goes on."""
    trial, found = Trial("zb1p", group, "adamw", forced={0: (0, 1e6)}), []
    validation = PostValidation(trial.pipeline, trial.optimizer, max_grad_norm=LIMIT)
    validation.step(*trial.data, scale=ORDINARY)
    trial.step = 1
    for rows in (2, 10):
        try:
            validation.step(*(t[:rows] for t in trial.data), scale=ORDINARY)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    validation.finish()
    return found


def test_another_error_comes_through(world):
    for found in world(2).run(broken):
        assert len(found) == 1
        assert "2 rows can't be cut into 4 micro-batches" in found[0]


def test_what_can_not_be_validated_is_refused():
    plan = schedule("zb1p", num_stages=1, num_microbatches=2)
    pipeline = Pipeline(mlp(2), schedule=plan, group=ALONE, loss=mse)
    with pytest.raises(ValueError, match="max_grad_norm is 0; give a positive number"):
        PostValidation(pipeline, torch.optim.SGD(pipeline.parameters()), max_grad_norm=0)
    with pytest.raises(
        ValueError,
        match="made with zero_grad=True, which changes gradients of a step that may be taken again",
    ):
        PostValidation(pipeline, pyops.optim.AdamW(pipeline.parameters(), zero_grad=True))
