"""A run: the same losses on any number of ranks and against a plain loop, and nothing half-done."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, PrecisionConfig
from pyops.data import Batches, CorpusError, prepare, validation_rows
from pyops.models import GPT
from pyops.train import StopRequest, TextTraining, train
from pyops.train.report.metrics import read_rows
from pyops.train.setup.replicated import FlatTrainer
from tests.grids import full
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank


def plain_run(config: Config, device: torch.device) -> tuple[list[float], list[float]]:
    """The same run in plain torch: no flat buffers, no kernels, torch's AdamW, the whole batch at
    once."""
    options = config.optimizer
    batches = Batches(
        prepare(config.data),
        sequence_length=16,
        global_batch=config.train.batch,
        seed=config.train.seed,
    )
    model = GPT(config.model, seed=config.train.seed, device=device)
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": options.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps)
    found, found_norms = [], []
    for step in range(config.train.num_steps):
        rows = batches.next().to(device)
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        found_norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm).item()
        )
        for group in optimizer.param_groups:
            group["lr"] = options.lr_at(step, num_steps=config.train.num_steps)
        optimizer.step()
        found.append(loss.item())
    return found, found_norms


def test_the_losses_are_those_of_a_plain_loop(tmp_path, device):
    config = config_of(tmp_path, device)
    outcome = train(config)
    ours, (plain, plain_norms) = losses(config), plain_run(config, device)
    assert plain[0] - plain[-1] > 1.0, "it learns nothing, so this shows nothing"
    assert same(ours, plain, within=1e-4)
    assert norms(config) == pytest.approx(plain_norms, rel=1e-3)
    assert outcome.steps == STEPS
    assert outcome.validation_loss == pytest.approx(plain[-1], abs=0.3)


def test_what_a_run_leaves(tmp_path, device, capsys):
    config = config_of(
        tmp_path,
        device,
        validate_every=8,
        checkpoint_every=5,
        num_checkpoints=2,
        plot=True,
        tensorboard=True,
    )
    outcome = train(config)
    names = {path.name for path in config.folder.iterdir()}
    assert names >= {
        "metrics.jsonl",
        "config.json",
        "loss.png",
        "sample.txt",
        "checkpoints",
        "tensorboard",
    }
    assert [p.name for p in sorted((config.folder / "checkpoints").iterdir())] == [
        "step-00000015",
        "step-00000020",
    ]
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["step"] + 1 for row in rows if "validation_loss" in row] == [8, 16, 20]
    assert rows[-1]["validation_loss"] == outcome.validation_loss
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    shown = capsys.readouterr().out
    assert (
        f"validation loss {outcome.validation_loss:.3f} nats per byte, a byte-bigram model" in shown
    )
    again = train(config)
    assert (config.folder.parent / "run.1" / "metrics.jsonl").exists(), (
        "the run from before is not overwritten"
    )
    assert again.validation_loss == outcome.validation_loss


@pytest.mark.cpu_only
@pytest.mark.parametrize(("num_ranks", "dropout"), [full(2, 0.0), (2, 0.2), full(4, 0.2)])
def test_ranks_do_not_change_the_losses(world, tmp_path, num_ranks, dropout, reference):
    one = config_of(tmp_path, "cpu", name="one", dropout=dropout)
    many = dataclasses.replace(one, name="many")
    one = reference(one)
    outcomes = world(num_ranks).run(train_on_rank, many)
    assert losses(one)[0] - losses(one)[-1] > 0.5, "it learns nothing, so this shows nothing"
    assert same(losses(one), losses(many))
    assert norms(one) == pytest.approx(norms(many), rel=1e-4)
    assert len({o.steps for o in outcomes}) == 1


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_do_not_change_the_losses(tmp_path, device, micro_batch, reference):
    whole = config_of(tmp_path, device, name="whole", dropout=0.2)
    parts = config_of(tmp_path, device, name="parts", dropout=0.2, micro_batch=micro_batch)
    whole = reference(whole)
    train(parts)
    assert same(losses(whole), losses(parts))
    assert norms(whole) == pytest.approx(norms(parts), rel=1e-4)


@pytest.mark.cpu_only
def test_micro_batches_on_ranks(world, tmp_path, reference):
    one = config_of(tmp_path, "cpu", name="one")
    one = reference(one)
    many = config_of(tmp_path, "cpu", name="many", micro_batch=2)
    world(2).run(train_on_rank, many)
    assert same(losses(one), losses(many))
    assert norms(one) == pytest.approx(norms(many), rel=1e-4)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, device, monkeypatch, where):
    config = config_of(tmp_path, device, num_steps=6)
    inner, seen = FlatTrainer._update, []

    def poisoned(self: FlatTrainer, *, finite: bool) -> float | None:
        if self.num_steps == 3:
            if where == "gradient":
                self.parallel.flat[0].grad[5] = float("inf")
            before = [b.data.clone() for b in self.parallel.flat]
            norm = inner(self, finite=finite and where == "gradient")
            seen.append(norm)
            assert all(
                torch.equal(b.data, old) for b, old in zip(self.parallel.flat, before, strict=True)
            )
            assert not any(b.grad.any() for b in self.parallel.flat)
            return norm
        before = [b.data.clone() for b in self.parallel.flat]
        norm = inner(self, finite=finite)
        assert not any(
            torch.equal(b.data, old) for b, old in zip(self.parallel.flat, before, strict=True)
        )
        return norm

    monkeypatch.setattr(FlatTrainer, "_update", poisoned)
    outcome = train(config)
    assert seen == [None]
    assert outcome.skipped == 1
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[3]["grad_norm"] is None
    states = load(config.folder / "checkpoints" / "step-00000006")[0]["optimizer"]
    assert {float(s["step"]) for s in states.values()} == {5.0}


@pytest.mark.parametrize(
    ("factor", "term"), [(float("nan"), 0.0), (1.0, float("inf"))]
)  # the second leaves gradients finite
def test_a_loss_that_is_not_finite_is_seen(tmp_path, device, monkeypatch, factor, term):
    config = config_of(tmp_path, device, num_steps=3)
    inner = FlatTrainer._nats

    def poisoned(self: FlatTrainer, *arguments: Any) -> torch.Tensor:
        nats = inner(self, *arguments)
        return nats * factor + term if self.num_steps == 1 else nats

    monkeypatch.setattr(FlatTrainer, "_nats", poisoned)
    assert train(config).skipped == 1
    assert [loss is None for loss in losses(config)] == [False, True, False]
    states = load(config.folder / "checkpoints" / "step-00000003")[0]["optimizer"]
    assert {float(s["step"]) for s in states.values()} == {2.0}


def test_validation_is_on_the_text_held_out(tmp_path, device):
    config = config_of(tmp_path, device, dropout=0.5, micro_batch=4)
    run = TextTraining(config, device=device)
    corpus = prepare(config.data)
    rows = validation_rows(corpus, sequence_length=16, num_sequences=6).to(device)
    assert bytes(rows[0].tolist()) in bytes(corpus.validation)
    model = GPT(config.model, device=device).eval()
    plain = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert run.validate() == pytest.approx(plain.item(), rel=1e-5)
    assert run.model.training


def test_only_weights_of_two_dimensions_decay(tmp_path, device):
    run = TextTraining(config_of(tmp_path, device), device=device)
    by_id = {id(b.parameter): b for b in run.strategy.parallel.flat}
    decays = {
        name: group["weight_decay"]
        for group in run.optimizer.param_groups
        for name in by_id[id(group["params"][0])].names
    }
    assert set(decays) == {name for name, _ in run.model.named_parameters()}
    for name, parameter in run.model.named_parameters():
        assert decays[name] == (0.1 if parameter.ndim >= 2 else 0.0), name


def test_pairs_of_bytes(tmp_path, device):
    plain = config_of(tmp_path, device, num_steps=3)
    config = dataclasses.replace(
        plain,
        data=dataclasses.replace(plain.data, tokenizer="bpe"),
        model=dataclasses.replace(plain.model, vocab_size=300),
    )
    train(config)
    (first, *_) = losses(config)
    assert first < 5.7 * 0.7, "nats per byte: a token of ln(300) nats is more than one byte"


@pytest.mark.parametrize("stage", [0, 1], ids=["by itself", "by a plan"])
def test_blocks_are_compiled_and_nothing_else(tmp_path, device, monkeypatch, stage):
    compiled: list[str] = []

    def note(module: torch.nn.Module) -> None:
        compiled.append(type(module).__name__)

    monkeypatch.setattr(torch.nn.Module, "compile", note)
    config = config_of(tmp_path, device, num_steps=1, compile=True, stage=stage)
    train(config)
    assert compiled == ["GPTBlock"] * config.model.num_layers


@pytest.mark.full  # half a minute of compilers; tests/models and tests/parallel compile blocks
@pytest.mark.real_device
@pytest.mark.slow
def test_a_compiled_model_trains_the_same(tmp_path, device):
    """One layer: the compiler takes ten seconds for each."""
    eager, compiled = (
        config_of(tmp_path, device, name=str(on), num_steps=4, compile=on) for on in (False, True)
    )
    eager, compiled = (
        dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
        for config in (eager, compiled)
    )
    train(eager), train(compiled)
    assert same(losses(eager), losses(compiled), within=1e-4)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, device):
    config = config_of(tmp_path, device, num_steps=2)
    train(config)
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, dim=32))
    with pytest.raises(
        ConfigError,
        match=r"model.dim is 32, but checkpoint .*step-00000002 was made with 16; set it to that",
    ):
        train(wider, resume=True)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    with pytest.raises(CorpusError, match=r"seed 0, but is now at seed 1"):
        train(other, resume=True)
    half = dataclasses.replace(config, precision=PrecisionConfig("bf16"))
    with pytest.raises(ConfigError, match=r"precision.dtype is 'bf16', but checkpoint"):
        train(half, resume=True)


def test_a_run_without_plot_and_tensorboard_leaves_neither(tmp_path, device):
    config = config_of(tmp_path, device, num_steps=1, plot=False, tensorboard=False)
    train(config)
    names = {path.name for path in config.folder.iterdir()}
    assert "metrics.jsonl" in names
    assert not names & {"loss.png", "tensorboard"}


def test_resume_without_a_checkpoint_says_so(tmp_path, device, capsys):
    assert train(config_of(tmp_path, device, num_steps=1), resume=True).steps == 1
    assert "no checkpoint in" in capsys.readouterr().out


@pytest.mark.cpu_only
def test_two_runs_do_not_share_a_folder(tmp_path):
    config = config_of(tmp_path, "cpu")
    config.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(config.folder.with_name(f".{config.folder.name}.lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another run is writing to .*--set name=other"):
            train(config)
        assert not config.folder.exists()


@pytest.mark.cpu_only
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"can't be written: .*; set train.folder to another folder"
    ):
        train(config_of(tmp_path, "cpu"))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 9}, "train.batch is 9 sequences, which 2 ranks can't share"),
        ({"micro_batch": 3}, "train.micro_batch is 3, which does not divide a rank's 4 sequences"),
        ({"batch": 4096}, "fewer than a global batch of 4096"),
        ({"device": "cuda"}, "train.device is 'cuda', but torch sees no GPU"),
    ],
)
def test_all_ranks_are_told_alike(world, tmp_path, change, message):
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = config_of(tmp_path, "cpu")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **change))
    first, second = world(2).run(train_on_rank, config)
    assert first == second
    assert message in first
    assert not config.folder.exists()


@pytest.mark.cpu_only
def test_a_second_signal_changes_nothing():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGINT


def test_masks_are_drawn_anew_for_each_step_and_micro_batch(tmp_path, device, monkeypatch):
    drawn = []
    inner = GPT.set_dropout

    def recording(self: GPT, shape: tuple[int, int], **where: int) -> None:
        drawn.append((shape, where["seed"], where["step"], where["first_row"]))
        inner(self, shape, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(GPT, "set_dropout", recording)
    train(config_of(tmp_path, device, num_steps=2, micro_batch=4, dropout=0.2, seed=9))
    assert drawn == [((4, 16), 9, step, row) for step in (0, 1) for row in (0, 4)]
