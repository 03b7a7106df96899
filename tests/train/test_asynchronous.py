"""[asynchronous]: ranks that train on their own and meet now and then."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import AsynchronousConfig, Config, ConfigError, load_config
from pyops.config import config_of as config_of_tables
from pyops.parameter_server import ParameterShard, Request
from pyops.train import train
from pyops.train.report.metrics import read_rows
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


SGD = {"name": "sgd", "lr": 0.2, "momentum": 0.0, "max_grad_norm": 0.0, "weight_decay": 0.0}
ADAGRAD = {"name": "adagrad", "lr": 0.05, "weight_decay": 0.0}


def downpour(folder: Path, name: str, *, optimizer: dict[str, Any], **given: Any) -> Config:
    options = {"every": 4, **given.pop("options", {})}
    return asynchronous(
        folder, AsynchronousConfig("downpour", **options), name=name, optimizer=optimizer, **given
    )


def test_downpour_of_one_replica_that_waits_is_the_plain_optimizer_bit_for_bit(tmp_path, reference):
    plain = reference(config_of(tmp_path, "cpu", name="plain", optimizer=SGD))
    config = downpour(tmp_path, "alone", optimizer=SGD, options={"fetch_delay": 0})
    assert train(config).steps == STEPS
    assert losses(config) == losses(plain)
    assert losses(plain)[-1] < losses(plain)[0] - 0.3
    ours, theirs = final(config)["model"], final(plain)["model"]
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_downpour_goes_on_bit_for_bit(tmp_path):
    """Adagrad's sums and what the codec has left out of pushes go on with the parameters."""
    options = {"fetch_delay": 0, "push_every": 3, "codec": "onebit"}
    saves = {"checkpoint_every": 8, "num_checkpoints": 3}
    straight = downpour(
        tmp_path, "straight", dropout=0.1, optimizer=ADAGRAD, options=options, **saves
    )
    broken = dataclasses.replace(straight, name="broken")
    train(straight)
    train(broken)
    folder = broken.folder / "checkpoints"
    for step in (16, STEPS):
        shutil.rmtree(folder / f"step-{step:08}")
    assert (folder / f"step-{8:08}").exists()
    train(broken, resume=True)
    assert losses(broken) == losses(straight)
    ours, theirs = final(broken), final(straight)
    for part in ("model", "shards"):
        for name, value in theirs[part].items():
            assert torch.equal(ours[part][name], value), name
    assert torch.equal(ours["errors"], theirs["errors"])
    assert theirs["errors"].abs().max() > 0


def pushes_of_a_run(rank: int, group: object, config: Config) -> list[int]:
    """Of whom the shard of this rank applied pushes, in order."""
    order: list[int] = []
    genuine = ParameterShard.push

    def push(
        shard: ParameterShard, request: Request, gradient: torch.Tensor, **options: Any
    ) -> Any:
        order.append(request.worker)
        return genuine(shard, request, gradient, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterShard, "push", push)
        train(config)
    return order


def test_the_first_replica_makes_the_warm_start_alone(world, tmp_path):
    options = {"warm_start": 3}
    config = downpour(tmp_path, "warm", optimizer=ADAGRAD, options=options, num_steps=8)
    for order in world(2).run(pushes_of_a_run, config):
        assert order[:3] == [0, 0, 0]
        assert sorted(order) == [0] * 8 + [1] * 8


def test_downpour_over_ranks_and_its_checkpoint_on_other_ranks(world, tmp_path):
    """Two replicas, then three that go on from what the shards of the two held."""
    options = {"warm_start": 2}
    config = downpour(tmp_path, "two", optimizer=ADAGRAD, options=options, batch=12)
    outcomes = world(2).run(train_on_rank, config)
    assert [outcome.steps for outcome in outcomes] == [STEPS, STEPS]
    assert losses(config)[-1] < losses(config)[0] - 0.5
    rows = read_rows(config.folder / "metrics.jsonl")
    assert 0 < max(row.get("staleness", 0.0) for row in rows) < 20
    before = final(config)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=STEPS + 4))
    later = world(3).run(train_on_rank, more, True)
    assert [outcome.steps for outcome in later] == [STEPS + 4] * 3, later
    assert losses(more)[-1] < losses(config)[0] - 0.5
    after = load(config.folder / "checkpoints" / f"step-{STEPS + 4:08}")[0]
    for state, shards in ((before, 2), (after, 3)):
        assert len(state["shards"]["sum"]) == len(before["shards"]["sum"]) > 10_000
        assert len(state["shards"]["step"]) == shards
    # What was pushed by then: two replicas, one push a step; later three.
    assert before["shards"]["applied"].tolist() == [2 * STEPS] * 2
    assert after["shards"]["applied"].tolist() == [2 * STEPS + 3 * 4] * 3
    assert bool((after["shards"]["sum"] >= before["shards"]["sum"]).all())


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


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"asynchronous": {"push_every": 0}}, "asynchronous.push_every is 0; give a whole number"),
        ({"asynchronous": {"fetch_delay": 2}}, "asynchronous.fetch_delay is 2, but the next fetch"),
        ({"asynchronous": {"local_lr": -1.0}}, "asynchronous.local_lr is -1.0; give a number, 0"),
        ({"asynchronous": {"codec": "powersgd"}}, "asynchronous.codec is 'powersgd'; choose one"),
        (
            {"asynchronous": {"codec": "power_sgd"}},
            "asynchronous.codec is 'power_sgd', which mul",
        ),
        ({"asynchronous": {"warm_start": 60}}, "asynchronous.warm_start is 60, but the replicas"),
        ({"train": {"validate_every": 5}}, "warm_start is 8, but the .* train.validate_every = 5"),
        ({"optimizer": {"name": "lamb", "weight_decay": 0.0}}, "'lamb' goes by the norms of whole"),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer.weight_decay is 0.1: set it to 0"),
        ({"precision": {"dtype": "bf16"}}, "precision.dtype is 'bf16': set it to fp32"),
    ],
)
def test_what_downpour_does_not_go_with_is_refused_by_its_key(tables, message):
    given: dict[str, Any] = {
        "optimizer": {"weight_decay": 0.0},
        **tables,
        "asynchronous": {"method": "downpour", "warm_start": 8, **tables.get("asynchronous", {})},
    }
    with pytest.raises(ConfigError, match=message):
        config_of_tables(given)


@pytest.mark.parametrize("name", ["diloco", "downpour"])
def test_the_example_is_read(name):
    config = load_config(ROOT / "examples" / f"{name}.toml")
    assert config.asynchronous.on
    assert config.asynchronous.method == name
