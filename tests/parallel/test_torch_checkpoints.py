"""A trainer of any plan takes weights, and states of optimizers, that torch.distributed.checkpoint
saved, and torch loads what a trainer exports."""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from pyops.checkpoint import CheckpointError
from pyops.checkpoint.distributed import StorageReader
from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, Trainer, parallelize
from pyops.zero import ZeroConfig
from tests.grids import cut
from tests.parallel.test_trainer import NO_DROPOUT, own_rows, rows_for
from tests.parallel.tiny_transformers import make_model

pytestmark = pytest.mark.cpu_only

PLANS = {
    "tp": ParallelPlan(tp=2),
    "pp": ParallelPlan(pp=2),
    "zero 3": ParallelPlan(zero=ZeroConfig(stage=3)),
}
MODELS = ("gpt2", "llama tied", "t5")
# Weights of layers that are cut or shared out go both ways with their states below.
IN_SUITE = [("llama tied", "pp")]
CASES = cut([(name, plan) for name in MODELS for plan in PLANS], keep=IN_SUITE)


def make(name: str, plan: ParallelPlan, *, seed: int) -> Trainer:
    return parallelize(make_model(name, seed=seed), plan, optimizer=partial(AdamW, lr=1e-2))


def taken_and_given(rank: int, group: Any, name: str, plan: ParallelPlan, folder: Path) -> Any:
    """Losses of the imported weights, and after a step, whose weights are exported."""
    model: Any = make_model(name)
    fully_shard(model)
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=folder / "fsdp")
    trainer = make(name, plan, seed=1)
    rows = own_rows(rows_for(name, 0), trainer.mesh.rank("dp"), trainer.mesh.size("dp"))
    losses = [trainer.evaluate([rows])]
    for source in ("whole", "fsdp"):
        trainer.import_dcp(folder / source)
        losses.append(trainer.evaluate([rows]))
        trainer.step(rows)  # from the weights that were taken, masters included
    losses.append(trainer.evaluate([rows]))
    trainer.export_dcp(folder / "out")
    trainer.export_dcp(folder / "out")  # in the place of the first
    trainer.save(folder / "own")
    return losses


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_weights_go_to_torch_and_back(name, plan, world, tmp_path):
    dcp.save(make_model(name).state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)
    wanted = make(name, ParallelPlan(), seed=0)
    loss = wanted.evaluate([rows_for(name, 0)])
    for before, *taken, after in world(2).run(taken_and_given, name, PLANS[plan], tmp_path):
        assert abs(before - loss) > 1e-3
        assert taken == pytest.approx([loss, loss], abs=1e-6)
        assert abs(after - loss) > 1e-3, "the step did nothing"
        assert loaded_loss(name, dcp.FileSystemReader(tmp_path / "out")) == pytest.approx(after)
        if name != "gpt2":  # whose packed weights lie otherwise in a trainer's own folder
            assert loaded_loss(name, StorageReader(tmp_path / "own")) == pytest.approx(after)


def loaded_loss(name: str, reader: Any) -> float:
    """Of a model that torch loaded."""
    model = make_model(name, seed=2)
    dcp.load({"model": model.state_dict()}, storage_reader=reader, no_dist=True)
    trainer = parallelize(model, optimizer=AdamW)
    return trainer.evaluate([rows_for(name, 0)])


STATES = cut(
    [(name, plan) for name in ("gpt2", "llama tied") for plan in PLANS],
    keep=[("gpt2", "tp"), ("gpt2", "zero 3")],
)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def without_dropout(name: str, seed: int) -> Any:
    return make_model(name, seed=seed, **(NO_DROPOUT[name] if name == "gpt2" else {})).train()


class PlainRun:
    """transformers and torch.optim.AdamW on one process."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.model = name, without_dropout(name, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)

    def step(self, number: int) -> float:
        batch = rows_for(self.name, number)
        labels = batch.pop("labels")[:, 1:]
        logits = self.model(**batch).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """As torch's tutorials save it."""
        states = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optim": states}

    def load(self, folder: Path) -> None:
        state = self.state()
        wanted = {"model": state["model"], "optim": {"state": state["optim"]["state"]}}
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])


