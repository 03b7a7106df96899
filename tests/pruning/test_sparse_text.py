"""A GPT learns a text with 2:4 weights as well as with dense ones, by each way to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.compress.sparse_text import METHODS, TextTask
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.pruning import Masks, nm_masks, permute, sparse_training

pytestmark = pytest.mark.cpu_only

WORDS, STEPS = 48, 120


@functools.cache
def text(rows: int, seed: int) -> Tensor:
    """A word depends on the two before it, by a table, in seven cases of eight."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(WORDS, (WORDS, WORDS), generator=draw)
    draw.manual_seed(seed + 1)
    found = torch.randint(WORDS, (rows, 17), generator=draw)
    for t in range(2, 17):
        follows = torch.rand(rows, generator=draw) < 0.875
        found[:, t] = torch.where(follows, table[found[:, t - 2] % 4, found[:, t - 1]], found[:, t])
    return found


def loss_of(model: GPT, rows: Tensor) -> Tensor:
    return model.loss(rows[:, :-1], rows[:, 1:])


def train(
    model: GPT, masks: Masks | None = None, begin: Callable[[Any], Any] | None = None
) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    context = None if begin is None else begin(optimizer)
    for step in range(STEPS):
        loss_of(model, text(32, step % 40)).backward()
        for name in masks or ():
            masks[name].apply_(masks.parameter(name).grad)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    if context is not None:
        context.finish()


@pytest.mark.full  # what each way computes stands in test_sparse_training.py and test_nm.py
def test_as_good_as_dense_within_a_few_percent():
    config = GPTConfig(
        vocab_size=WORDS, sequence_length=16, num_layers=1, num_heads=4, dim=32, positions="rotary"
    )
    held_out = text(256, 10_000)

    def loss(model: GPT) -> float:
        with torch.no_grad():
            return float(loss_of(model, held_out))

    dense = GPT(config)
    before = loss(dense)
    train(dense)
    full = loss(dense)
    assert full < 0.8 * before
    sparse = GPT(config)
    train(sparse, begin=lambda _: sparse_training(sparse))
    once = GPT(config)
    once.load_state_dict(dense.state_dict())
    permute(once, escapes=0)
    masks = nm_masks(once)
    pruned = loss(once)
    train(once, masks)
    found = {"sparse": loss(sparse), "pruned": pruned, "retrained": loss(once)}
    assert found["sparse"] < 1.03 * full, (full, found)
    assert found["retrained"] < 1.02 * full, (full, found)
    assert found["pruned"] > 1.04 * full, (full, found)  # there was something to learn again
    for model in (sparse, once):
        for name, parameter in model.named_parameters():
            if name in masks:
                assert bool((parameter.unflatten(1, (-1, 4)).count_nonzero(2) <= 2).all()), name


@pytest.mark.full
def test_the_standard_library_within_two_percent_of_dense():
    task = TextTask(steps=400)
    full = METHODS["dense"](task)
    for method in (
        "SR-STE, in the gradient, 2e-4",
        "pruned once, retrained",
        "permuted, pruned once, retrained",
    ):
        assert METHODS[method](task) < 1.02 * full, method
