"""No odd tensor brings down a callable of pyops beside the ops, or gets a wrong answer out of
it."""

from __future__ import annotations

import pytest

from tests.grids import full
from tests.odd_input.callables import CALLS
from tests.odd_input.ranks import RANK_CALLS, odd_ones_for, wrong_on_ranks
from tests.odd_input.runs import wrong_in
from tests.workers import RankError

pytestmark = pytest.mark.cpu_only


OF_RANKS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
)  # without torch.distributed they raise; RANK_CALLS has them, too


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OF_RANKS])
def test_an_ordinary_tensor_is_taken(name: str):
    """Else an error for an odd one would show nothing."""
    make, call = CALLS[name]
    call(make())


def _takes_an_ordinary_one(rank: int, group: object, name: str) -> None:
    make, call = RANK_CALLS[name]
    call(make())


@pytest.mark.parametrize("name", RANK_CALLS)
def test_an_ordinary_tensor_is_taken_on_two_ranks(world, name: str):
    world(2).run(_takes_an_ordinary_one, name)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["dealt", full("all")])
def test_every_odd_tensor_in_every_callable(which: str):
    assert wrong_in("tests.odd_input.callables", which) == []


@pytest.mark.parametrize("name", RANK_CALLS)
def test_odd_tensors_dealt_out_to_callables_on_two_ranks(world, name: str):
    assert world(2).run(wrong_on_ranks, name, odd_ones_for(name, every=False)) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("name", RANK_CALLS)
def test_every_odd_tensor_on_two_ranks(world, name: str):
    """One after the other, so that a rank that dies tells of which."""
    wrong = []
    for odd in odd_ones_for(name, every=True):
        try:
            wrong += [
                each for of_rank in world(2).run(wrong_on_ranks, name, [odd]) for each in of_rank
            ]
        except RankError as error:
            wrong.append(f"{name}, {odd}: {error}")
            break
    assert wrong == []
