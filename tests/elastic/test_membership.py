"""The layout for the ranks at hand, against a search through all of them and against literals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pyops.elastic.membership import GIB, Choice, Grid, Limits, choose, grids

pytestmark = pytest.mark.cpu_only

SMALL = Limits(heads=4, costs=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0], batch=8)


@pytest.mark.parametrize(
    ("ranks", "wanted", "expected"),
    [
        (1, Grid(), Grid()),
        (3, Grid(), Grid(dp=2)),  # 3 models can't share 8 sequences
        (4, Grid(), Grid(dp=4)),
        (7, Grid(), Grid(dp=4)),
        (100, Grid(), Grid(dp=8)),
        (4, Grid(tp=2), Grid(tp=2, dp=2)),
        (3, Grid(tp=2), Grid(tp=2)),
        (1, Grid(tp=2), Grid()),
        (3, Grid(tp=4), Grid(tp=3)),  # 4 heads: the last rank has none, but its third of the rest
        (4, Grid(tp=2, pp=2), Grid(tp=2, pp=2)),
        (7, Grid(tp=2, pp=2), Grid(tp=2, pp=2)),
        (3, Grid(tp=2, pp=2), Grid(tp=2)),
        (3, Grid(pp=3), Grid(pp=3)),
        (2, Grid(pp=3), Grid(pp=2)),
        (7, Grid(pp=3), Grid(pp=3, dp=2)),
        (5, Grid(tp=4, pp=2), Grid(tp=4)),
        (6, Grid(tp=4, pp=2), Grid(tp=3, pp=2)),
        (3, Grid(tp=4, pp=2), Grid(tp=3)),
    ],
)
def test_literals(ranks, wanted, expected):
    assert choose(ranks, wanted=wanted, limits=SMALL).grid == expected


def possible(limits: Limits, grid: Grid) -> bool:
    """Written apart from the planner."""
    kv = limits.kv_heads or limits.heads
    whole_groups, within_a_group = (
        grid.tp <= kv,
        grid.tp % kv == 0 and (limits.heads // kv) % (grid.tp // kv) == 0,
    )
    if not (whole_groups or within_a_group) or grid.tp > limits.heads:
        return False
    if any(
        most and degree > most
        for degree, most in zip((grid.tp, grid.pp, grid.dp), limits.most, strict=True)
    ):
        return False
    if grid.pp > 1 and grid.pp * limits.stages > len(limits.costs):
        return False
    share, left = divmod(limits.batch, grid.dp)
    if left or (limits.micro_batch and share % limits.micro_batch):
        return False
    return not (grid.pp > 1 and limits.micro_batches and share % limits.micro_batches)


@pytest.mark.parametrize("heads", [(4, 0), (4, 2), (6, 1), (6, 3)])
@pytest.mark.parametrize("batch", [(8, 0, 0), (12, 2, 0), (12, 0, 4), (7, 0, 0)])
@pytest.mark.parametrize("other", [{}, {"stages": 2}, {"most": (1, 2, 0)}, {"most": (0, 1, 3)}])
def test_every_layout_is_found_and_the_best_is_chosen(heads, batch, other):
    limits = Limits(
        heads=heads[0],
        kv_heads=heads[1],
        costs=[1.0] * 5,
        batch=batch[0],
        micro_batch=batch[1],
        micro_batches=batch[2],
        **other,
    )
    for ranks in range(1, 10):
        degrees = itertools.product(range(1, ranks + 1), repeat=3)
        all_grids = {Grid(*each) for each in degrees if each[0] * each[1] * each[2] <= ranks}
        expected = {grid for grid in all_grids if possible(limits, grid)}
        assert set(grids(ranks, limits)) == expected
        assert {g for g in all_grids if limits.why_not(g) is None} == expected
        assert set(grids(ranks, limits, idle=False)) == {g for g in expected if g.ranks == ranks}
        for wanted in (Grid(), Grid(tp=2), Grid(pp=2), Grid(tp=2, pp=2), Grid(tp=4)):
            if not any(g.tp <= wanted.tp and g.pp <= wanted.pp for g in expected):
                continue
            check(choose(ranks, wanted=wanted, limits=limits), ranks, wanted, expected)


def check(found: Choice, ranks: int, wanted: Grid, expected: set[Grid]) -> None:
    """The order of preferences, one at a time."""
    left = {g for g in expected if g.tp <= wanted.tp and g.pp <= wanted.pp}
    cut = max(g.tp * g.pp for g in left)
    left = {g for g in left if g.tp * g.pp == cut}  # the smallest part of a model
    most = max(g.ranks for g in left)
    left = {g for g in left if g.ranks == most}
    assert found.grid in left
    assert found.idle == ranks - most
    kept = {g for g in left if (g.tp, g.pp) == (wanted.tp, wanted.pp)}
    assert not kept or found.grid in kept
    assert found.grid.pp == min(g.pp for g in left) or found.grid in kept


def test_the_reason_in_words():
    assert choose(4, wanted=Grid(), limits=SMALL).reason == "tp 1 x pp 1 x dp 4: as asked for"
    assert choose(3, wanted=Grid(), limits=SMALL).reason == (
        "tp 1 x pp 1 x dp 2: as asked for; 1 of 3 ranks waits, as 3 models can't share a batch of 8"
    )
    assert choose(5, wanted=Grid(tp=2, pp=2), limits=SMALL).reason == (
        "tp 2 x pp 2 x dp 1: as asked for; 1 of 5 ranks waits, as another model takes 4 ranks"
    )
    assert choose(3, wanted=Grid(tp=2, pp=2), limits=SMALL).reason == (
        "tp 2 x pp 1 x dp 1: tp 2 x pp 2 takes 4 ranks, and there are 3; 1 of 3 ranks "
        "waits, as another model takes 2 ranks"
    )
    assert "takes 2 ranks, and there is 1" in choose(1, wanted=Grid(tp=2), limits=SMALL).reason
    asked = choose(8, wanted=Grid(), limits=replace(SMALL, most=(0, 0, 2)))
    assert asked.reason.endswith("6 of 8 ranks wait, as no more than 2 are asked for")


WEIGHED = replace(
    SMALL, parameters=[0, 60, 60, 60, 60, 0], each=(4.0, 4.0, 8.0)
)  # 3840 bytes in all


def test_bytes():
    assert WEIGHED.bytes(Grid()) == 240 * 16
    assert WEIGHED.bytes(Grid(tp=2, dp=2)) == 120 * 16
    assert WEIGHED.bytes(Grid(pp=2)) == 120 * 16 or WEIGHED.bytes(Grid(pp=2)) == 180 * 16
    even = replace(WEIGHED, costs=[0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert even.bytes(Grid(pp=2)) == 120 * 16
    assert even.bytes(Grid(tp=2, pp=2)) == 60 * 16
    assert [replace(even, zero=stage).bytes(Grid(dp=4)) for stage in range(4)] == [
        240 * (4 + 4 + 8),
        240 * (4 + 4 + 2),
        240 * (4 + 1 + 2),
        240 * (1 + 1 + 2),
    ]
    odd = replace(even, parameters=[0, 1, 10, 100, 1000, 0], stages=2, each=(1.0, 0.0, 0.0))
    assert odd.bytes(Grid(pp=2)) == 1010  # stages 0 and 2; 1 and 3
    assert replace(odd, folded=True).bytes(Grid(pp=2)) == 1001  # 0 and 3; 1 and 2
    assert odd.bytes(Grid()) == 1111


def test_memory():
    """What fits decides, before what was asked for."""
    even = replace(WEIGHED, costs=[0.0, 1.0, 1.0, 1.0, 1.0, 0.0], batch=12)
    assert choose(3, wanted=Grid(tp=2), limits=even).grid == Grid(tp=2)  # the memory is not known
    roomy = replace(even, memory=4000.0)
    assert choose(4, wanted=Grid(tp=2), limits=roomy).grid == Grid(tp=2, dp=2)
    found = choose(3, wanted=Grid(tp=2), limits=roomy)
    assert found.grid == Grid(dp=3)
    assert found.reason == "tp 1 x pp 1 x dp 3: tp 2 x pp 1 would leave 1 of 3 ranks waiting"
    tight = replace(even, memory=2000.0)
    assert choose(3, wanted=Grid(tp=2), limits=tight).grid == Grid(tp=2)
    grown = choose(4, wanted=Grid(), limits=tight)  # nothing fits that is as asked for
    assert grown.grid == Grid(tp=2, dp=2)
    assert "takes 3.58e-06 GiB of a rank's 1.86e-06" in grown.reason
    assert choose(4, wanted=Grid(), limits=replace(tight, zero=3)).grid == Grid(dp=4)
    assert choose(3, wanted=Grid(), limits=replace(tight, memory=2 * GIB)).grid == Grid(dp=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: choose(0, wanted=Grid(), limits=SMALL),
            "ranks is 0; it must be a whole number, 1 or more",
        ),
        (
            lambda: choose(2.0, wanted=Grid(), limits=SMALL),
            "ranks is 2.0; it must be a whole number",
        ),
        (lambda: Grid(tp=0), "tp is 0; it must be a whole number, 1 or more"),
        (
            lambda: replace(SMALL, memory=3.0),
            "memory is 3 bytes, but parameters has 0 entries for 6 layers; give the",
        ),
        (
            lambda: choose(1, wanted=Grid(), limits=replace(WEIGHED, memory=1000.0)),
            "tp 1 x pp 1 x dp 1 takes 3.58e-06 GiB of a rank's 9.31e-07, and no layout "
            "of 1 ranks takes less; start more",
        ),
        (
            lambda: choose(3, wanted=Grid(), limits=replace(SMALL, most=(1, 1, 0)), idle=False),
            "3 ranks can't share the model: 3 models can't share a batch of 8; start "
            "another number of ranks",
        ),
        (
            lambda: choose(1, wanted=Grid(), limits=replace(SMALL, micro_batch=3)),
            "1 ranks can't share the model: 1 models have 8 sequences each, which can't "
            "be cut into micro-batches of 3",
        ),
    ],
)
def test_what_can_not_be(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
