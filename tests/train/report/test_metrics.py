"""What is written is what is read, also after a killed run."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from pyops.train.report.metrics import MetricsLog, peak_memory_gib, plot_losses, read_rows

pytestmark = pytest.mark.cpu_only


def row(step: int, **more: float) -> dict[str, object]:
    return {"step": step, "loss": 3.0 - 0.1 * step, "lr": 1e-3, **more}


def test_rows_come_back_and_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(5):
        log.write(row(step))
    log.close()
    with open(log.path, "a") as file:
        file.write('{"step": 5, "lo')  # killed here
    assert read_rows(log.path) == [row(step) for step in range(5)]
    again = MetricsLog(tmp_path, first_step=3)
    again.write(row(3, validation_loss=2.5))
    again.close()
    assert (
        read_rows(log.path) == again.rows == [row(0), row(1), row(2), row(3, validation_loss=2.5)]
    )
    assert read_rows(tmp_path / "none") == []


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path)
    for step in range(4):
        log.write(row(step), tensorboard=step % 2 == 0)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss")] == [(0, 3.0), (2, 2.8)]


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    log.take_problems()

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        log.write(row(0))
        log.write(row(1))
    (problem,) = log.take_problems()
    assert "metrics.jsonl can't be written: No space left on device" in problem
    assert log.take_problems() == []
    log.write(row(2))
    assert read_rows(log.path) == [row(2)]
    assert log.rows == [row(0), row(1), row(2)]


def test_the_curve_is_a_picture(tmp_path):
    rows = [row(0), row(1, validation_loss=2.6), {**row(2), "loss": None}]
    assert plot_losses(tmp_path / "loss.png", rows, bigram_loss=2.4, title="t")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_plausible():
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(64 << 20)  # a quarter of a GiB
    assert 0.05 < before < 100
    assert peak_memory_gib(torch.device("cpu")) >= max(before, 0.25)
    del held
