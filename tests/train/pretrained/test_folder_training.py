"""A Hugging Face folder is trained with the same losses on every layout, goes on where it was
stopped, and is a folder again."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.config import (
    AdapterConfig,
    Config,
    ConfigError,
    ModelFolder,
    OptimizerConfig,
    TrainConfig,
)
from pyops.config import ParallelConfig as Parallel
from pyops.data import CorpusError, DataConfig
from pyops.mesh import Axes, Mesh
from pyops.train import train
from pyops.train.pretrained.folder_data import FolderData
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.pretrained.folder_training import FolderTraining
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.tiny_folder import CHAT, make_folder, make_tokenizer, write_chat
from tests.parallel.tiny_transformers import transformers
from tests.train.tiny_run import config_of, losses, train_on_rank

pytestmark = pytest.mark.cpu_only
STEPS = 12


def make_config(folder: Path, name: str, *, kind: str = "c.jsonl", **sections: Any) -> Config:
    """A tiny run, with dropout."""
    model = folder / "llama"
    if not model.exists():
        make_folder(model, chat=CHAT, attention_dropout=0.2)
        write_chat(folder / "c.jsonl", rows=40)
        (folder / "t.txt").write_text("to be or not to be, that is the question.\n" * 40)
    options = {
        "num_steps": STEPS,
        "batch": 4,
        "num_sample_tokens": 8,
        "validate_every": 5,
        "num_validation_sequences": 3,
        "plot": False,
        "tensorboard": False,
        "device": "cpu",
        **sections.pop("train", {}),
    }
    return Config(
        name=name,
        model_folder=ModelFolder(str(model), sequence_length=32),
        data=DataConfig(path=str(folder / kind), cache=str(folder / "cache")),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3),
        train=TrainConfig(folder=str(folder / "runs"), **options),
        **sections,
    )


def curve(config: Config) -> torch.Tensor:
    """All losses and norms, validation losses among them."""
    from pyops.train.report.metrics import read_rows

    rows = read_rows(config.folder / "metrics.jsonl")
    keys = ("loss", "grad_norm", "validation_loss")
    return torch.tensor([row[key] for row in rows for key in keys if key in row])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """The run of one process, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    config = make_config(folder, "straight")
    outcome = train(config)
    assert outcome.steps == STEPS
    assert losses(config)[0] - losses(config)[-1] > 0.5, "nothing is learnt"
    return folder, config


