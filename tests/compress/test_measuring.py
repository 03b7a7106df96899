"""Bytes, latency and scores are of what they are said to be of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops.compress import MeasureConfig, measuring
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import Ranks

pytestmark = pytest.mark.cpu_only


def test_a_spread_is_the_median_and_what_a_fifth_lies_beyond():
    found = measuring.Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0])
    assert (found.low, found.median, found.high) == (2.0, 3.5, 5.0)


def test_a_tied_head_counts_once():
    config = GPTConfig(vocab_size=16, sequence_length=8, num_layers=1, num_heads=2, dim=8)
    tied, free = (GPT(config, seed=0), GPT(GPTConfig(**{**vars(config), "tied_head": False})))
    assert measuring.count_parameters(free) - measuring.count_parameters(tied) == 16 * 8
    assert measuring.tensor_bytes(free) - measuring.tensor_bytes(tied) == 4 * 16 * 8


def test_models_are_timed_in_turn(monkeypatch):
    """A machine that slows down slows all alike: rounds go forth and back over all models."""
    called: list[str] = []
    monkeypatch.setattr(measuring, "_decoding", lambda model, *_: lambda: called.append(model))
    monkeypatch.setattr(
        measuring, "_forward", lambda model, *_: lambda: called.append(model.upper())
    )
    texts: Any = SimpleNamespace(device=torch.device("cpu"))
    found = measuring.time_models(
        ["a", "b"], texts, MeasureConfig(rounds=2, new_tokens=4), Ranks.of(ALONE)
    )
    assert "".join(called) == "aAbB" + "aAbB" + "BbAa"
    assert len(found) == 2


def test_a_token_takes_a_part_of_what_all_take(monkeypatch):
    monkeypatch.setattr(measuring, "_seconds", lambda call, device: call())
    monkeypatch.setattr(measuring, "_decoding", lambda *_: lambda: 0.008)
    monkeypatch.setattr(measuring, "_forward", lambda *_: lambda: 0.002)
    texts: Any = SimpleNamespace(device=torch.device("cpu"))
    options = MeasureConfig(rounds=3, new_tokens=4)
    ((token, batch),) = measuring.time_models(["a"], texts, options, Ranks.of(ALONE))
    assert (token.median, batch.median) == (2.0, 2.0)


def test_the_slowest_rank_counts(monkeypatch):
    monkeypatch.setattr(measuring, "_seconds", lambda call, device: call())
    monkeypatch.setattr(measuring, "_decoding", lambda *_: lambda: 0.008)
    monkeypatch.setattr(measuring, "_forward", lambda *_: lambda: 0.002)

    def gathered(seconds: list[float], **_: Any) -> list[list[float]]:
        return [seconds, [3 * each for each in seconds]]

    monkeypatch.setattr(measuring, "gather_numbers", gathered)
    texts: Any = SimpleNamespace(device=torch.device("cpu"))
    options = MeasureConfig(rounds=3, new_tokens=4)
    ((token, batch),) = measuring.time_models(["a"], texts, options, Ranks.of(ALONE))
    assert token.median == pytest.approx(6.0)
    assert batch.median == pytest.approx(6.0)
