"""A run killed after a checkpoint in memory goes on with the losses of an undisturbed one, also
where one rank's memory is lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest

from pyops.checkpoint import load
from pyops.config import AsynchronousConfig, Config, ElasticConfig
from pyops.train import train
from pyops.train.host.neighbor import RUN_ID, memory_checkpoints
from tests.grids import full
from tests.train.faults.killed_run import train_and_die
from tests.train.tiny_run import STEPS, config_of, losses, same, train_on_rank
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

IN_MEMORY = 12  # steps; the newest when a rank is killed in step 14


def killed(folder: Path, stage: int) -> Config:
    config = config_of(
        folder,
        "cpu",
        stage=stage,
        checkpoint_every=5,
        num_checkpoints=9,
        memory_checkpoint_every=4,
        memory_checkpoint_folder=str(folder / "memory"),
    )
    _, second = spawn_ranks(2, train_and_die, config, "step", 14, group_timeout=10)
    assert second.exitcode == -signal.SIGKILL
    return config


def copied(config: Config, folder: Path) -> Config:
    """The run that was killed, in another place, as if it had begun there."""
    shutil.copytree(config.train.folder, folder / "runs")
    shutil.copytree(config.train.memory_checkpoint_folder, folder / "memory")
    places = {"folder": f"{folder}/runs", "memory_checkpoint_folder": f"{folder}/memory"}
    copy = dataclasses.replace(config, train=dataclasses.replace(config.train, **places))
    told = json.loads((copy.folder / RUN_ID).read_text())
    (copy.folder / RUN_ID).write_text(json.dumps({**told, "folder": str(copy.folder)}))
    return copy


@pytest.mark.parametrize("stage", [full(0), full(1), 3])
def test_a_killed_run_goes_on_from_memory(world, tmp_path, reference, stage):
    config = killed(tmp_path, stage)
    # The neighbor's copies are all that is left of rank 1, in a copy of the run.
    lost, wiped = copied(config, tmp_path / "lost"), copied(config, tmp_path / "wiped")
    (memory,) = (tmp_path / "lost" / "memory").iterdir()
    shutil.rmtree(memory / "rank-00001")
    alone = copied(lost, tmp_path / "alone")
    shutil.rmtree(tmp_path / "wiped" / "memory")
    plain = {"memory_checkpoint_every": 0, "memory_checkpoint_folder": ""}
    straight = reference(
        dataclasses.replace(config, train=dataclasses.replace(config.train, **plain)), ranks=2
    )
    for run in (config, lost, wiped) if stage == 3 else (lost,):
        told = world(2).run(train_on_rank, run, True)
        assert [each.steps for each in told] == [STEPS, STEPS], told
        assert losses(run) == losses(straight)
        steps = [int(path.name[5:]) for path in (run.folder / "checkpoints").iterdir()]
        assert (IN_MEMORY in steps) == (run is not wiped), "not from where it should go on"
        assert not list(Path(run.train.memory_checkpoint_folder).iterdir()), "copies are left"
    if stage == 3:  # fewer ranks go on, where a host is lost
        assert train(alone, resume=True).steps == STEPS
        assert same(losses(alone), losses(straight))
        assert (alone.folder / "checkpoints" / f"step-{IN_MEMORY:08}").exists()
    state, _ = load(lost.folder / "checkpoints" / f"step-{IN_MEMORY:08}")
    assert state["step"] == IN_MEMORY


def test_a_copy_of_a_run_leaves_the_memory_of_the_first_to_it(tmp_path, caplog):
    config = config_of(tmp_path, "cpu", memory_checkpoint_every=4)
    first, again = (memory_checkpoints(config) for _ in range(2))
    assert first is not None
    assert again is not None
    assert again.folder == first.folder
    shutil.copytree(config.folder, tmp_path / "copies" / config.name)
    options = dataclasses.replace(config.train, folder=str(tmp_path / "copies"))
    with caplog.at_level("INFO", logger="pyops"):
        copy = memory_checkpoints(dataclasses.replace(config, train=options))
    assert copy is not None
    assert copy.folder != first.folder
    assert f"of the run in {config.folder}, whose checkpoints in memory are left" in caplog.text
    (config.folder / RUN_ID).write_text('{"run": "half')
    renewed = memory_checkpoints(config)
    assert renewed is not None
    assert renewed.folder != first.folder


@pytest.mark.parametrize("section", ["asynchronous", "elastic"])
def test_runs_whose_ranks_go_their_own_way_are_refused(tmp_path, section):
    config = config_of(tmp_path, "cpu", memory_checkpoint_every=4)
    other = {
        "asynchronous": AsynchronousConfig(method="local_sgd"),
        "elastic": ElasticConfig(freeze="gradient_norm"),
    }
    with pytest.raises(ValueError, match=r"train\.memory_checkpoint_every is 4, which"):
        dataclasses.replace(config, **{section: other[section]})