def test_the_losses_are_those_of_plain_torch(straight):
    """Of transformers and torch.optim.AdamW, which decays matrices alone."""
    folder, config = straight
    still = folder / "still"
    make_folder(still, chat=CHAT)
    run = dataclasses.replace(
        config,
        name="plain",
        model_folder=ModelFolder(str(still), 32),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=2.0, max_grad_norm=0.8),
        train=dataclasses.replace(config.train, micro_batch=1),
    )
    train(run)
    model = transformers.LlamaForCausalLM.from_pretrained(still)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 2.0},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rows = FolderData(run, FolderModel.read(str(still)), Mesh(Axes())).batches
    found, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = run.optimizer.lr_at(step, num_steps=STEPS)
        loss = model(**rows.next()).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.8)))
        optimizer.step()
        found.append(float(loss.detach()))
    assert max(norms) > 0.8, "nothing is clipped"
    torch.testing.assert_close(torch.tensor(losses(run)), torch.tensor(found), rtol=0, atol=1e-5)
    made = transformers.LlamaForCausalLM.from_pretrained(run.folder / "model")
    for ours, theirs in zip(made.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_the_trained_folder_is_one_of_transformers_again(straight):
    _, config = straight
    made, report = transformers.LlamaForCausalLM.from_pretrained(
        config.folder / "model", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    before = transformers.LlamaForCausalLM.from_pretrained(config.model_folder.folder)
    pairs = zip(made.parameters(), before.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (config.folder / "model" / name).exists(), name
    assert (config.folder / "sample.txt").read_text()


def test_a_stopped_run_resumes_bit_for_bit(straight, monkeypatch):
    _, config = straight
    broken = dataclasses.replace(config, name="broken")
    inner = FolderTraining.train_step

    def stopping(self: FolderTraining, *, stop: bool = False) -> Any:
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, stop=stop)

    with monkeypatch.context() as patch:
        patch.setattr(FolderTraining, "train_step", stopping)
        outcome = train(broken)
    assert outcome.stopped_by == signal.SIGTERM
    assert 7 < outcome.steps < STEPS
    assert not (broken.folder / "model").exists()
    train(broken, resume=True)
    assert torch.equal(curve(broken), curve(config))
    weights = [
        transformers.LlamaForCausalLM.from_pretrained(c.folder / "model").state_dict()
        for c in (broken, config)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.full  # the one above resumes, bit for bit
def test_a_killed_run_resumes_from_its_last_checkpoint(straight):
    folder, config = straight
    killed = dataclasses.replace(
        config, name="killed", train=dataclasses.replace(config.train, checkpoint_every=4)
    )
    train(killed)
    for step in (8, 12):  # as if the process had died in step 8
        (killed.folder / "checkpoints" / f"step-{step:08d}").rename(folder / f"gone-{step}")
    (killed.folder / "metrics.jsonl").write_text("")
    train(killed, resume=True)
    rows = curve(killed)
    assert len(rows)
    assert torch.equal(rows, curve(config)[-len(rows) :])


LAYOUTS = {
    "tp 2": {"parallel": Parallel(tp=2)},
    "pp 2": {"parallel": Parallel(pp=2, num_microbatches=2)},
    "dp 2, zero 3": {"zero": ZeroConfig(stage=3), "train": {"micro_batch": 1}},
    "cp 2": {"parallel": Parallel(cp=2, cp_method="ring", cp_order="striped")},
}


# Copies at stage 3 stand in the suite with a teacher: test_taught_folder.py; tp with text, below.
IN_SUITE = ("pp 2",)


@pytest.mark.parametrize("layout", [each if each in IN_SUITE else full(each) for each in LAYOUTS])
def test_two_ranks_have_the_losses_of_one(straight, layout, world):
    _, config = straight
    chosen = {key: value for key, value in LAYOUTS[layout].items() if key != "train"}
    chosen["train"] = dataclasses.replace(config.train, **LAYOUTS[layout].get("train", {}))
    shared = dataclasses.replace(config, name=layout.replace(" ", "-"), **chosen)
    world(2).run(train_on_rank, shared)
    torch.testing.assert_close(curve(shared), curve(config), rtol=0, atol=1e-5)
    text = (shared.folder / "sample.txt").read_text()
    assert text == (config.folder / "sample.txt").read_text()


def test_text_resumes_on_another_layout(straight, world):
    folder, _ = straight
    whole = make_config(folder, "whole", kind="t.txt")
    train(whole)
    first = make_config(folder, "moved", kind="t.txt", parallel=Parallel(tp=2))
    early = dataclasses.replace(first.train, checkpoint_every=6, num_checkpoints=9)
    world(2).run(train_on_rank, dataclasses.replace(first, train=early))
    (first.folder / "checkpoints" / "step-00000012").rename(folder / "gone")
    moved = dataclasses.replace(first, parallel=Parallel(pp=2))
    world(2).run(train_on_rank, moved, True)
    torch.testing.assert_close(curve(moved), curve(whole), rtol=0, atol=1e-5)


def test_what_does_not_fit_is_refused_on_every_rank(straight, world, tmp_path):
    folder, config = straight
    small = make_folder(tmp_path / "small", vocab_size=64)
    make_tokenizer(small, more=60)
    bare = make_folder(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    short = make_folder(tmp_path / "short", max_position_embeddings=16)
    bert = tmp_path / "bert"
    transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(bert)
    interleaved = Parallel(pp=2, schedule="interleaved", v=4)
    cases = [
        (small, {}, "110 tokens, but the model has embeddings of 64"),
        (bare, {}, "has no tokenizer.json"),
        (short, {}, "model.sequence_length is 32, but the model of .* has 16 positions"),
        (bert, {}, "has a BertForMaskedLM, which does not predict the token that follows"),
        (tmp_path / "none", {}, "none/config.json does not exist"),
        (folder / "llama", {"parallel": interleaved}, "has 8 stages, but .* has 4 blocks"),
    ]
    for model, sections, said in cases:
        chosen = dataclasses.replace(
            config, name="refused", model_folder=ModelFolder(str(model), 32), **sections
        )
        first, second = world(2).run(train_on_rank, chosen)
        assert first == second
        assert re.search(said, first)


def test_checkpoints_of_other_runs_are_refused(straight, tmp_path):
    _, config = straight
    gpt = config_of(tmp_path, "cpu", name="run", num_steps=1)
    train(gpt)
    other = dataclasses.replace(gpt.train, num_steps=2)
    with pytest.raises(ConfigError, match="is of a run that trains no Hugging Face folder"):
        train(dataclasses.replace(config, name="run", train=other), resume=True)
    mine = dataclasses.replace(config.train, num_steps=STEPS + 1)
    with pytest.raises(ConfigError, match="is of a run that trains a Hugging Face folder"):
        train(dataclasses.replace(gpt, name="straight", train=mine), resume=True)
    sgd = dataclasses.replace(config.optimizer, name="sgd")
    with pytest.raises(ConfigError, match=r"optimizer.name is 'sgd', but checkpoint .* 'adamw'"):
        train(dataclasses.replace(config, optimizer=sgd, train=mine), resume=True)
    seed = dataclasses.replace(mine, seed=1)
    with pytest.raises(CorpusError, match=r"use the same train.seed"):
        train(dataclasses.replace(config, train=seed), resume=True)


def adapter_config(folder: Path, name: str, **sections: Any) -> Config:
    return make_config(
        folder, name, adapter=AdapterConfig(rank=4, alpha=8, dropout=0.1), **sections
    )


def test_adapters_alone_are_trained(tmp_path: Path):
    peft = pytest.importorskip("peft")
    config = adapter_config(tmp_path, "adapter")
    train(config)
    assert losses(config)[0] - losses(config)[-1] > 0.05, "nothing is learnt"
    assert not (config.folder / "model").exists()
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    found = peft.PeftModel.from_pretrained(base, config.folder / "adapter")
    updates = [p for n, p in found.named_parameters() if "lora_B" in n]
    assert len(updates) == 7 * base.config.num_hidden_layers  # all linear layers but the head
    assert all(p.count_nonzero() for p in updates)
    again = train(dataclasses.replace(config, name="adapter"), resume=True)
    assert again.steps == STEPS
    with pytest.raises(ConfigError, match=r"adapter\.rank"):
        train(dataclasses.replace(config, adapter=AdapterConfig(rank=2)), resume=True)


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": Parallel(tp=2)},
        pytest.param({"zero": ZeroConfig(stage=3)}, marks=pytest.mark.full),
        pytest.param({"parallel": Parallel(pp=2)}, marks=pytest.mark.full),
    ],
    ids=["tp 2", "zero 3", "pp 2"],
)
def test_adapters_on_two_ranks_have_the_losses_of_one(tmp_path: Path, world, sections):
    pytest.importorskip("peft")
    config = adapter_config(tmp_path, "one", train={"num_steps": 6})
    train(config)
    run = dataclasses.replace(config, name="two", **sections)
    world(2).run(train_on_rank, run)
    torch.testing.assert_close(curve(run), curve(config), rtol=0, atol=1e-5)


def test_an_adapter_that_can_not_be(tmp_path: Path):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"adapter\.rank is 4.*model\.folder"):
        Config(adapter=AdapterConfig(rank=4))
    with pytest.raises(ValueError, match="rank is -1"):
        AdapterConfig(rank=-1)
    with pytest.raises(ValueError, match=r"rank is 0.*other options"):
        AdapterConfig(alpha=3)
    config = make_config(tmp_path, "odd", adapter=AdapterConfig(rank=4, layers=("nowhere",)))
    with pytest.raises(ConfigError, match="nowhere"):
        train(config)
