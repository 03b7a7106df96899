"""One rank's mistake in a compressed collective: every rank raises, nothing has changed, and the
group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm import (
    Communicator,
    DisagreementError,
    ErrorFeedback,
    all_gather,
    all_reduce,
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.floats import Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.power_sgd import PowerSGD

pytestmark = pytest.mark.cpu_only

CODEC = OneBit(block=64)
COLLECTIVES = (compressed_all_reduce, compressed_reduce_scatter, compressed_all_gather)
# What rank 1 passes otherwise than the others: changes of arguments, its error, words of it.
MISTAKES: dict[
    str, tuple[Callable[[torch.Tensor, Communicator], dict[str, Any]], type[Exception], str]
] = {
    "double": (
        lambda x, _: {"tensor": x.double()},
        TypeError,
        "compresses float32, bfloat16 and float16, got torch.float64",
    ),
    "integers": (lambda x, _: {"tensor": x.int()}, TypeError, "got torch.int32"),
    "list": (lambda x, _: {"tensor": [x]}, TypeError, "tensor is a list; pass one torch.Tensor"),
    "expanded": (lambda x, _: {"tensor": x[:1].expand(100)}, ValueError, "expanded tensor"),
    "size": (
        lambda x, comm: {"error": ErrorFeedback(99, codec=CODEC, communicator=comm)},
        ValueError,
        "99 elements, and this",
    ),
    "rank": (
        lambda x, comm: {"error": ErrorFeedback(100, codec=CODEC, rank=0, size=7)},
        ValueError,
        "that of rank 0 of 7",
    ),
    "tensor": (
        lambda x, _: {"error": torch.zeros(100)},
        TypeError,
        "error is a Tensor; pass an ErrorFeedback",
    ),
    "other codec": (
        lambda x, comm: {"error": ErrorFeedback(100, codec=Int8(), communicator=comm)},
        ValueError,
        "int8",
    ),
    "class": (
        lambda x, _: {"codec": OneBit},
        TypeError,
        r"codec is the class OneBit; pass an object of it: OneBit\(\)",
    ),
    "name": (lambda x, _: {"codec": "onebit"}, TypeError, "codec must be a Codec.* got 'onebit'"),
    "matrices": (lambda x, _: {"codec": PowerSGD()}, ValueError, "power_sgd"),
    "segment": (lambda x, _: {"segment_bytes": 5}, ValueError, "segment_bytes is 5"),
    "segment's type": (lambda x, _: {"segment_bytes": "1M"}, TypeError, "segment_bytes is '1M'"),
}


def _one_rank_is_wrong(rank: int, group: dist.ProcessGroup) -> None:
    size, comm = dist.get_world_size(group), Communicator.of(group)
    for turn in range(2):
        for case, (change, error_of, words) in MISTAKES.items():
            for collective in COLLECTIVES:
                x = torch.linspace(-1, 1, 100) + rank
                error = ErrorFeedback(100, codec=CODEC, communicator=comm)
                arguments: dict[str, Any] = {
                    "tensor": x,
                    "codec": CODEC,
                    "error": error,
                    "group": group,
                    "async_op": turn == 1,
                }
                arguments |= change(x, comm) if rank == 1 else {}
                expected, message = (
                    (error_of, words)
                    if rank == 1
                    else (DisagreementError, f"rank 1 refused: .*{words}")
                )
                with pytest.raises(expected, match=f"(?s){message}"):
                    found = collective(arguments.pop("tensor"), **arguments)
                    assert turn == 1, (case, collective)
                    found.wait()
                assert torch.equal(x, torch.linspace(-1, 1, 100) + rank)
                assert not error.worker.any()
                assert error.rounds == 0
        total = compressed_all_reduce(
            torch.full((5,), rank + 1.0), codec=Identity(), op="sum", group=group
        )
        assert torch.equal(total, torch.full((5,), size * (size + 1) / 2))
        assert torch.equal(
            all_reduce(torch.ones(3), group=group), torch.full((3,), float(size))
        )  # from now on: shared memory


@pytest.mark.parametrize("size", [2, 3])
def test_the_mistake_of_one_rank_is_raised_on_all(world, size: int) -> None:
    world(size).run(_one_rank_is_wrong)


def _no_rank_is_right(rank: int, group: dist.ProcessGroup) -> None:
    for length, kind in ((-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(kind, match=f"length is {length}"):
            compressed_all_gather(
                torch.ones(0 if rank == 0 else 1, 3), length=length, codec=Identity(), group=group
            )
    with pytest.raises(ValueError, match="length is -1"):
        all_gather(torch.ones(0), length=-1, group=group)
    with pytest.raises(
        DisagreementError if rank else ValueError,
        match=r"rank 0 gives 5 rows, but its part of length=3",
    ):
        compressed_all_gather(
            torch.ones(5 if rank == 0 else 1), length=3, codec=Identity(), group=group
        )
    with pytest.raises(TypeError, match="class OneBit"):
        compressed_all_reduce(torch.ones(3), codec=OneBit, group=group)
    whole = compressed_all_gather(
        torch.full((2 - rank,), float(rank)), length=3, codec=Identity(), group=group
    )
    assert whole.tolist() == [0.0, 0.0, 1.0]


def test_a_length_that_is_none_is_refused_on_all_ranks_alike(world) -> None:
    world(2).run(_no_rank_is_right)


def _in_nodes(rank: int, group: dist.ProcessGroup) -> None:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    within, across = nodes[rank // 2], places[rank % 2]
    for turn in range(4):
        x = torch.arange(10.0) + rank
        wrong, other = (
            turn < 2 and rank == 3,
            turn >= 2 and rank == 3,
        )  # a wrong dtype; a codec that is not the others'
        with pytest.raises(TypeError if wrong else DisagreementError):
            work = compressed_all_reduce(
                x.int() if wrong else x,
                codec=CODEC if other else Identity(),
                group=across,
                within=within,
                async_op=turn % 2 == 1,
            )
            assert turn % 2 == 1
            work.wait()
        assert torch.equal(x, torch.arange(10.0) + rank)
        y = compressed_all_reduce(
            torch.arange(10.0) + rank, codec=Identity(), group=across, within=within
        )
        assert torch.equal(y, torch.arange(10.0) + 1.5)


def test_a_mistake_in_one_node_is_raised_in_all_nodes(world) -> None:
    world(4).run(_in_nodes)


def _one_plain(rank: int, group: dist.ProcessGroup) -> list[str]:
    found = []
    pair = dist.new_group([0, 1])
    for plain in (0, 1, 0):
        x = torch.arange(100.0)
        with pytest.raises(DisagreementError) as caught:
            if rank == plain:
                all_reduce(x, group=pair)
            else:
                compressed_all_reduce(x, codec=CODEC, group=pair)
        found.append(str(caught.value))
        assert torch.equal(x, torch.arange(100.0))
        if plain == 1:  # from now on the plain one goes through shared memory
            assert all_reduce(torch.ones(3), group=pair).tolist() == [2.0] * 3
    for names in (("ring", "two_shot"), ("shared_memory", "ring"), ("two_shot", "shared_memory")):
        with pytest.raises(DisagreementError) as caught:
            all_reduce(torch.ones(3), group=pair, algorithm=names[rank])
        found.append(str(caught.value))
    assert (
        compressed_all_reduce(torch.ones(3), codec=Identity(), op="sum", group=pair).tolist()
        == [2.0] * 3
    )
    return found


def test_a_plain_collective_meets_a_compressed_one(world) -> None:
    """Also as the very first ones of a group; and so do two algorithms."""
    for messages in world(2).run(_one_plain):
        assert all("must call the same collectives in the same order" in text for text in messages)
