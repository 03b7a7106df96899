"""Bytes, latency and scores are of what they are said to be of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

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


SHAPE = GPTConfig(vocab_size=16, sequence_length=8, num_layers=1, num_heads=2, dim=8)


@pytest.mark.parametrize("most", [1, 1 << 24], ids=["row by row", "together"])
def test_loss_and_accuracy_are_those_of_the_logits(monkeypatch, most):
    """Over all tokens that count, of batches of different sizes."""
    monkeypatch.setattr(measuring, "MOST_LOGITS", most)
    model = GPT(replace(SHAPE, tied_head=False), seed=0).eval()
    tokens = torch.randint(16, (5, 8), generator=torch.Generator().manual_seed(0))
    logits = model(tokens).detach().double()
    targets = logits.argmax(-1)
    targets[:, ::2] = (targets[:, ::2] + 1) % 16
    targets[0] = targets[4, 3:] = -100
    batches = list(zip(tokens.split(3), targets.split(3), strict=True))
    texts: Any = SimpleNamespace(to_score=lambda batch: iter(batches))
    found = measuring.score(model, texts, batch=3)
    counts = targets != -100
    right = (logits.argmax(-1) == targets)[counts].double().mean()
    nats = functional.cross_entropy(logits[counts], targets[counts])
    assert found.num_tokens == int(counts.sum()) == 27
    assert found.accuracy == pytest.approx(float(right))
    assert 0.3 < found.accuracy < 0.7
    assert found.loss == pytest.approx(float(nats), rel=1e-6)


def test_what_is_timed_is_what_was_asked_for(monkeypatch):
    """A row that is continued to its last token, and the forward of a whole batch."""
    made: list[int] = []
    asked: list[Any] = []

    def generate(model: Any, prompts: Any, *, max_new: int, **options: Any) -> Iterator[None]:
        asked.append((model, prompts, options))
        for number in range(max_new):
            made.append(number)
            yield

    class Model:
        shapes: ClassVar[list[Any]] = []

        def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
            assert not torch.is_grad_enabled()
            self.shapes.append((tuple(tokens.shape), tuple(targets.shape)))

    model = Model()
    monkeypatch.setattr(measuring, "generate", generate)
    rows = torch.arange(16).view(2, 8)
    texts: Any = SimpleNamespace(
        device=torch.device("cpu"),
        prompt=lambda n: list(range(n)),
        to_score=lambda batch: iter([(rows, rows)]),
    )
    options = MeasureConfig(rounds=1, batch=5, prompt_tokens=3, new_tokens=4)
    measuring.time_models([model], texts, options, Ranks.of(ALONE))
    assert made == [0, 1, 2, 3] * 2, "to warm up, and in a round"
    assert asked == [(model, [[0, 1, 2]], {"temperature": 0, "rows": 1})] * 2
    assert model.shapes == [((5, 8), (5, 8))] * 2
