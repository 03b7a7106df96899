"""Patterns as text: what str gives is read back, and what can't be read is refused by name."""

from __future__ import annotations

import pytest

from pyops.attention import (
    BigBird,
    Dense,
    Fixed,
    Longformer,
    Pattern,
    SlidingWindow,
    Variable,
    from_mask_function,
    pattern_from_text,
)

pytestmark = pytest.mark.cpu_only

EACH = [
    Dense(),
    Fixed(num_local_blocks=6, num_global_blocks=2, horizontal_global_attention=True),
    Variable(3, (1, 2), (4, 9), (5, 11), seed=-3, different_layout_per_head=True),
    BigBird(num_random_blocks=2, seed=7),
    Longformer(5, ()),
    SlidingWindow(1),
    Longformer() | Fixed() | BigBird(),
]


@pytest.mark.parametrize("pattern", EACH, ids=lambda pattern: type(pattern).__name__)
def test_str_is_read_back(pattern: Pattern):
    assert pattern_from_text(str(pattern)) == pattern


def test_what_may_be_left_out():
    assert pattern_from_text(" BigBird | SlidingWindow ") == BigBird() | SlidingWindow()
    assert pattern_from_text("Variable(local_window_blocks=[2, 4])") == Variable(
        local_window_blocks=(2, 4)
    )
    assert pattern_from_text("Dense | (Fixed | BigBird)") == Dense() | (Fixed() | BigBird())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "pattern is ''; write classes of pyops.attention with keyword arguments"),
        ("BigBird(", "write classes"),
        ("BigBird(2)", "write classes"),
        ("BigBird(**{})", "write classes"),
        ("BigBird() & Fixed()", "write classes"),
        ("os.system('true')", "write classes"),
        ("(" * 3000, "write classes"),
        ("BigBird | " * 3000, "write classes"),
        ("Bigbird()", "pattern has 'Bigbird', which is no pattern; did you mean BigBird"),
        ("xyz", "there are Dense, Fixed"),
        ("Dense(seed=1)", r"pattern has Dense\(seed=\), but it takes nothing"),
        ("BigBird(width=3)", "but it takes num_random_blocks, num_sliding"),
        ("BigBird(seed=1.5)", r"BigBird\(seed=\) of '1.5'; give a whole number"),
        ("BigBird(seed=True)", "give a whole number"),
        ("BigBird(seed=open('x'))", "give a whole number"),
        ("BigBird(different_layout_per_head=1)", "give True or False"),
        ("Longformer(global_block_indices=0)", r"such as \(0, 8\)"),
        ("Longformer(global_block_end_indices=('a',))", "or None"),
        ("SlidingWindow(num_sliding_window_blocks=4)", "must be odd, such as 3 or 5"),
    ],
)
def test_what_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        pattern_from_text(text)


def test_a_rule_of_your_own_has_no_text():
    with pytest.raises(ValueError, match="write classes"):
        pattern_from_text(str(from_mask_function(lambda head, query, key: query >= key)))
