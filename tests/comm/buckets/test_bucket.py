"""The plan of buckets, in literals that can be checked by eye."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyops.comm.buckets.bucket import Bucket, cut, plan_buckets
from pyops.flat import FlatLayout

pytestmark = pytest.mark.cpu_only


def test_groups_fill_up_and_the_last_is_small():
    assert cut([4, 4, 4, 4, 1, 1], limit=8, last_limit=2) == [[0, 1], [2, 3], [4, 5]]


def test_an_item_over_the_limit_stands_alone():
    assert cut([3, 20, 3, 3], limit=8, last_limit=3) == [[0], [1], [2], [3]]


def test_the_last_group_is_never_empty():
    assert cut([3, 20], limit=8, last_limit=1) == [[0], [1]]


def test_one_buffer_of_three_parameters():
    layout = FlatLayout.plan([("head", (64,)), ("block", (100,)), ("embedding", (64,))])
    assert plan_buckets([layout], item_sizes=[4], bucket_bytes=600) == [
        Bucket(0, 0, 64, (0,)),
        Bucket(0, 64, 192, (1,)),  # 100 elements, and padding up to the next multiple of 64
        Bucket(0, 192, 256, (2,)),
    ]


def test_buffers_are_merged_by_when_their_buckets_are_complete():
    weights = FlatLayout.plan([("head.w", (64,)), ("block.w", (64,))])
    biases = FlatLayout.plan([("head.b", (64,)), ("block.b", (64,))])
    plan = plan_buckets(
        [weights, biases], item_sizes=[4, 4], bucket_bytes=256, positions=[[1, 3], [0, 2]]
    )
    assert [(b.buffer, b.parameters) for b in plan] == [(1, (0,)), (0, (0,)), (1, (1,)), (0, (1,))]


def test_bucket_bytes_must_be_positive():
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        plan_buckets([FlatLayout.plan([("w", (1,))])], item_sizes=[4], bucket_bytes=0)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 4000), st.integers(1, 7)
)
def test_buckets_cover_every_buffer_exactly_once(
    sizes: list[int], bucket_bytes: int, multiple_of: int
):
    layout = FlatLayout.plan([(str(i), (n,)) for i, n in enumerate(sizes)], multiple_of=multiple_of)
    plan = plan_buckets([layout], item_sizes=[4], bucket_bytes=bucket_bytes)
    assert [b.start for b in plan] == [0, *(b.stop for b in plan[:-1])]
    assert plan[-1].stop == layout.numel
    assert [p for b in plan for p in b.parameters] == list(range(len(sizes)))
    for b in plan:
        assert len(b.parameters) == 1 or (b.stop - b.start) * 4 <= bucket_bytes
