"""A run that was stopped, or killed, continues bit for bit, on all ranks alike."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config
from pyops.train import TextTraining, train
from tests.grids import full
from tests.train.tiny_run import STEPS, config_of, losses, same, stop_before, train_on_rank


@pytest.mark.parametrize("precision", [full("fp32"), "bf16"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, device, monkeypatch, precision, reference):
    straight = config_of(tmp_path, device, name="straight", dropout=0.2, precision=precision)
    broken = config_of(tmp_path, device, name="broken", dropout=0.2, precision=precision)
    straight = reference(straight)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_before(patch, 7)
        outcome = train(broken)
    assert outcome.stopped_by == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert 7 < outcome.steps < 10
    assert len(losses(broken)) == outcome.steps
    finished = train(broken, resume=True)
    assert finished.steps == STEPS
    assert losses(broken) == losses(straight)
    ours, theirs = (load(c.folder / "checkpoints" / "step-00000020")[0] for c in (broken, straight))
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
    for name, moments in theirs["optimizer"].items():
        assert set(moments) >= {"exp_avg", "exp_avg_sq", "step"}
        for key, tensor in moments.items():
            assert torch.equal(
                torch.as_tensor(ours["optimizer"][name][key]), torch.as_tensor(tensor)
            ), (name, key)
    assert ours["data"] == theirs["data"]


def test_random_numbers_continue_too(tmp_path, device, monkeypatch):
    """What a step of one's own draws from torch's generator."""
    drawn: list[float] = []
    inner = TextTraining.train_step

    def drawing(self: TextTraining, *, stop: bool = False) -> Any:
        if not drawn:
            torch.manual_seed(3)
        drawn.append(torch.rand((), device=device).item())
        if len(drawn) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, stop=stop)

    monkeypatch.setattr(TextTraining, "train_step", drawing)
    config = config_of(tmp_path, device, num_steps=10)
    assert train(config).steps < 10
    torch.manual_seed(4)
    train(config, resume=True)
    torch.manual_seed(3)
    assert drawn == [torch.rand((), device=device).item() for _ in range(10)]


def test_steps_after_the_checkpoint_are_done_again(tmp_path, device, monkeypatch, reference):
    """Killed at step 9, the last checkpoint from step 5: rows 5 to 8 are dropped, and come out the
    same."""
    straight = config_of(tmp_path, device, name="straight", checkpoint_every=5)
    broken = config_of(tmp_path, device, name="broken", checkpoint_every=5)
    straight = reference(straight)
    inner = TextTraining.train_step

    def dying(self: TextTraining, *, stop: bool = False) -> Any:
        if self.step == 9:
            raise RuntimeError("killed")
        return inner(self, stop=stop)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(TextTraining, "train_step", dying)
        train(broken)
    assert len(losses(broken)) == 9
    train(broken, resume=True)
    assert losses(broken) == losses(straight)


def train_and_stop_rank_1(rank: int, group: object, config: Config) -> Any:
    """Only rank 1 is told to stop, in step 7."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            stop_before(patch, 7)
        return train(config)


@pytest.mark.cpu_only
def test_a_signal_to_one_rank_stops_all_at_the_same_step(world, tmp_path, reference):
    straight = config_of(tmp_path, "cpu", name="straight", dropout=0.2)
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    first, second = world(2).run(train_and_stop_rank_1, broken)
    assert first.steps == second.steps
    assert 7 < first.steps < 10
    assert first.stopped_by == second.stopped_by == signal.SIGTERM
    world(2).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)


@pytest.mark.cpu_only
def test_a_run_of_two_ranks_resumes_on_one(world, tmp_path, reference):
    straight = config_of(tmp_path, "cpu", name="straight")
    broken = dataclasses.replace(straight, name="broken")
    straight = reference(straight, ranks=2)
    world(2).run(train_and_stop_rank_1, broken)
    train(broken, resume=True)
    assert same(losses(broken), losses(straight))
