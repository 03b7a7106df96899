"""Virtual ranks: threads of one process that take turns, for a trial of a cut model where no rank
waits for another process.

    rank 0   forward .. x0 |                          | sum .. forward ..
    rank 1                 | forward .. x1 |          |                     sum .. forward ..
                           '-- its turn ends with each exchange

One thread runs at a time, with a state of torch's CPU generator of its own, so a trial is the same
every time. Nothing hangs: a rank that fails, or that exchanges other tensors than the rest, ends
all of them. Backward of CPU tensors runs on the thread that calls it, so exchanges may be within
it; tensors must be of the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyops.comm.collectives.work import Work
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["VirtualGroup", "run_virtual"]

T = TypeVar("T")


class _Ended(Exception):
    """Another virtual rank has failed."""


class _Turns:
    """Whose turn it is, and what has been put down in each round of exchanges."""

    def __init__(self, size: int) -> None:
        self.size, self.turn, self.ended = size, 0, False
        self.changed = threading.Condition()
        self.done = [False] * size
        self.rounds: list[dict[int, Tensor]] = []

    def wait(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.ended)
            if self.ended:
                raise _Ended

    def pass_on(self, rank: int) -> None:
        with self.changed:
            left = [
                (rank + n) % self.size
                for n in range(1, self.size + 1)
                if not self.done[(rank + n) % self.size]
            ]
            self.turn = left[0] if left else -1
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class VirtualGroup(Ranks):
    """One virtual rank's view of its group: give it as `group=` to layers and regions. Made by
    `run_virtual`."""

    def __init__(self, turns: _Turns, rank: int) -> None:
        super().__init__(self, rank, turns.size)  # type: ignore[arg-type]
        object.__setattr__(self, "turns", turns)
        object.__setattr__(self, "count", 0)

    turns: _Turns
    count: int

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order.

        Raises:
            ValueError: Where ranks put down tensors of other shapes, or one has none to give.
        """
        turns, round_ = self.turns, self.count
        object.__setattr__(self, "count", round_ + 1)
        if len(turns.rounds) == round_:
            turns.rounds.append({})
        turns.rounds[round_][self.rank] = x.detach().clone()
        state = torch.get_rng_state()
        turns.pass_on(self.rank)
        turns.wait(self.rank)
        torch.set_rng_state(state)
        found = turns.rounds[round_]
        shapes = {rank: tuple(each.shape) for rank, each in found.items()}
        if len(found) < self.size or len(set(shapes.values())) > 1:
            raise ValueError(f"the ranks do not exchange alike: {shapes}, of {self.size} ranks")
        if round_:
            turns.rounds[round_ - 1] = {}  # all ranks have passed it
        return [found[rank] for rank in range(self.size)]

    def sum_(self, x: Tensor, *, async_op: bool = False) -> Work:
        if self.size == 1:
            return Work(x)
        return Work(x.copy_(torch.stack(self.exchange(x)).sum(0)))

    def gather(self, x: Tensor, *, async_op: bool = False) -> Work:
        return Work(x if self.size == 1 else torch.cat(self.exchange(x)))

    def reduce_scatter(self, x: Tensor, *, async_op: bool = False) -> Work:
        if self.size == 1:
            return Work(x)
        return Work(torch.stack(self.exchange(x)).sum(0).chunk(self.size)[self.rank].contiguous())


def run_virtual(size: int, body: Callable[[VirtualGroup], T]) -> list[T]:
    """body(group) on each of `size` virtual ranks; the results in rank order. Raises what the first
    rank to fail raised.

    Each starts from the same seed, in torch's initial thread state (no autocast, the CPU as default
    device); torch's CPU generator is afterwards as it was before.
    """
    turns = _Turns(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def thread(rank: int) -> None:
        try:
            turns.wait(rank)
            torch.manual_seed(0)
            results[rank] = body(VirtualGroup(turns, rank))
            turns.done[rank] = True
            turns.pass_on(rank)
        except _Ended:
            pass
        except BaseException as error:
            errors.append(error)
            turns.end()

    with torch.random.fork_rng(devices=[]):
        threads = [
            threading.Thread(target=thread, args=(rank,), name=f"virtual rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    if errors:
        raise errors[0]
    return results
