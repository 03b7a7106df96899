"""Rows that only fill a share up: their number is an index of nothing, so no loop trains on a wrong
sample unnoticed."""

import numpy as np
import pytest
import torch

import pyops.elastic as room
from pyops.elastic import ActivationCache, FrozenLayers, measure
from tests.elastic import networks
from tests.elastic.flat import make_elastic


def last_share_of_five() -> torch.Tensor:
    """The numbers of an epoch's last share: one sample is left for four rows."""
    elastic = make_elastic(
        networks.layers(2),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=5,
        batch=4,
        seed=0,
    )
    numbers = [share.samples for share in elastic.shares()]
    elastic.close()
    assert [len(each) for each in numbers] == [4, 4]
    return numbers[1]


@pytest.mark.parametrize(
    "rows",
    [list(range(5)), np.arange(5), torch.arange(5), torch.arange(5.0, requires_grad=True)],
    ids=lambda rows: type(rows).__name__,
)
def test_a_row_of_padding_can_not_be_taken_for_a_sample(rows):
    samples = last_share_of_five()
    assert 0 <= int(samples[0]) < 5
    for number in samples[1:].tolist():
        with pytest.raises(IndexError):
            rows[number]
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(samples, torch.zeros(5, 2))
    with pytest.raises(IndexError):
        torch.as_tensor(rows)[samples]


@pytest.mark.parametrize("length", [2, 3, 512, 1024, 131072, 1 << 20])
def test_nor_can_what_is_computed_from_it(length):
    tokens = torch.zeros(1000)
    for number in (
        room.PADDING * length,
        int(torch.tensor(room.PADDING).mul(length)),
        room.PADDING + length,
    ):
        with pytest.raises(IndexError):
            tokens[number]
    with pytest.raises(IndexError):
        tokens[torch.tensor(room.PADDING).to(torch.int32).long()]


def test_indices_of_says_which_rows_count():
    samples = torch.tensor([4, 0, room.PADDING, room.PADDING])
    indices, padding = room.indices_of(samples)
    assert indices.tolist() == [4, 0, 0, 0]
    assert padding.tolist() == [False, False, True, True]
    assert samples.tolist() == [4, 0, room.PADDING, room.PADDING]
    assert [len(each) for each in room.indices_of(samples[:0])] == [0, 0]


def test_the_number_that_padding_once_had_is_refused():
    old = torch.tensor([2, -1])
    cache, prefix = ActivationCache(5, shape=(4,)), FrozenLayers([torch.nn.Linear(3, 4)])
    for call in (
        lambda: room.indices_of(old),
        lambda: prefix(torch.zeros(2, 3), samples=old),
        lambda: measure(
            FrozenLayers([torch.nn.Linear(3, 4)], cache=cache), torch.zeros(2, 3), samples=old
        ),
    ):
        with pytest.raises(ValueError, match=r"numbered -1; .* pyops.elastic.PADDING"):
            call()
