"""[asynchronous]: ranks that train on their own and meet now and then."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import AsynchronousConfig, Config, ConfigError, load_config
from pyops.config import config_of as config_of_tables
from pyops.train import train
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, same, train_on_rank
from tests.workers import ROOT

pytestmark = pytest.mark.cpu_only

STREAMING = AsynchronousConfig("diloco", every=4, fragments=2, delay=1, codec="int8")


def asynchronous(folder: Path, options: AsynchronousConfig, *, name: str, **given: Any) -> Config:
    return dataclasses.replace(config_of(folder, "cpu", name=name, **given), asynchronous=options)


def final(config: Config) -> dict[str, Any]:
    state = load(config.folder / "checkpoints" / f"step-{STEPS:08}")[0]
    assert isinstance(state, dict)
    return state


def test_meeting_at_each_step_is_the_synchronous_run(world, tmp_path, reference):
    sgd = {"name": "sgd", "lr": 0.2, "momentum": 0.0, "max_grad_norm": 0.0, "weight_decay": 0.0}
    plain = reference(config_of(tmp_path, "cpu", name="plain", optimizer=sgd), ranks=2)
    options = AsynchronousConfig("local_sgd", every=1)
    config = asynchronous(tmp_path, options, name="each", optimizer=sgd)
    assert world(2).run(train_on_rank, config)[0].steps == STEPS
    assert same(losses(config), losses(plain), within=2e-5)
    assert losses(plain)[-1] < losses(plain)[0] - 0.3


def test_a_stopped_run_goes_on_bit_for_bit_and_also_on_one_rank(world, tmp_path):
    straight = asynchronous(tmp_path, STREAMING, name="straight", dropout=0.1)
    broken = dataclasses.replace(straight, name="broken")
    alone = dataclasses.replace(straight, name="alone")
    first, _ = world(2).run(train_on_rank, straight)
    assert losses(straight)[-1] < losses(straight)[0] - 0.5
    assert first.validation_loss < losses(straight)[0] - 0.5
    for config in (broken, alone):
        stopped, other = world(2).run(train_and_stop_rank_1, config)
        assert stopped.stopped_by == other.stopped_by == signal.SIGTERM
        assert 7 < stopped.steps == other.steps < 12  # at the next meeting
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    ours, theirs = final(broken), final(straight)
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
        rows = theirs["replicas"]["model"][name]
        assert torch.equal(ours["replicas"]["model"][name], rows)
        assert rows.shape == (2, *tensor.shape)
    train(alone, resume=True)
    assert len(losses(alone)) == STEPS
    assert losses(alone)[-1] < losses(straight)[0] - 0.5


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"asynchronous": {"method": "gossip"}}, "asynchronous.method is 'gossip'; choose one of"),
        ({"asynchronous": {"method": "diloco", "every": 0}}, "asynchronous.every is 0"),
        ({"zero": {"stage": 2}}, "zero.stage is 2; set it to 0"),
        ({"parallel": {"tp": 2}}, "parallel.tp is 2; set it to 1"),
        ({"optimizer": {"name": "onebit_adam"}}, "'onebit_adam' communicates at each step"),
        ({"communication": {"codec": "int8"}}, "send no gradients, but communication.codec"),
        ({"precision": {"dtype": "fp16"}}, "set it to bf16"),
        ({"task": {"kind": "digits"}}, "of a GPT that is trained on text"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_its_key(tables, message):
    with pytest.raises(ConfigError, match=message):
        config_of_tables({"asynchronous": {"method": "diloco"}, **tables})


def test_the_example_is_read():
    config = load_config(ROOT / "examples" / "diloco.toml")
    assert config.asynchronous.on
    assert config.asynchronous.wire_codec is not None
