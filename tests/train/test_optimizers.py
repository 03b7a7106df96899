"""Every optimizer and codec that a configuration can name trains, on ranks too, and what it sends
is counted and kept."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

import pyops.optim
from pyops.checkpoint import load
from pyops.config import COMMUNICATING, OPTIMIZERS, Config, ConfigError
from pyops.models import GPT
from pyops.train import train
from pyops.train.report.metrics import read_rows
from pyops.train.setup.recipe import CLASSES
from pyops.train.setup.replicated import FlatTrainer
from tests.grids import full
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, same, train_on_rank

THERE = [name for name in OPTIMIZERS if hasattr(pyops.optim, CLASSES[name])]
LOCAL = [name for name in THERE if name not in COMMUNICATING]
ONE_BIT = [name for name in THERE if name in COMMUNICATING]
RATES = {
    "sgd": 1.0,
    "lars": 30.0,
    "lion": 1e-2,
    "lamb": 0.2,
    "adagrad": 5e-2,
    "adafactor": 0.5,
    "onebit_lamb": 0.2,
}
WARMUP = 10


def of(folder: Any, device: Any, kind: str, **options: Any) -> Config:
    """A tiny run with this optimizer, at a learning rate that suits it."""
    given = {"name": kind, "lr": RATES.get(kind, 1e-2)}
    if kind in COMMUNICATING:
        given["compression_warmup_steps"] = WARMUP
    return config_of(folder, device, optimizer=given, **{"name": kind, **options})


def rows_of(config: Config) -> list[dict[str, Any]]:
    return read_rows(config.folder / "metrics.jsonl")


@pytest.mark.parametrize("name", THERE)
def test_it_learns_alone(tmp_path, device, name):
    config = of(tmp_path, device, name)
    train(config)
    first, *_, last = losses(config)
    assert last < first - 0.8
    assert not any("bytes_sent" in row for row in rows_of(config)), "one rank sends nothing"


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "name", [name if name == "adafactor" else full(name) for name in LOCAL]
)  # it goes by whole tensors; to any of them, ranks only give the mean gradient
def test_ranks_do_not_change_it(world, tmp_path, name, reference):
    one, two = of(tmp_path, "cpu", name, name="one"), of(tmp_path, "cpu", name, name="two")
    one = reference(one)
    world(2).run(train_on_rank, two)
    assert same(losses(one), losses(two), within=1e-4)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "name", [name if name == "onebit_adam" else full(name) for name in ONE_BIT]
)  # tests/onebit has each of them on ranks
def test_one_bit_optimizers_on_ranks(world, tmp_path, name, reference):
    plain, config = of(tmp_path, "cpu", "adamw"), of(tmp_path, "cpu", name)
    plain = reference(plain, ranks=2)
    world(2).run(train_on_rank, config)
    ours = losses(config)
    assert ours[-1] < ours[0] - 0.8
    if name == "onebit_adam":
        assert same(ours[:WARMUP], losses(plain)[:WARMUP]), "the warm-up is AdamW's"
    rows = rows_of(config)
    whole = rows_of(plain)[-1]["bytes_sent"]
    numel = sum(p.numel() for p in GPT(config.model).parameters())
    assert whole == pytest.approx(4 * numel, rel=0.1), (
        "two ranks send half of the gradients to each other, twice; and padding"
    )
    sent = [row["bytes_sent"] for row in rows[WARMUP + 1 :]]
    assert sum(sent) / len(sent) < whole / 8  # the tiny model is smaller than a block


@pytest.mark.cpu_only
@pytest.mark.parametrize("codec", ["bf16", "int8", "onebit"])
def test_codecs_on_ranks(world, tmp_path, codec, reference):
    plain, config = (
        config_of(tmp_path, "cpu", name="plain"),
        config_of(tmp_path, "cpu", name=codec, codec=codec),
    )
    plain = reference(plain, ranks=2)
    world(2).run(train_on_rank, config)
    assert losses(config) != losses(plain), "nothing was compressed"
    assert losses(config)[-1] == pytest.approx(
        losses(plain)[-1], abs=1.0 if codec == "onebit" else 0.05
    )
    least = {"bf16": 1.8, "int8": 3.5, "onebit": 20.0}[
        codec
    ]  # 46 kB a step: the ranks' agreement on each bucket counts
    assert all(row["compression"] > least for row in rows_of(config))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("name", "codec", "stop"),
    [
        ("adamw", "onebit", "before"),
        # a codec's errors and the states of Adam go on above; tests/onebit resumes in every phase
        *(full(name, "none", "before") for name in ("adafactor", *ONE_BIT)),
        *(full(name, "none", "after") for name in ONE_BIT[1:]),
        full(ONE_BIT[0], "none", "after"),
        # the same once more: they have no switch
        *(full("adamw", "onebit", "after"), full("adafactor", "none", "after")),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(world, tmp_path, name, codec, stop, reference):
    """Stopped in step 7: with the switch at step 5 or 10. Phase, schedule and errors are part of
    the checkpoint."""
    straight = of(tmp_path, "cpu", name, name="straight", codec=codec)
    if name in COMMUNICATING:
        warmup = dataclasses.replace(
            straight.optimizer, compression_warmup_steps=5 if stop == "after" else 10
        )
        straight = dataclasses.replace(straight, optimizer=warmup)
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    first, _ = world(2).run(train_and_stop_rank_1, broken)
    assert 7 < first.steps < 10
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    ours, theirs = (
        load(c.folder / "checkpoints" / f"step-{STEPS:08}")[0] for c in (broken, straight)
    )
    for key in theirs["model"]:
        assert torch.equal(ours["model"][key], theirs["model"][key]), key


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("name", "codec"), [full("adamw", "int8"), ("onebit_adam", "none")]
)  # a codec's errors go to another number of ranks in tests/test_data_parallel_codec.py
def test_errors_of_two_ranks_resume_on_one(world, tmp_path, name, codec, reference):
    straight = of(tmp_path, "cpu", name, name="straight", codec=codec)
    if name in COMMUNICATING:
        straight = dataclasses.replace(
            straight, optimizer=dataclasses.replace(straight.optimizer, compression_warmup_steps=4)
        )
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    world(2).run(train_and_stop_rank_1, broken)
    train(broken, resume=True)
    assert losses(broken)[-1] == pytest.approx(losses(straight)[-1], abs=0.3)


def test_a_checkpoint_of_another_optimizer_or_codec_is_refused(tmp_path, device):
    config = config_of(tmp_path, device, num_steps=2)
    train(config)
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="sgd"))
    with pytest.raises(
        ConfigError,
        match=r"optimizer.name is 'sgd', but checkpoint .*was made with 'adamw'; set it to that",
    ):
        train(other, resume=True)
    other = dataclasses.replace(
        config, communication=dataclasses.replace(config.communication, codec="int8")
    )
    with pytest.raises(
        ConfigError, match=r"communication.codec is 'int8', but checkpoint .*was made with 'none'"
    ):
        train(other, resume=True)


def test_a_warm_up_longer_than_the_run_is_said(tmp_path, device, capsys):
    config = of(tmp_path, device, "onebit_adam", num_steps=WARMUP)
    level = logging.getLogger("pyops").level
    train(config)
    assert f"warmup_steps={WARMUP}" in capsys.readouterr().out
    assert logging.getLogger("pyops").level == level


def test_the_switch_is_said(tmp_path, device, capsys):
    train(of(tmp_path, device, "onebit_adam"))
    shown = [line for line in capsys.readouterr().out.splitlines() if "OneBitAdam" in line]
    assert shown


def test_a_bad_gradient_skips_the_step(tmp_path, device, monkeypatch):
    config, inner = of(tmp_path, device, "onebit_adam", num_steps=16), FlatTrainer._update

    def poisoned(self: FlatTrainer, *, finite: bool) -> float | None:
        if self.num_steps == 13:
            self.parallel.flat[0].grad[5] = float("inf")
        return inner(self, finite=finite)

    monkeypatch.setattr(FlatTrainer, "_update", poisoned)
    assert train(config).skipped == 1
    assert all(torch.isfinite(torch.tensor(losses(config))))
