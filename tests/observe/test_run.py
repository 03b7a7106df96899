"""What a run of `pyops train` sees of itself: its collectives, a replica that differs, a bad batch,
restarts without progress."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import pytest
import torch

from pyops.cli import main
from pyops.config import Config, ConfigError, ObserveConfig
from pyops.observe import findings, read_records
from pyops.observe.spikes import save_batch
from pyops.train import TextTraining, train
from pyops.train.host.observed import check_progress
from pyops.train.report.goodput import Goodput
from pyops.train.report.metrics import read_rows
from tests.train.tiny_run import config_of, losses

pytestmark = pytest.mark.cpu_only


def observing(config: Config, **options: Any) -> Config:
    return dataclasses.replace(config, observe=ObserveConfig(**options))


def train_with_a_flipped_bit(rank: int, group: Any, config: Config) -> str:
    """Rank 1's parameters lose a bit in the sixth step; what the run shows."""
    step = TextTraining.train_step

    def flipping(self: TextTraining, *, stop: bool = False) -> Any:
        found = step(self, stop=stop)
        if rank == 1 and self.step == 6:
            weight = next(iter(self.model.parameters())).data
            weight.view(torch.int32).view(-1)[5] ^= 1
        return found

    TextTraining.train_step = flipping
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            train(config)
    finally:
        TextTraining.train_step = step
    return shown.getvalue()


def test_a_run_notes_its_collectives_and_names_a_replica_that_differs(world, tmp_path):
    config = config_of(tmp_path, "cpu", num_steps=8, log_every=4)
    shown, _ = world(2).run(train_with_a_flipped_bit, observing(config, compare_every=2))
    assert "replicas differ after step 6: ranks 0, 1 have other bits of" in shown
    assert "after step 4" not in shown
    records = read_records(config.folder)
    assert sorted(records) == [0, 1]
    assert findings(records) == [] or findings(records)[0].kind == "slow"
    assert any(e.op == "all_reduce" for e in records[0].entries)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] + 1 for row in rows if "slowest_rank" in row] == [4, 8]
    assert all(0 < row["goodput"] <= 1 and row["step_s"] > 0 for row in rows)


def test_observing_changes_no_bit(world, tmp_path):
    config = config_of(tmp_path, "cpu", num_steps=6)
    other = dataclasses.replace(config, name="unseen")
    off = observing(other, flight_record=False, stragglers=False, spike=0.0)
    world(2).run(run, observing(config, compare_every=1))
    world(2).run(run, off)
    assert losses(config) == losses(off)
    assert not (off.folder / "flight").exists()


def run(rank: int, group: Any, config: Config) -> None:
    train(config)


def test_the_rows_of_a_bad_batch_are_told_apart_by_the_replay(tmp_path, capsys):
    config = observing(config_of(tmp_path, "cpu", checkpoint_every=10, num_checkpoints=9))
    train(config)
    good = (tmp_path / "text.py").read_bytes()[:16]
    tokens = torch.tensor([list(good), list(b"\xfe\x01Q~" * 4), list(good)])
    batch = {"tokens_BT": tokens, "targets_BT": tokens.roll(-1, 1)}
    about = {"step": 15, "loss": 9.0, "why": "the loss is 9"}
    place = save_batch(config.folder, batch, rank=0, about=about)
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'name = "run"\n[model]\nsequence_length = 16\nnum_layers = 2\nnum_heads = 2\ndim = 16\n'
        f'[data]\npath = "{tmp_path / "text.py"}"\ncache = "{tmp_path / "cache"}"\n'
        f'[train]\nfolder = "{tmp_path / "runs"}"\ndevice = "cpu"\n'
    )
    capsys.readouterr()
    assert main(["replay", str(toml), str(place)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 16: the loss is 9"
    assert "step-00000010" in lines[1]
    assert next(line.split()[1] for line in lines[3:]) == "1"
    assert main(["replay", str(toml), str(tmp_path)]) == 2
    assert "name a folder of a run's spikes/" in capsys.readouterr().err


def test_a_run_that_makes_no_progress_ends(tmp_path):
    config = observing(config_of(tmp_path, "cpu"), max_idle_restarts=2)
    config.folder.mkdir(parents=True)
    for _ in range(2):
        check_progress(config, restarted=True)
    with pytest.raises(ConfigError, match="was restarted 3 times without a newer checkpoint"):
        check_progress(config, restarted=True)
    check_progress(config, restarted=False)
    check_progress(config, restarted=True)
    check_progress(observing(config, max_idle_restarts=0), restarted=True)


def test_goodput_counts_steps_that_stay_against_all_the_time(tmp_path):
    first = Goodput(tmp_path, [], resumed=False)
    assert 0 < first.step({"step_s": 1e-9})["goodput"] <= 1
    (tmp_path / ".started").write_text("0.0")
    again = Goodput(tmp_path, [{"step_s": 5.0}], resumed=True)
    assert again.step({"step_s": 5.0})["goodput"] < 1e-6
    assert again.step({}) == {}


def test_flight_of_a_folder_without_records_says_what_to_give(tmp_path, capsys):
    assert main(["flight", str(tmp_path)]) == 2
    assert "has no rank*.flight" in capsys.readouterr().err
