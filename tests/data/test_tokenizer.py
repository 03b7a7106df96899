"""Tokens stand for the bytes they came from."""

from __future__ import annotations

import numpy as np
import pytest

from pyops.data import ByteTokenizer, CorpusError, PairTokenizer

pytestmark = pytest.mark.cpu_only

TEXT = ("the cat sat on the mat; the hat. Ärger über Öl: 猫\n" * 50).encode()


def test_bytes_are_themselves():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(b"ab\xff")
    assert tokens.tolist() == [97, 98, 255]
    assert tokenizer.decode(tokens[:2]) == "ab"
    assert tokenizer.decode([0xC3, 0xA4, 0xFF, 300]) == "ä\ufffd"
    assert tokenizer.token_bytes(tokens) == 3


def test_pairs_are_merged_and_come_apart_again(tmp_path):
    tokenizer = PairTokenizer.train([TEXT], vocab_size=300)
    assert 256 < tokenizer.vocab_size <= 300
    tokens = tokenizer.encode(TEXT)
    assert tokens.size < len(TEXT) / 2
    assert tokenizer.decode(tokens) == TEXT.decode()
    assert tokenizer.token_bytes(tokens) == len(TEXT)
    tokenizer.save(tmp_path / "t.json")
    assert np.array_equal(PairTokenizer.load(tmp_path / "t.json").encode(TEXT), tokens)


def test_a_vocabulary_that_cannot_hold_the_bytes():
    with pytest.raises(CorpusError, match=r"model.vocab_size is 100; set it to 256 or more"):
        PairTokenizer.train([TEXT], vocab_size=100)
