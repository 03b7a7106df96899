"""Trackers get the numbers of each row, and none of them can end a run."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

from pyops.config import ConfigError, ObserveConfig
from pyops.config import config_of as read_config
from pyops.observe.trackers import Trackers, open_tracker
from pyops.train import train
from tests.train.tiny_run import config_of

pytestmark = pytest.mark.cpu_only


class WandB(types.ModuleType):
    """As much of Weights & Biases as is called, with its own signatures."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.options: dict[str, Any] = {}
        self.ended = 0
        self.failing = False

    def init(self, *, name: str, dir: str, config: dict[str, Any], resume: str) -> WandB:
        self.options = {"name": name, "dir": dir, "config": config}
        return self

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        if self.failing:
            raise ConnectionError("no route")
        assert step is not None
        self.rows.append((step, data))

    def finish(self) -> None:
        self.ended += 1


class MLflow(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []

    def start_run(self, *, run_name: str) -> None:
        self.calls.append(run_name)

    def log_dict(self, dictionary: dict[str, Any], artifact_file: str) -> None:
        self.calls.append(artifact_file)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, metrics))

    def end_run(self) -> None:
        self.calls.append("end")


@pytest.fixture
def wandb(monkeypatch):
    module = WandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_hands_on_its_numbers(tmp_path, wandb):
    config = config_of(tmp_path, "cpu", num_steps=3)
    train(dataclasses.replace(config, observe=ObserveConfig(trackers=("wandb",))))
    assert [step for step, _ in wandb.rows] == [0, 1, 2]
    assert all(row["loss"] > 0 and "step" not in row for _, row in wandb.rows)
    assert wandb.options["name"] == "run"
    assert wandb.options["config"]["model"]["dim"] == 16
    assert wandb.ended == 1


def test_mlflow_gets_the_same(tmp_path, monkeypatch):
    module = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    trackers = Trackers(["mlflow"], name="a", folder=tmp_path, config={})
    trackers.log({"step": 4, "loss": 1.5, "note": "text", "frozen": 2})
    trackers.close()
    assert module.calls == ["a", "config.json", (4, {"loss": 1.5, "frozen": 2.0}), "end"]


def test_a_service_that_fails_is_told_of_once_and_asked_no_more(tmp_path, wandb):
    trackers = Trackers(["wandb"], name="a", folder=tmp_path, config={})
    wandb.failing = True
    for step in range(3):
        trackers.log({"step": step, "loss": 1.0})
    assert trackers.take_problems() == ["no more metrics for wandb: no route"]
    assert trackers.take_problems() == []
    trackers.close()
    assert wandb.ended == 0


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    trackers = Trackers(["mlflow"], name="a", folder=tmp_path, config={})
    assert trackers.take_problems() == ["no metrics for mlflow: pip install mlflow"]
    with pytest.raises(ValueError, match="kind is 'other'; give one of wandb, mlflow"):
        open_tracker("other", name="a", folder=tmp_path, config={})
    with pytest.raises(ConfigError, match=r"observe\.trackers is .*a list of wandb, mlflow"):
        read_config({"observe": {"trackers": ["other"]}})
