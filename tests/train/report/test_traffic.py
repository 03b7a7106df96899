"""Bytes are those of a step; the ratio is over a window, since some schedules send nothing in most
steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyops.train.report.traffic import Traffic

pytestmark = pytest.mark.cpu_only


def test_one_rank_sends_nothing():
    assert Traffic(None, numel=10, window=3).step() == {}


def test_bytes_of_each_step_and_the_ratio_of_the_last_few():
    communicator: Any = SimpleNamespace(size=4, bytes_sent=1000)  # before this run
    traffic = Traffic(communicator, numel=100, window=2)
    assert traffic.uncompressed == 2 * 3 / 4 * 400
    for sent, ratio in ((600, 1.0), (20, 1200 / 620), (0, 1200 / 20)):
        communicator.bytes_sent += sent
        assert traffic.step() == {"bytes_sent": sent, "compression": pytest.approx(ratio)}
    assert traffic.step() == {"bytes_sent": 0}, "nothing at all was sent in the window"