def went_on(rank: int, group: Any, name: str, plan: ParallelPlan, folder: Path) -> Any:
    """Losses of steps 1 and 2 with torch's states, and of step 2 without them; what is exported
    stands before step 3, whose loss comes last."""
    found = []
    for optimizer in (None, "optim"):
        trainer = parallelize(
            without_dropout(name, 1), plan, optimizer=partial(AdamW, **OPTIONS), seed=7
        )
        trainer.import_dcp(folder / "torch", optimizer=optimizer)
        place = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
        found.append([trainer.step(own_rows(rows_for(name, n), *place)) for n in (1, 2)])
    (_, without), losses = found
    trainer.export_dcp(folder / "out", optimizer="optim")
    assert not (folder / "out.states").exists()
    return losses, without, trainer.step(own_rows(rows_for(name, 3), *place))


@pytest.mark.parametrize(("name", "plan"), STATES)
def test_states_of_optimizers_go_to_torch_and_back(name, plan, world, tmp_path):
    first, again = PlainRun(name, 0), PlainRun(name, 2)
    first.step(0)
    dcp.save(first.state(), checkpoint_id=tmp_path / "torch", no_dist=True)
    expected = [first.step(n) for n in (1, 2, 3, 4)]
    for losses, without, last in world(2).run(went_on, name, PLANS[plan], tmp_path):
        assert [*losses, last] == pytest.approx(expected[:3], abs=1e-5)
        assert abs(without - expected[1]) > 1e-3, "the states do nothing"
    again.load(tmp_path / "out")
    assert [again.step(n) for n in (3, 4)] == pytest.approx(expected[2:], abs=1e-5)


def test_states_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, run = make("gpt2", ParallelPlan(), seed=0), PlainRun("gpt2", 2)
    before = [p.clone() for p in trainer.model.parameters()]
    run.step(0)
    state = run.state()
    dcp.save({"model": state["model"]}, checkpoint_id="weights", no_dist=True)
    name = "transformer.h.0.mlp.c_fc.weight"
    state["optim"]["state"][name]["exp_avg"] = torch.zeros(3, 5)
    dcp.save(state, checkpoint_id="thin", no_dist=True)
    for folder, said in (
        ("weights", "has no states of transformer.wte.weight under 'optim'"),
        ("thin", rf"optim.state.{name}.exp_avg is \[3, 5\] in thin, of a parameter \[32, 128\]"),
    ):
        with pytest.raises(ValueError, match=said):
            trainer.import_dcp(folder, optimizer="optim")
    assert all(map(torch.equal, trainer.model.parameters(), before))
    trainer = parallelize(make_model("gpt2"), optimizer=None)
    with pytest.raises(ValueError, match="optimizer is 'optim', but this trainer was made with"):
        trainer.import_dcp("thin", optimizer="optim")


class Harm:
    """Runs something where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


def test_what_is_no_folder_of_this_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make("gpt2", ParallelPlan(), seed=0)
    before = [p.clone() for p in trainer.model.parameters()]
    dcp.save({"net": make_model("llama tied").state_dict()}, checkpoint_id="llama", no_dist=True)
    thin = make_model("gpt2", n_embd=16).state_dict()
    dcp.save({"net": thin}, checkpoint_id="thin", no_dist=True)
    shutil.copytree("thin", "bad")
    Path("bad/.metadata").write_bytes(pickle.dumps(Harm()))
    for folder, key, said in (
        ("none", None, "has no .metadata"),
        ("llama", "net", "llama lacks transformer.h.0.attn.c_attn.bias, "),
        ("thin", "", "has besides net.lm_head.weight"),
        ("thin", "net", r"is \[64, 16\] in thin, but \[64, 32\] in the model"),
        ("bad", None, "names pathlib.Path.touch, which no index"),
    ):
        with pytest.raises((CheckpointError, ValueError), match=said):
            trainer.import_dcp(folder, key=key)
    make("gpt2", ParallelPlan(), seed=5).export_dcp("torn")
    stored = dcp.FileSystemReader("torn").read_metadata().storage_data
    (late,) = (at for index, at in stored.items() if index.fqn == "model.transformer.wpe.weight")
    with open(Path("torn", late.relative_path), "r+b") as file:  # the tensors before it are whole
        file.seek(late.offset)
        file.write(b"torn")
    with pytest.raises(CheckpointError, match="can't be read"):
        trainer.import_dcp("torn")
    Path("mine").mkdir()
    Path("mine/notes").touch()
    with pytest.raises(ValueError, match="holds notes"):
        trainer.export_dcp("mine")
    assert not Path("harmed").exists()
    assert all(map(torch.equal, trainer.model.parameters(), before))
