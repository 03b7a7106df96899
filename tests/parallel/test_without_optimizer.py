"""A trainer without an optimizer evaluates and generates as any other, and has no memory for
gradients and states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.optim import AdamW
from pyops.parallel import OptimizerGroups, ParallelPlan, no_decay_for_vectors, parallelize
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.pretrained.folder_use import UseOptions
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.parallel.test_trainer import rows_for
from tests.parallel.tiny_folder import make_folder
from tests.parallel.tiny_transformers import make_model
from tests.zero.state.test_memory import bytes_of_tensors

pytestmark = pytest.mark.cpu_only

PLANS = {
    "one": (1, ParallelPlan()),
    "tp": (2, ParallelPlan(tp=2)),
    "pp": (2, ParallelPlan(pp=2)),
    "zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3))),
    "pp, bf16": (2, ParallelPlan(pp=2, precision="bf16")),
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "attention_dropout": 0.1}
PROMPT = torch.arange(3, 9).view(1, 6)
MAKES_ADAM = partial(AdamW, lr=1e-2)


def used(rank: int, group: object, plan: ParallelPlan, make: Any) -> tuple[float, Tensor, float]:
    """The loss, a text, and the bytes of tensors over those of this rank's parameters."""
    model = make_model("llama", **WIDE)
    others = bytes_of_tensors() - sum(p.nbytes for p in model.parameters())
    trainer = parallelize(model, plan, optimizer=make)
    loss = trainer.evaluate([rows_for("llama", 0)])
    text = trainer.generate(PROMPT, max_new_tokens=8)
    own = sum(p.nbytes for p in trainer.model.parameters())
    if plan.zero.stage == 3:
        own /= trainer.mesh.size("dp")
    kept = trainer.optimizer.memory()
    assert kept["parameters"] == pytest.approx(own, rel=0.02)
    assert (kept["gradients"] > 0) == (make is not None)
    return loss, text, (bytes_of_tensors() - others) / own


@pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning")
@pytest.mark.parametrize("name", [full("one"), full("tp"), "zero 3", full("pp, bf16"), full("pp")])
def test_parameters_alone_have_memory(name, world):
    ranks, plan = PLANS[name]
    loss, text, twice = used(0, None, ParallelPlan(precision=plan.precision), MAKES_ADAM)
    assert twice > 1.9, "gradients are not counted"
    run = partial(used, 0, None) if ranks == 1 else partial(world(ranks).run, used)
    for found, said, bytes_ in [run(plan, None)] if ranks == 1 else run(plan, None):
        assert found == pytest.approx(loss, abs=1e-5 if plan.precision == "fp32" else 1e-2)
        assert torch.equal(said, text)
        assert bytes_ < 1.1


def saved(rank: int, group: object, folder: Path) -> float:
    trainer = parallelize(make_model("llama", seed=2), ParallelPlan(pp=2), optimizer=MAKES_ADAM)
    trainer.step(rows_for("llama", 0))
    trainer.save(folder, row=8)
    return trainer.evaluate([rows_for("llama", 1)])


def evaluated(rank: int, group: object, folder: Path, again: Path) -> tuple[float, float]:
    trainer = parallelize(make_model("llama"), ParallelPlan(tp=2), optimizer=None)
    before = trainer.evaluate([rows_for("llama", 1)])
    assert trainer.load(folder) == {"row": 8}
    assert trainer.num_steps == 1
    trainer.save(again)
    return before, trainer.evaluate([rows_for("llama", 1)])


def test_it_takes_the_parameters_of_a_checkpoint_alone(world, tmp_path):
    (loss, _) = world(2).run(saved, tmp_path / "trained")
    for before, found in world(2).run(evaluated, tmp_path / "trained", tmp_path / "weights"):
        assert abs(before - loss) > 1e-3
        assert found == pytest.approx(loss, abs=1e-5)
    trainer = parallelize(
        make_model("llama"), optimizer=OptimizerGroups(MAKES_ADAM, no_decay_for_vectors)
    )
    trainer.load(tmp_path / "weights")
    assert trainer.step(rows_for("llama", 1)) == pytest.approx(loss, abs=1e-5)


def disagreed(rank: int, group: object) -> tuple[str, bool]:
    model = make_model("llama")
    with pytest.raises(ValueError, match="optimizer") as caught:
        parallelize(model, optimizer=None if rank else MAKES_ADAM)
    return str(caught.value), all(p.requires_grad for p in model.parameters())


def test_what_is_refused(world):
    trainer = parallelize(make_model("gpt2").requires_grad_(False), optimizer=None)
    with pytest.raises(ValueError, match="optimizer=None, to evaluate and generate"):
        trainer.step(rows_for("gpt2", 0))
    with pytest.raises(RuntimeError, match="optimizer=None, of a model that is not trained"):
        trainer.optimizer.step()
    layer = torch.nn.Linear(2, 2)
    first = ZeroOptimizer(layer, None)
    with pytest.raises(ValueError, match="belongs to a ZeroOptimizer"):
        ZeroOptimizer(layer, AdamW)
    first.close()
    with pytest.raises(ValueError, match="optimizer is None, but params names some"):
        ZeroOptimizer(layer, None, params=layer.parameters())
    with pytest.raises(ValueError, match="recompute"):
        parallelize(layer, ParallelPlan(recompute=("no",)), optimizer=None)
    assert layer.weight.requires_grad, "the model is as it was"
    for said, as_it_was in world(2).run(disagreed):
        assert "given" in said
        assert as_it_was


def test_generate_and_eval_have_no_optimizer(tmp_path):
    model = FolderModel.read(str(make_folder(tmp_path / "llama")))
    trainer = UseOptions().trainer(model, torch.device("cpu"))
    assert not trainer.optimizer.trains
    assert trainer.optimizer.memory()["gradients"] == 0
