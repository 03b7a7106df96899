"""Patterns against their rules stated as sets, at lengths that cut their windows; every consequence
of DeepSpeed's rules that is decided otherwise; and what is refused."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyops.attention import (
    BigBird,
    BlockLayout,
    Dense,
    Fixed,
    Longformer,
    Pattern,
    SlidingWindow,
    Variable,
    from_mask_function,
)
from tests.attention.block_sets import Blocks, blocks_of

pytestmark = pytest.mark.cpu_only

SIX = (Dense, Fixed, Variable, BigBird, Longformer, SlidingWindow)
LENGTHS = (1, 2, 3, 10, 17)
# Each with parameters that are no defaults and differ pairwise.
OTHERS: tuple[tuple[Pattern, int], ...] = (
    (Fixed(6, 2, True, 3), 1),
    (Fixed(num_local_blocks=3, num_global_blocks=3), 1),
    (
        Variable(
            num_random_blocks=2,
            local_window_blocks=(1, 3, 2),
            global_block_indices=(0, 1),
            different_layout_per_head=True,
            seed=5,
        ),
        2,
    ),
    (Variable(0, (2, 5), (1, 6), (3, 7), True), 10),
    (BigBird(3, 5, 2, True, 7), 3),
    (BigBird(num_random_blocks=0, num_global_blocks=0), 1),
    (Longformer(5, (0, 4), (2, 5)), 10),
    (SlidingWindow(1), 1),
    (SlidingWindow(7), 1),
)


def seen(layout: BlockLayout, head: int) -> Blocks:
    head = head if layout.num_heads > 1 else 0
    return {(int(row), int(column)) for row, column in layout.dense()[head].nonzero()}


def check(pattern: Pattern, n: int, *, causal: bool) -> None:
    layout = pattern.layout(16 * n, heads=3, block=16, causal=causal)
    assert layout.num_heads == (3 if pattern.differs_by_head else 1)
    for head in range(3):
        assert seen(layout, head) == blocks_of(pattern, head, n, causal=causal), head


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", SIX)
def test_a_pattern_is_its_rule(kind: type[Pattern], n: int, causal: bool):
    check(kind(), n, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("pattern", "shortest"), OTHERS, ids=lambda value: str(value)[:16])
def test_a_pattern_with_other_parameters_is_its_rule(pattern: Pattern, shortest: int, causal: bool):
    for n in LENGTHS:
        if n >= shortest:
            check(pattern, n, causal=causal)


def test_a_literal_of_each():
    def picture(pattern: Pattern, n: int = 6) -> list[str]:
        table = pattern.layout(16 * n, heads=1, block=16).dense()[0]
        return ["".join("x" if each else "." for each in row) for row in table.tolist()]

    assert picture(Dense(), 2) == ["xx", "xx"]
    assert picture(Fixed()) == ["xxxx.x", "xxxx.x", "xxxx.x", "xxxx.x", "...xxx", "...xxx"]
    assert picture(Variable(local_window_blocks=(1, 2))) == [
        "x.....",
        "xxx...",
        "xxx...",
        "x..xx.",
        "x..xx.",
        "x....x",
    ]
    assert picture(BigBird(num_random_blocks=0)) == [
        "xxxxxx",
        "xxx...",
        "xxxx..",
        "x.xxx.",
        "x..xxx",
        "x...xx",
    ]
    assert picture(Longformer(global_block_indices=(3,))) == [
        "xx.x..",
        "xxxx..",
        ".xxx..",
        "xxxxxx",
        "...xxx",
        "...xxx",
    ]
    assert picture(SlidingWindow()) == [
        "xx....",
        "xxx...",
        ".xxx..",
        "..xxx.",
        "...xxx",
        "....xx",
    ]


def test_densities_at_512_blocks_are_those_of_the_rules_of_deepspeed():
    def density(pattern: Pattern, causal: bool) -> float:
        return pattern.layout(512 * 16, heads=1, block=16, causal=causal).density

    assert density(Fixed(), False) == pytest.approx(0.256, abs=5e-4)
    assert density(Fixed(), True) == pytest.approx(0.129, abs=5e-4)
    assert density(BigBird(), False) == pytest.approx(0.0117, abs=1e-4)
    assert density(Longformer(), False) == pytest.approx(0.0097, abs=1e-4)
    assert density(SlidingWindow(), True) == pytest.approx(0.0039, abs=1e-4)


@pytest.mark.parametrize(
    "pattern",
    [
        Fixed(6, 2),
        Fixed(4, 4),
        Variable(3, (2, 5), (1, 6), (4, 9)),
        BigBird(5, different_layout_per_head=True),
        Longformer(3, (2, 7), (5, 9)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_causal_sees_nothing_later_to_the_token(pattern: Pattern):
    length = 10 * 16 - 5
    tokens = pattern.layout(length, heads=2, block=16, causal=True).tokens()
    assert not tokens.triu(1).any()
    assert tokens.diagonal(dim1=1, dim2=2).all()
    whole = pattern.layout(length, heads=2, block=16).tokens()
    if not getattr(pattern, "num_random_blocks", 0):
        assert torch.equal(tokens, whole.tril())


def test_a_causal_row_with_few_blocks_takes_them_all():
    pattern = BigBird(num_random_blocks=4, num_sliding_window_blocks=1, num_global_blocks=0)
    layout = pattern.layout(160, heads=1, block=16, causal=True)
    for row in range(4):
        assert layout.indices[0, row, : row + 1].tolist() == list(range(row + 1))


def test_random_blocks_depend_on_seed_head_and_row_alone():
    pattern = BigBird(num_random_blocks=2, different_layout_per_head=True, seed=3)
    random.seed(1)
    torch.manual_seed(1)
    whole = pattern.layout(640, heads=8, block=16)
    states = random.getstate(), torch.get_rng_state()
    again = pattern.layout(640, heads=8, block=16)
    assert torch.equal(whole.dense(), again.dense())
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    for first, count in ((0, 8), (3, 2), (7, 1), (5, 3)):  # what a rank with these heads builds
        part = pattern.layout(640, heads=count, first_head=first, block=16)
        assert torch.equal(part.dense(), whole.dense()[first : first + count])
        assert torch.equal(part.column_counts, whole.column_counts[first : first + count])
    tables = whole.dense()
    assert len({str(tables[head].tolist()) for head in range(8)}) == 8
    other = dataclasses.replace(pattern, seed=4).layout(640, heads=8, block=16)
    assert not torch.equal(other.dense(), whole.dense())
    alike = dataclasses.replace(pattern, different_layout_per_head=False)
    assert torch.equal(
        alike.layout(640, heads=2, first_head=5, block=16).dense(), whole.dense()[:1]
    )


def test_random_columns_are_spread_evenly():
    pattern = BigBird(3, 1, 0, different_layout_per_head=True)
    table = pattern.layout(16 * 12, heads=400, block=16).dense()
    off = table[:, ~torch.eye(12, dtype=torch.bool)].float()
    # Each pair is drawn with probability 3 / 12: 0.25 +- 0.022 of 400 heads, five of which are
    # never reached.
    assert float(off.mean()) == pytest.approx(0.25, abs=0.01)
    assert float((off.mean(0) - 0.25).abs().max()) < 5 * 0.0217
    assert (table.sum(-1) >= 3).all()


def test_a_shorter_layout_is_no_cut_of_a_longer_one():
    short, long = (Fixed().layout(16 * n, heads=1, block=16).dense()[0] for n in (10, 16))
    assert not torch.equal(short, long[:10, :10])
    # But with no window cut, and for causal random blocks, it is.
    pattern = BigBird(2)
    short, long = (
        pattern.layout(16 * n, heads=1, block=16, causal=True).dense()[0] for n in (10, 16)
    )
    assert torch.equal(short, long[:10, :10])


def test_fixed_takes_columns_by_the_number_of_the_head_in_the_model():
    pattern = Fixed(num_different_global_patterns=4)
    whole = pattern.layout(256, heads=8, block=16)
    assert torch.equal(
        pattern.layout(256, heads=2, first_head=3, block=16).dense(), whole.dense()[3:5]
    )
    assert len({str(table) for table in whole.dense().tolist()}) == 4


def test_unions():
    a, b, c = Longformer(), Fixed(num_different_global_patterns=2), SlidingWindow(5)
    n = 9
    layout = (a | b | c).layout(16 * n, heads=2, first_head=1, block=16)
    for head in range(2):
        parts = [blocks_of(part, head + 1, n, causal=False) for part in (a, b, c)]
        assert seen(layout, head) == parts[0] | parts[1] | parts[2]
    assert (a | (b | c)) == ((a | b) | c)
    assert not (a | c).differs_by_head
    assert (a | c).layout(160, heads=4).num_heads == 1
    # A part that does not differ by head is that of head 0, also beside one that does.
    mixed = BigBird(2) | b
    assert seen(mixed.layout(160, heads=1, first_head=1, block=16), 0) == (
        blocks_of(BigBird(2), 0, 10, causal=False) | blocks_of(b, 1, 10, causal=False)
    )


def test_a_function_of_blocks():
    strided = from_mask_function(
        lambda head, row, column: (row - column) % (head + 2) == 0, different_layout_per_head=True
    )
    layout = strided.layout(100, heads=2, first_head=1, block=16, causal=True)
    assert [seen(layout, head) for head in range(2)] == [
        {(i, j) for i in range(7) for j in range(i + 1) if (i - j) % (head + 2) == 0}
        for head in (1, 2)
    ]
    nothing = from_mask_function(lambda head, row, column: (row < 0) & (column < 0))
    assert nothing.layout(100, heads=3).counts.tolist() == [[0, 0]]
    with pytest.raises(TypeError, match=re.escape("returned torch.int64; it must return torch.b")):
        from_mask_function(lambda head, row, column: row * column).layout(100, heads=1)


def test_long_window_needs_no_table_of_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BlockLayout, "from_dense", None)
    for pattern in (SlidingWindow(9), Longformer(), BigBird()):
        assert 0 < pattern.layout(65536, heads=16, causal=True).density < 0.01


@pytest.mark.parametrize("kind", SIX)
def test_nothing_of_no_tokens(kind: type[Pattern]):
    assert kind().layout(0, heads=2).tokens().shape == (1, 0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(4), "must be odd, such as 3 or 5"),
        (lambda: SlidingWindow(0), "num_sliding_window_blocks is 0; a window is"),
        (lambda: BigBird(num_sliding_window_blocks=2), "must be odd, such as 1 or 3"),
        (lambda: Longformer(num_sliding_window_blocks=-3), "num_sliding_window_blocks is -3"),
        (lambda: BigBird(num_random_blocks=-1), "num_random_blocks is -1; it must be 0 or more"),
        (lambda: BigBird(num_global_blocks=-1), "num_global_blocks is -1; it must be 0 or more"),
        (lambda: Variable(num_random_blocks=-1), "num_random_blocks is -1"),
        (lambda: Variable(local_window_blocks=()), "local_window_blocks is (); give one width"),
        (lambda: Variable(local_window_blocks=(4, 0)), "local_window_blocks is (4, 0)"),
        (lambda: Variable(global_block_indices=(-1,)), "global_block_indices is (-1,)"),
        (lambda: Longformer(global_block_indices=(0, -1)), "global_block_indices is (0, -1)"),
        (
            lambda: Longformer(3, (0, 4), (2,)),
            "global_block_indices has 2 numbers and global_block_end_indices 1",
        ),
        (lambda: Variable(0, (4,), (3,), (3,)), "from 3 to 3 is empty"),
        (lambda: Fixed(num_local_blocks=0), "num_local_blocks is 0; it must be 1 or more"),
        (lambda: Fixed(4, 3), "num_local_blocks is 4 and num_global_blocks 3"),
        (lambda: Fixed(4, 2, False, 3), "only 2 times 2 global blocks"),
        (
            lambda: Longformer(global_block_indices=(2,)).layout(32, heads=1, block=16),
            "global block 2 of a length with 2 blocks",
        ),
        (
            lambda: Longformer(3, (0,), (3,)).layout(32, heads=1, block=16),
            "global block 2 of a length with 2 blocks",
        ),
        (
            lambda: BigBird(num_random_blocks=3).layout(32, heads=1, block=16),
            "num_random_blocks is 3, but the length has 2 blocks",
        ),
        (
            lambda: Variable(num_random_blocks=3).layout(32, heads=1, block=16),
            "num_random_blocks is 3, but the length has 2 blocks",
        ),
        (lambda: Dense().layout(32, heads=1, block=8), "block is 8; it must be a multiple of 16"),
        (lambda: Dense().layout(32, heads=0), "heads 0 from head 0 on"),
        (lambda: Dense().layout(32, heads=1, first_head=-1), "heads 1 from head -1 on"),
        (lambda: Dense().layout(-1, heads=1), "a length of -1"),
    ],
)
def test_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
