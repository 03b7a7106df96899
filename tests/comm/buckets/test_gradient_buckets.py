"""GradientBuckets: the order in which buckets start, what is too late, and what a new name is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.comm import Reducer
from pyops.comm.buckets.gradient_buckets import BucketMember, GradientBuckets
from pyops.flat import FlatBuffer


class Recorded:
    """A strategy that writes down what it is called with."""

    def __init__(self, bucket_of: list[int], *, automatic: bool = True) -> None:
        self.calls: list[str] = []
        self.parameters = [nn.Parameter(torch.ones(1)) for _ in bucket_of]
        members = [
            BucketMember(p, f"p{i}", bucket, lambda i=i: self.calls.append(f"store {i}"))
            for i, (p, bucket) in enumerate(zip(self.parameters, bucket_of, strict=True))
        ]
        self.hooks = GradientBuckets(members, max(bucket_of) + 1, self, automatic=automatic)

    def begin_backward(self, number: int | None) -> None:
        self.calls.append(f"begin {number}")

    def start(self, bucket: int) -> None:
        self.calls.append(f"start {bucket}")

    def finish(self) -> None:
        self.calls.append("finish")
        self.hooks.start_rest()

    def backward(self, *numbers: int) -> list[str]:
        """The calls of a backward in which these gradients arrive in turn."""
        self.calls = []
        product = torch.ones(1)
        for number in reversed(numbers):  # the last factor is reached first
            product = torch.sin(product) * self.parameters[number]
        product.backward()
        return self.calls


def test_buckets_start_in_their_order_as_they_are_complete():
    found = Recorded([0, 0, 1]).backward(0, 1, 2)
    assert found == ["begin 0", "store 0", "store 1", "start 0", "store 2", "start 1", "finish"]


def test_a_bucket_that_is_complete_early_waits_for_its_turn():
    found = Recorded([0, 1]).backward(1, 0)
    assert found == ["begin 1", "store 1", "store 0", "start 0", "start 1", "finish"]


def test_the_end_of_backward_starts_what_was_not_used():
    recorded = Recorded([0, 1])
    assert recorded.backward(1) == ["begin 1", "store 1", "finish", "start 0", "start 1"]
    assert list(recorded.hooks.used) == [0, 1]
    recorded.hooks.forget_used()
    assert list(recorded.hooks.used) == [0, 0]


def test_without_automatic_start_the_end_of_backward_starts_all():
    found = Recorded([0, 1], automatic=False).backward(0, 1)
    assert found == ["begin 0", "store 0", "store 1", "finish", "start 0", "start 1"]


def test_no_sync_starts_nothing():
    recorded = Recorded([0, 1])
    with recorded.hooks.no_sync():
        assert recorded.backward(0, 1) == ["begin 0", "store 0", "store 1"]
    assert recorded.backward(0, 1)[-1] == "finish"


def test_a_gradient_of_a_bucket_that_started_early_is_refused_by_name():
    recorded = Recorded([0, 1])
    recorded.hooks.started_early.add(1)
    with pytest.raises(RuntimeError, match="p1 arrived after its bucket 1 had left"):
        recorded.backward(1)


def test_a_backward_that_broke_off_after_a_start_is_refused():
    recorded = Recorded([0, 1])
    recorded.parameters[1].register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorded.backward(0, 1)
    with pytest.raises(RuntimeError, match="after 2 of 2 buckets had left"):
        recorded.hooks.prepare()


def test_removed_hooks_are_not_called():
    recorded = Recorded([0])
    recorded.hooks.remove()
    assert recorded.backward(0) == []


def test_op_of_a_reducer_has_a_new_name():
    buffer = FlatBuffer([("w", nn.Parameter(torch.ones(3)))])
    with pytest.raises(TypeError, match="op has a new name: reduction"):
        Reducer([buffer], None, op="mean")
    with pytest.raises(ValueError, match="reduction is 'max'"):
        Reducer([buffer], None, reduction="max")
