"""Sections of DeepSpeed's configurations become patterns, and say what differs; others are
refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pyops.attention import (
    BigBird,
    Dense,
    Fixed,
    Longformer,
    Pattern,
    SlidingWindow,
    Variable,
    from_deepspeed,
)

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("section", "pattern", "block", "causal"),
    [
        ({}, Fixed(), 16, False),
        ({"mode": "dense", "block": 32}, Dense(), 32, False),
        (
            {
                "mode": "fixed",
                "num_local_blocks": 8,
                "num_global_blocks": 2,
                "horizontal_global_attention": True,
                "different_layout_per_head": True,
                "num_different_global_patterns": 3,
            },
            Fixed(8, 2, True, 3),
            16,
            False,
        ),
        (
            {
                "mode": "variable",
                "attention": "unidirectional",
                "num_random_blocks": 2,
                "local_window_blocks": [1, 3],
                "global_block_indices": [0, 5],
                "global_block_end_indices": [2, 6],
                "different_layout_per_head": True,
            },
            Variable(2, (1, 3), (0, 5), (2, 6), False, True, 9),
            16,
            True,
        ),
        ({"mode": "bigbird"}, BigBird(0, 3, 1, False, 9), 16, False),
        ({"mode": "bigbird", "num_random_blocks": 1}, BigBird(seed=9), 16, False),
        ({"mode": "bslongformer", "num_sliding_window_blocks": 4}, Longformer(5), 16, False),
        ({"mode": "bslongformer", "global_block_end_indices": None}, Longformer(), 16, False),
        ({"mode": "local_sliding_window", "block": 64}, SlidingWindow(), 64, True),
    ],
)
def test_sections(section: dict[str, Any], pattern: Pattern, block: int, causal: bool):
    made = from_deepspeed(section, seed=9)
    assert (made.pattern, made.block, made.causal) == (pattern, block, causal)
    assert made.pattern.layout(320, heads=4, block=block, causal=causal).num_heads == (
        4 if pattern.differs_by_head else 1
    )


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"mode": "bslongformer", "num_sliding_window_blocks": 4}, "rounds to 5"),
        ({"mode": "bigbird"}, "0 in a DeepSpeed section"),
        ({"mode": "bigbird", "num_random_blocks": 1}, "Python's global generator"),
        (
            {"mode": "bigbird", "num_random_blocks": 2, "attention": "unidirectional"},
            "raises an error there",
        ),
        (
            {"mode": "variable", "num_random_blocks": 1, "attention": "unidirectional"},
            "DeepSpeed draws from all",
        ),
        (
            {
                "mode": "variable",
                "global_block_indices": [1],
                "global_block_end_indices": [3],
                "attention": "unidirectional",
            },
            "a range of global blocks",
        ),
        ({"mode": "bslongformer"}, "-1 for the last block"),
        ({"num_global_blocks": 2, "attention": "unidirectional"}, "several columns"),
        (
            {"horizontal_global_attention": True, "attention": "unidirectional"},
            "refuses both together",
        ),
        ({"attention": "unidirectional"}, "exact to the token"),
    ],
)
def test_what_differs_is_said_where_it_applies(section: dict[str, Any], says: str):
    said = [each for each in from_deepspeed(section).differences if says in each]
    assert len(said) == 1
    plain = from_deepspeed({"mode": "dense"}).differences
    assert len(plain) == 2
    assert not any(says in each for each in plain)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "longformer"}, "mode is 'longformer'; choose one of dense, fixed"),
        ({"attention": "causal"}, "attention is 'causal'; choose one of bidirectional"),
        ({"mode": "local_sliding_window", "attention": "left"}, "attention is 'left'"),
        ({"mode": "dense", "num_local_blocks": 4}, "mode 'dense' has no num_local_blocks"),
        ({"block": 8}, "block is 8; it must be a multiple of 16"),
        ({"block": "16"}, "block is '16'; give a whole number"),
        ({"num_local_blocks": True}, "num_local_blocks is True; give a whole number"),
        ({"different_layout_per_head": 1}, "different_layout_per_head is 1; give true or false"),
        ({"mode": "variable", "local_window_blocks": 4}, "is 4; give a list of whole numbers"),
        ({"num_different_global_patterns": 2}, "different_layout_per_head is false"),
        ({"mode": "bslongformer", "global_block_indices": [-1]}, "global_block_indices is (-1,)"),
        ({"mode": "bslongformer", "num_sliding_window_blocks": 0}, "num_sliding_window_blocks is"),
    ],
)
def test_refused(section: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        from_deepspeed(section)
