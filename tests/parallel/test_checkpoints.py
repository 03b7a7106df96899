"""A trainer of one plan goes on from the checkpoint of another as if nothing had been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, Trainer, parallelize
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.test_trainer import close, own_rows, rows_for
from tests.parallel.tiny_transformers import make_model

pytestmark = pytest.mark.cpu_only

ALONE = ParallelPlan()
PLANS = {
    "tp": ParallelPlan(tp=2),
    "pp": ParallelPlan(pp=2, pipeline=PipelineOptions("zb1p")),
    "interleaved": ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=2)),
    "zero 1": ParallelPlan(zero=ZeroConfig(stage=1)),
    "zero 3": ParallelPlan(zero=ZeroConfig(stage=3)),
}
CONFIG: dict[str, dict[str, Any]] = {"gpt2": {"resid_pdrop": 0.2}, "llama tied": {}, "t5": {}}


def make(name: str, plan: ParallelPlan, *, seed: int = 0) -> Trainer:
    model = make_model(name, seed=seed, **CONFIG[name])
    return parallelize(model, plan, optimizer=partial(AdamW, lr=3e-3), seed=7)


def steps(trainer: Trainer, name: str, first: int, last: int) -> list[float]:
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    return [trainer.step(own_rows(rows_for(name, n), index, copies)) for n in range(first, last)]


def saved(rank: int, group: object, name: str, plan: ParallelPlan, folder: Path) -> None:
    trainer = make(name, plan)
    steps(trainer, name, 0, 3)
    trainer.save(folder, row=24, files=["a", "b"])


def went_on(rank: int, group: object, name: str, plan: ParallelPlan, folder: Path) -> Any:
    trainer = make(name, plan, seed=1)
    more = trainer.load(folder)
    assert trainer.num_steps == 3
    return more, steps(trainer, name, 3, 6)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        full("gpt2", "tp", "pp"),
        full("gpt2", "pp", "tp"),
        full("gpt2", "alone", "zero 3"),
        full("llama tied", "interleaved", "tp"),
        full("llama tied", "zero 1", "pp"),
        full("t5", "pp", "alone"),
        ("t5", "zero 3", "interleaved"),
    ],
)
def test_another_plan_goes_on(name, before, after, world, tmp_path):
    trainer = make(name, ALONE)
    untrained = trainer.evaluate([rows_for(name, 3)])
    expected = steps(trainer, name, 0, 6)[3:]
    assert abs(trainer.evaluate([rows_for(name, 3)]) - untrained) > 1e-3, "nothing is learnt"
    for plan, body in ((before, saved), (after, went_on)):
        if plan == "alone":
            found = [body(0, None, name, ALONE, tmp_path / "c")]
        else:
            found = world(2).run(body, name, PLANS[plan], tmp_path / "c")
    for more, losses in found:
        assert more == {"row": 24, "files": ["a", "b"]}
        close(losses, expected)


def test_a_learning_rate_goes_on(tmp_path):
    trainer = make("llama tied", ALONE)
    trainer.optimizer.param_groups[0]["lr"] = 1e-4
    before = [p.clone() for p in trainer.model.parameters()]
    steps(trainer, "llama tied", 0, 1)
    assert not any(map(torch.equal, trainer.model.parameters(), before))
    trainer.save(tmp_path / "c")
    again = make("llama tied", ALONE)
    again.load(tmp_path / "c")
    assert again.optimizer.param_groups[0]["lr"] == 1e-4
    close(steps(again, "llama tied", 1, 3), steps(trainer, "llama tied", 1, 3))


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    make("gpt2", ALONE).save(tmp_path / "c")
    trainer = make("llama tied", ALONE)
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(ValueError, match="another model"):
        trainer.load(tmp_path / "c")
    assert all(map(torch.equal, trainer.model.parameters(), before))
