"""A planted bad batch is found, kept, and read back; ordinary noise is none."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pyops.observe.spikes import SpikeDetector, load_batch, save_batch

pytestmark = pytest.mark.cpu_only


def losses(count: int, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [3.0 * 0.999**i + noise.gauss(0, 0.02) for i in range(count)]


def test_a_planted_loss_is_found_and_does_not_count_afterwards():
    detector = SpikeDetector()
    said = [detector.update(each) for each in losses(100)]
    assert not any(said)
    assert "the loss is 4.5" in detector.update(4.5)
    assert "the loss is 4.5" in detector.update(4.5)
    assert detector.update(losses(101)[-1]) == ""


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_spike(loss):
    detector = SpikeDetector()
    assert detector.update(loss) == "", "before there is anything to compare with"
    for each in losses(30):
        detector.update(each)
    assert detector.update(loss) == "the loss is not finite"


def test_ordinary_noise_is_no_spike():
    for seed in range(10):
        detector = SpikeDetector(deviations=8)
        assert not any(detector.update(each) for each in losses(400, seed))


def test_losses_that_stand_still_do_not_make_a_spike_of_a_rounding():
    detector = SpikeDetector()
    assert not any(detector.update(each) for each in [1.0] * 30 + [1.0001])


def test_rows_of_all_ranks_come_back_in_order_and_shared_rows_once(tmp_path):
    rows = [torch.arange(6).view(2, 3) + 10 * rank for rank in range(3)]
    for rank, x in enumerate([*rows[:2], rows[1], rows[2]]):
        batch = {"tokens_BT": x, "reduction": "sum"}
        place = save_batch(tmp_path, batch, rank=rank, about={"step": 7, "why": "high"})
    assert place == tmp_path / "spikes" / "step-00000007"
    batch, about = load_batch(place)
    assert torch.equal(batch["tokens_BT"], torch.cat(rows))
    assert about == {"step": 7, "why": "high"}


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no rank\*\.safetensors; name a folder"):
        load_batch(tmp_path)
    with pytest.raises(ValueError, match="deviations is 0"):
        SpikeDetector(deviations=0)
