"""The number of micro-batches, tried: the slowest rank decides, and all ranks take the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pyops.elastic import Machine
from pyops.elastic.planning.confirmation import confirm, fastest
from tests.elastic.flat import pack

pytestmark = pytest.mark.cpu_only


def packing():
    found = pack([3.0, 3.0], frozen=0, stages=2, batch=8, machine=Machine(devices=2, overhead=1.0))
    assert [count for count, _ in found.simulated] == [4, 2, 6, 8]
    return found


def test_the_slowest_rank_decides():
    assert fastest([{8: 1.31, 4: 1.10, 12: 1.50}, {8: 1.12, 4: 1.15, 12: 1.48}]) == 4
    assert fastest([{8: 1.0, 4: 0.1}, {8: 1.0, 4: 1.1}]) == 8, "not the sum, not the first rank"
    assert fastest([{8: 1.0, 4: 1.0}]) == 4, "of equal ones the fewest"


def test_the_simulators_best_few_are_tried_in_turn():
    tried = []

    def measure(count: int) -> float:
        tried.append(count)
        return {4: 2.0, 2: 1.0, 6: 3.0}[count]

    found = confirm(packing(), measure, rounds=2)
    assert tried == [4, 2, 6, 4, 2, 6]
    assert found.micro_batches == 2
    assert (
        replace(found, micro_batches=4, reason=packing().reason, time=packing().time) == packing()
    )
    assert found.time == dict(packing().simulated)[2]
    assert found.reason.endswith("; of micro-batches tried (4: 2 s, 2: 1 s, 6: 3 s) 2 are fastest")


def test_one_slow_moment_decides_nothing():
    moments = iter([9.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    assert confirm(packing(), lambda count: next(moments), most=2).micro_batches == 4


def test_one_number_is_not_tried():
    assert confirm(packing(), lambda count: pytest.fail("tried"), most=1) == packing()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, "most is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": True}, "rounds is True"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        confirm(packing(), lambda count: 1.0, **options)


def test_bad_measurements():
    with pytest.raises(ValueError, match="no simulated numbers of micro-batches"):
        confirm(replace(packing(), simulated=()), lambda count: 1.0)
    with pytest.raises(ValueError, match="rank 0 measured nan seconds with 4 micro-batches"):
        confirm(packing(), lambda count: math.nan)
    with pytest.raises(ValueError, match=r"rank 0 tried \[2\] micro-batches, but rank 1 \[4\]"):
        fastest([{2: 1.0}, {4: 1.0}])
    with pytest.raises(ValueError, match="nothing was measured"):
        fastest([])


def test_every_rank_takes_the_same(world):
    assert world(3).run(_tried) == [2, 2, 2]


def _tried(rank, group):
    seconds = [{4: 1.0, 2: 2.0}, {4: 1.0, 2: 2.0}, {4: 3.0, 2: 2.0}][rank]
    return confirm(packing(), lambda count: seconds[count], most=2, group=group).micro_batches


def test_what_goes_wrong_on_one_rank_does_on_all(world):
    assert world(2).run(_failing) == ["no memory"] * 2


def _failing(rank, group):
    def measure(count: int) -> float:
        if rank == 1:
            raise RuntimeError("no memory")
        return 1.0

    with pytest.raises(RuntimeError) as caught:
        confirm(packing(), measure, group=group)
    return str(caught.value)
