"""What is measured of a model: bytes, how well it predicts held-out text, and how long it takes.

    rounds    before | step 1 | step 2,  step 2 | step 1 | before,  ...        each in turn

so that a machine that slows down for a while slows all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.comm.agreement import gather_numbers
from pyops.compress.settings import MeasureConfig
from pyops.compress.text import Texts
from pyops.flat import Placement
from pyops.models import generate
from pyops.tensor_parallel import Ranks

__all__ = ["Score", "Spread", "count_parameters", "score", "tensor_bytes", "time_models"]

MOST_LOGITS = 1 << 24  # that are made at once


@dataclass(frozen=True)
class Score:
    """How well a model predicts the rows that are held out."""

    loss: float
    """Nats per token that counts."""
    accuracy: float
    """The part of these tokens that the model finds likeliest."""
    num_tokens: int
    """How many count."""


@dataclass(frozen=True)
class Spread:
    """Milliseconds of several rounds."""

    median: float
    """The middle one."""
    low: float
    """A fifth of them took less."""
    high: float
    """A fifth of them took more."""

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Spread:
        """Of what was measured.

        Args:
            milliseconds: One for each round.
        """
        ordered = sorted(milliseconds)
        last = len(ordered) - 1
        low, high = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
        return cls(statistics.median(ordered), low, high)


def count_parameters(model: nn.Module) -> int:
    """The weights of the whole model, a tied one once.

    Args:
        model: This rank's part of it.
    """
    placements, total = Placement.of(model), 0
    for name, parameter in model.named_parameters():
        place = placements.get(name)
        shape = parameter.shape if place is None else torch.Size(place.global_shape)
        total += shape.numel()
    return total


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a rank has of a model, a tied one once.

    Args:
        model: This rank's part of it.
    """
    found = {
        (tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size()
        for tensor in model.state_dict().values()
    }
    return sum(found.values())


@torch.no_grad()
def score(model: Any, texts: Texts, *, batch: int) -> Score:
    """How well a model predicts the rows that are held out. A collective of the ranks that share
    it; the same on every one.

    Args:
        model: GPT, in eval mode.
        texts: Which rows.
        batch: Rows at a time, at most.
    """
    nats, right, count = 0.0, 0, 0
    words = model.config.vocab_size
    for tokens, targets in texts.to_score(batch):
        rows = max(1, MOST_LOGITS // (tokens.shape[1] * words))
        for some, following in zip(tokens.split(rows), targets.split(rows), strict=True):
            logits = model(some).float()
            nats += float(
                F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
            )
            counts = following != -100
            right += int(((logits.argmax(-1) == following) & counts).sum())
            count += int(counts.sum())
    return Score(nats / count, right / count, count)


def time_models(
    models: Sequence[Any], texts: Texts, options: MeasureConfig, ranks: Ranks
) -> list[tuple[Spread, Spread]]:
    """How long each model takes, in turn with the others. A collective of the ranks that share
    them; the slowest rank counts.

    Args:
        models: GPTs in eval mode.
        texts: What they are given.
        options: How often, and how much.
        ranks: That share the layers.

    Returns:
        Of each model, milliseconds (for a token of one row that is continued, for a forward of a
        batch with its loss).
    """
    calls: list[Callable[[], None]] = []
    for model in models:
        calls += [_decoding(model, texts, options), _forward(model, texts, options)]
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:  # warmed up
        call()
    order = list(range(len(calls)))
    for number in range(options.rounds):
        for i in order if number % 2 == 0 else reversed(order):
            seconds[i].append(_seconds(calls[i], texts.device))
    slowest = [
        [max(each) for each in zip(*gathered, strict=True)]
        for gathered in (gather_numbers(s, device=texts.device, group=ranks.group) for s in seconds)
    ]
    spreads = [Spread.of([1000 * each for each in s]) for s in slowest]
    tokens = options.new_tokens
    return [
        (Spread(d.median / tokens, d.low / tokens, d.high / tokens), f)
        for d, f in zip(spreads[::2], spreads[1::2], strict=True)
    ]


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _decoding(model: Any, texts: Texts, options: MeasureConfig) -> Callable[[], None]:
    prompt = texts.prompt(options.prompt_tokens)

    def call() -> None:
        for _ in generate(model, [prompt], max_new=options.new_tokens, temperature=0, rows=1):
            pass

    return call


def _forward(model: Any, texts: Texts, options: MeasureConfig) -> Callable[[], None]:
    tokens, targets = _repeated(next(iter(texts.to_score(options.batch))), options.batch)

    def call() -> None:
        with torch.no_grad():
            model.loss(tokens, targets)

    return call


def _repeated(batch: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """As many rows, also where fewer are held out."""
    tokens, targets = (torch.cat([each] * -(-rows // len(each)))[:rows] for each in batch)
    return tokens, targets
