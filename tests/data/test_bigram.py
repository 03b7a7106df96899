"""The bigram model, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyops.data import bigram_loss, count_pairs

pytestmark = pytest.mark.cpu_only


def test_pairs_are_counted():
    pairs = count_pairs(b"abab")
    assert pairs[ord("a"), ord("b")] == 2
    assert pairs[ord("b"), ord("a")] == 1
    assert pairs.sum() == 3
    assert count_pairs(b"b", before=ord("a"))[ord("a"), ord("b")] == 1
    assert count_pairs(b"x").sum() == 0
    text = bytes(range(256)) * 3
    whole = count_pairs(text[:100]) + count_pairs(text[100:], before=text[99])
    assert np.array_equal(whole, count_pairs(text))


def test_loss_by_hand():
    # In "aab": a->a once, a->b once. p(b|a) = (1 + 1) / (2 + 256), p(a|b) = 1 / 256.
    loss = bigram_loss(count_pairs(b"aab"), count_pairs(b"aba"))
    assert loss == pytest.approx(-(math.log(2 / 258) + math.log(1 / 256)) / 2)


def test_nothing_known_is_uniform():
    assert bigram_loss(np.zeros((256, 256)), count_pairs(b"hello")) == pytest.approx(math.log(256))
