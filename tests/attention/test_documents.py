"""Documents in a row: starts and numbers into each other, places that begin again, and what is
refused."""

from __future__ import annotations

import re

import pytest
import torch

from pyops.attention import document_ids, document_positions, document_starts


def test_the_example_of_the_module(device: torch.device):
    starts = torch.tensor([0, 3, 5, 9], device=device)
    ids = document_ids(starts, length=10)
    assert ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, -1]
    assert document_positions(ids).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert (ids.dtype, document_positions(ids).dtype) == (torch.int32, torch.int64)
    assert torch.equal(document_starts(ids), starts)
    assert ids.device.type == document_positions(ids).device.type == device.type


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("lengths", [[1], [4, 1, 1, 7], [2, 2], []])
def test_starts_and_ids_are_each_others(lengths: list[int], padding: int):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for dtype in (torch.int32, torch.int64):
        ids = document_ids(starts.to(dtype), length=sum(lengths) + padding)
        expected = [number for number, n in enumerate(lengths) for _ in range(n)]
        assert ids.tolist() == expected + [-1] * padding
        assert torch.equal(document_starts(ids), starts)
        places = [place for n in lengths for place in range(n)]
        assert document_positions(ids).tolist() == places + [0] * padding
    if not padding:
        assert document_ids(starts).numel() == sum(lengths)


def test_numbers_may_be_any_and_rows_are_apart():
    ids = torch.tensor([[7, 7, 3, 3, 3], [7, 0, 0, -1, -1]])
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 0]]
    assert document_starts(ids[0]).tolist() == [0, 2, 5]
    assert document_positions(ids.new_zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize(
    ("starts", "length", "message"),
    [
        ([0, 3, 3], None, "starts have 3 behind 3; they must ascend"),
        ([0, 5, 3], None, "starts have 3 behind 5; they must ascend"),
        ([1, 3], None, "starts begin with 1; the first document begins at 0"),
        ([0, 3, 9], 8, "the last document ends at 9, behind a row of 8 tokens"),
        ([], None, "starts have the shape [0]"),
        ([[0, 1]], None, "starts have the shape [1, 2]"),
        ([0.0, 1.0], None, "must be torch.int64 or torch.int32, got torch.float32"),
    ],
)
def test_starts_that_are_refused(starts: list[int], length: int | None, message: str):
    values = torch.tensor(starts) if starts else torch.zeros(0, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        document_ids(values, length=length)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, -1, 1], "padding (-1) stands before a document"),
        ([0, 1, 0], "document 0 is in several pieces"),
        ([0, -2], "a document has the number -2"),
        ([[0, 1]], "ids have the shape [1, 2]"),
        ([0.0], "must be torch.int32 or torch.int64, got torch.float32"),
        (3, "ids of documents are one number"),
    ],
)
def test_ids_that_are_refused(ids: list[int], message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        document_starts(torch.tensor(ids))
