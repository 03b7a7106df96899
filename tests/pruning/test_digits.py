"""What pruning does to a network that reads digits: gradually it keeps its accuracy, and a ticket
beats another draw under its mask."""

from __future__ import annotations

import copy
import functools
import statistics

import pytest
from torch import nn

from benchmarks.compress import pruned_digits as runs
from pyops.pruning import LotteryConfig, lottery, rate_of
from tests.grids import full
from tests.optional_packages import skip_module_without

skip_module_without("sklearn")
pytestmark = pytest.mark.cpu_only

GRADUAL = {0.5: 97.0, 0.8: 97.0, 0.9: 97.0, 0.95: 96.0, 0.98: 93.0}  # at least, percent
SMALL = ((64, 64, 10), (64, 48, 32, 10))  # about as many weights as 64-256-128-10 has at 0.9


@pytest.fixture(scope="module")
def digits() -> runs.Digits:
    return runs.load()


@functools.cache
def dense(seed: int) -> nn.Module:
    return runs.dense(runs.load(), seed)


@pytest.mark.parametrize(
    ("sparsity", "seeds"), [full(0.95, 1), *(full(sparsity, 5) for sparsity in GRADUAL)]
)  # the bits of each step stand in test_gradual.py
def test_gradually_the_accuracy_stays(digits: runs.Digits, sparsity: float, seeds: int):
    slowly, after = [], []
    for seed in range(seeds):
        model = copy.deepcopy(dense(seed))
        slowly.append(runs.prune_gradually(digits, model, sparsity, seed=seed))
        after.append(runs.one_shot(digits, copy.deepcopy(dense(seed)), sparsity, seed=seed)[1])
    assert statistics.mean(slowly) >= GRADUAL[sparsity]
    if sparsity >= 0.9:
        assert statistics.mean(slowly) >= statistics.mean(after) + 0.3
    if sparsity == 0.98:
        assert statistics.mean(after) < 60
    if sparsity == 0.9:
        small = [[digits.accuracy(runs.dense(digits, s, *w)) for s in range(seeds)] for w in SMALL]
        assert statistics.mean(slowly) >= max(map(statistics.mean, small)) + 0.5


@pytest.mark.full
@pytest.mark.parametrize(("rounds", "epochs", "seeds"), [(3, 24, 1), full(8, runs.DENSE_EPOCHS, 3)])
def test_a_ticket_beats_another_draw(digits: runs.Digits, rounds: int, epochs: int, seeds: int):
    gaps = []
    config = LotteryConfig(rounds, rate_of(1 - 0.6**8, rounds), only=runs.ALL)
    for seed in range(seeds):

        def train(model, masks, *, first, last, seed=seed):
            end = epochs * runs.EPOCH if last is None else last
            runs.train(digits, model, masks, first=first, last=end, seed=seed)

        for ticket in lottery(lambda draw, s=seed: runs.network(100 * draw + s), train, config):
            accuracy = digits.accuracy(copy.deepcopy(ticket.model))
        gaps.append(accuracy - digits.accuracy(ticket.control(seed=1)))
    assert statistics.mean(gaps) >= 4.0
