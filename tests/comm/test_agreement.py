"""Ranks fail together: an error of one is raised on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pyops.comm.agreement import agree, gather, on_first_rank, ranks_agree
from pyops.mesh import ALONE

pytestmark = pytest.mark.cpu_only


class Odd(Exception):
    """An error that can't be made again from its text alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _caught(rank: int, group: dist.ProcessGroup, kind: str) -> str:
    with pytest.raises((OSError, RuntimeError, Odd)) as caught, ranks_agree(group):
        if rank == 1 and kind == "plain":
            raise OSError("no disk")
        if rank == 1:
            raise Odd("two", "texts")
    return repr(caught.value)


def test_the_error_of_one_rank_is_raised_on_all(world):
    assert world(3).run(_caught, "plain") == ["OSError('no disk')"] * 3
    odd = world(2).run(_caught, "odd")
    assert odd == ["RuntimeError('Odd: two texts')", "Odd('two texts')"]


def _several(rank: int, group: dist.ProcessGroup) -> tuple[str, str]:
    with pytest.raises(ValueError) as caught, ranks_agree(group):
        if rank > 0:
            raise ValueError(f"of rank {rank}")
    with ranks_agree(group):
        value = rank + 1
    return str(caught.value), str(value)


def test_of_several_errors_that_of_the_first_rank_is_raised_and_all_go_on_together(world):
    assert world(3).run(_several) == [
        ("of rank 1", "1"),
        ("of rank 1", "2"),
        ("of rank 1", "3"),
    ]


def _alone(rank: int, group: dist.ProcessGroup) -> list[object]:
    """Rank 0 works alone, while the other ranks do something else."""
    found: list[object] = []
    if rank == 0:
        with pytest.raises(ValueError, match="mine"), ranks_agree(ALONE):
            raise ValueError("mine")
        agree(None, group=ALONE)
        found = [gather(7, group=ALONE), on_first_rank(lambda: 8, group=ALONE)]
    return gather(found, group=group)


def test_a_process_alone_is_one_rank(world):
    assert world(2).run(_alone) == [[[[7], 8], []]] * 2


def test_one_process_raises_what_its_block_raises():
    error = ValueError("wrong")
    with pytest.raises(ValueError) as caught, ranks_agree():
        raise error
    assert caught.value is error
    with pytest.raises(KeyboardInterrupt), ranks_agree():
        raise KeyboardInterrupt
    with ranks_agree():
        pass
