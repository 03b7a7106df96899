"""What compression left out, kept and added the next time, so that it is late but never lost.

    rank 0   worker [numel]   what rank 0 left out of its own numbers
    rank 1   worker [numel]
             server | rank 0's chunk | rank 1's chunk |     what the owner of a chunk left out of
                                                            the ranks' sum

The mean over ranks of the workers, plus the servers, is what the ranks have not seen yet: that is
what stays the same when the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec, check_whole
from pyops.flat import FlatLayout, Shard

__all__ = ["ErrorFeedback", "check_state", "chunk_starts", "merge"]

WHOLE = "tensor"  # the name in a state of a tensor without a layout


def chunk_starts(numel: int, *, size: int, multiple: int) -> list[int]:
    """Where each rank's chunk begins, and the end: `size` contiguous ranges, cut at multiples of
    `multiple`."""
    each = -(-numel // (size * multiple)) * multiple
    return [min(numel, each * rank) for rank in range(size + 1)]


def check_state(state: Any, *, merged: bool = True) -> None:
    """ValueError for what is no state of errors.

    Args:
        merged: Whether whole tensors will do in place of shards.
    """
    if not isinstance(state, Mapping) or "codec" not in state:
        raise ValueError(
            f"this is no state of errors but a {type(state).__name__}; pass what state_dict() gave"
        )
    for kind in ("worker", "server"):
        if not isinstance(state.get(kind), Mapping):
            raise ValueError(
                f"the state has no {kind!r} errors by name; pass what state_dict() gave, whole"
            )
        for name, value in state[kind].items():
            if not isinstance(value, (Tensor, Shard) if merged else Shard):
                expected = (
                    "a tensor or a pyops.flat.Shard"
                    if merged
                    else "a pyops.flat.Shard, as state_dict() gives"
                )
                raise ValueError(
                    f"the state's {kind} error of {name!r} is a {type(value).__name__}; "
                    f"expected {expected}"
                )
    if type(state.get("rounds", 0)) is not int:
        raise ValueError(f"the state's rounds are {state['rounds']!r}; expected a whole number")


class ErrorFeedback:
    """The errors of one rank of `size` for one tensor, or for the tensors of a layout in one flat
    tensor.

    worker: fp32 [numel]. server: fp32, of this rank's chunk [starts[rank], starts[rank + 1]).
    overflowed: fp32 [1], 1 once a number that was not finite came by; the caller clears it. rounds:
    collectives so far, which keys rounding at random.

    Args:
        tensors: A FlatLayout, or the number of elements.
        communicator: Gives rank and size.
    """

    def __init__(
        self,
        tensors: FlatLayout | int,
        *,
        codec: Codec,
        rank: int = 0,
        size: int = 1,
        communicator: Communicator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(
                f"codec is {codec!r}; expected a codec's object, such as pyops.comm.OneBit()"
            )
        if not isinstance(tensors, FlatLayout):
            check_whole(tensors, name="tensors", example="the number of elements")
            if tensors < 0:
                raise ValueError(
                    f"tensors is {tensors}; give the number of elements, 0 or more, or a FlatLayout"
                )
        if communicator is not None:
            rank, size = communicator.rank, communicator.size
        check_whole(rank, name="rank", example="0")
        check_whole(size, name="size", example="1")
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank} of size {size}; give a rank from 0 to size - 1")
        named = isinstance(tensors, FlatLayout)
        self.layout = (
            tensors
            if isinstance(tensors, FlatLayout)
            else FlatLayout((WHOLE,), ((tensors,),), (0,), tensors)
        )
        self.named = named
        self.numel, self.codec, self.rank, self.size = self.layout.numel, codec, rank, size
        self.starts = chunk_starts(self.numel, size=size, multiple=codec.multiple)
        self.worker = torch.zeros(self.numel, dtype=torch.float32, device=device)
        mine = self.starts[rank + 1] - self.starts[rank]
        self.server = torch.zeros(mine, dtype=torch.float32, device=device)
        self.overflowed = torch.zeros(1, dtype=torch.float32, device=device)
        self.rounds = 0

    def zero_(self) -> None:
        """Forget the errors."""
        self.worker.zero_()
        self.server.zero_()
        self.overflowed.zero_()

    def _mine(self) -> list[tuple[str, slice, slice]]:
        """The tensors' parts in this rank's chunk: (name, slice of the flattened tensor, slice of
        `server`)."""
        a, b = self.starts[self.rank], self.starts[self.rank + 1]
        return [
            (name, part, slice(at.start - a, at.stop - a))
            for name, part, at in self.layout.shards(a, b)
        ]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "rounds", "worker": {name: Shard}, "server": {name: Shard}}, this rank's part,
        without copying.

        A worker error is row `rank` of a tensor [size, *shape], a server error a part of the
        flattened tensor. Between the tensors of a layout nothing is kept: whoever wants to go on
        bit for bit keeps the numbers and errors there zero.
        """
        worker, server = {}, {}
        for index, (name, shape) in enumerate(
            zip(self.layout.names, self.layout.shapes, strict=True)
        ):
            row = self.worker[self.layout.slice_at(index)].view(1, *shape)
            worker[name] = Shard((self.size, *shape), (self.rank, *(0 for _ in shape)), row)
        numel = {
            name: at.stop - at.start
            for name, at in zip(self.layout.names, self._slices(), strict=True)
        }
        for name, part, at in self._mine():
            server[name] = Shard((numel[name],), (part.start,), self.server[at])
        return {"codec": self.codec.name, "rounds": self.rounds, "worker": worker, "server": server}

    def _slices(self) -> list[slice]:
        return [self.layout.slice_at(index) for index in range(len(self.layout.names))]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the errors of `state`: of this rank as `state_dict` gave it, or of all ranks as
        `merge` does.

        From another number of ranks: every worker gets the mean of the old ones, and the servers
        are cut anew, so that mean(workers) + servers stays.

        Raises:
            ValueError: Before anything is changed, for another codec, other tensors, or a state
                that lacks some ranks' errors.
        """
        check_state(state)
        if state["codec"] != self.codec.name:
            raise ValueError(
                f"these errors were left by codec {state['codec']!r}, and this one is "
                f"{self.codec.name!r}; use the same "
                "codec, or begin with zero errors"
            )
        worker, server = torch.zeros_like(self.worker), torch.zeros_like(self.server)
        for index, (name, shape) in enumerate(
            zip(self.layout.names, self.layout.shapes, strict=True)
        ):
            if name not in state["worker"]:
                raise ValueError(
                    f"the state has no errors of {name!r}; it has those of "
                    f"{sorted(state['worker'])}"
                )
            worker[self.layout.slice_at(index)] = self._row(
                name, state["worker"][name], shape
            ).reshape(-1)
        for name, part, at in self._mine():
            server[at] = self._part(name, state["server"].get(name), part)
        if not bool(worker.isfinite().all() and server.isfinite().all()):
            raise ValueError(
                "the state has errors that are not finite, which no call leaves behind; "
                "begin with errors of zero"
            )
        self.worker.copy_(worker)
        self.server.copy_(server)
        self.rounds = int(state.get("rounds", 0))

    def _row(self, name: str, value: Tensor | Shard, shape: Sequence[int]) -> Tensor:
        whole = tuple(value.global_shape if isinstance(value, Shard) else value.shape)
        if whole[1:] != tuple(shape) or not whole or whole[0] < 1:
            raise ValueError(
                f"the state's errors of {name!r} have shape {whole}; expected (ranks, "
                f"*{tuple(shape)})"
            )
        rows = value.tensor if isinstance(value, Shard) else value
        first = value.offset[0] if isinstance(value, Shard) else 0
        if whole[0] == self.size and first <= self.rank < first + len(rows):
            return rows[self.rank - first].float()
        if len(rows) < whole[0]:
            raise ValueError(
                f"the state has the errors of {len(rows)} of {whole[0]} ranks for "
                f"{name!r}, and this run has {self.size}; "
                "join those of all with pyops.comm.compression.error_feedback.merge, or "
                "save and load with pyops.checkpoint"
            )
        return (rows.double().sum(0) / whole[0]).float()

    def _part(self, name: str, value: Tensor | Shard | None, part: slice) -> Tensor:
        start = value.offset[0] if isinstance(value, Shard) else 0
        there = value.tensor if isinstance(value, Shard) else value
        there = torch.empty(0, device="cpu") if there is None else there.reshape(-1)
        if not start <= part.start <= part.stop <= start + len(there):
            raise ValueError(
                f"the state has elements [{start}, {start + len(there)}) of the server's "
                f"errors of {name!r}, and this rank "
                f"needs [{part.start}, {part.stop}); join the states of all ranks with "
                "pyops.comm.compression.error_feedback.merge"
            )
        return there[part.start - start : part.stop - start].float()


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of all ranks' states: worker tensors [ranks, *shape], server tensors whole.

    Raises:
        ValueError: When a part lacks.
    """
    if isinstance(states, Mapping):
        raise TypeError("states is one state; pass a list of those of all ranks")
    if not states:
        raise ValueError("there are no states to merge; pass those of all ranks")
    for state in states:
        check_state(state, merged=False)
    names = {state["codec"] for state in states}
    if len(names) > 1:
        raise ValueError(f"states of different codecs can't be merged: {sorted(names)}")
    merged: dict[str, Any] = {"codec": states[0]["codec"], "rounds": states[0].get("rounds", 0)}
    for kind in ("worker", "server"):
        found: dict[str, list[Shard]] = {}
        for state in states:
            for name, shard in state[kind].items():
                found.setdefault(name, []).append(shard)
        merged[kind] = {name: _joined(name, shards) for name, shards in found.items()}
    for name, rows in merged["worker"].items():  # tensors without elements have no server errors
        merged["server"].setdefault(name, torch.zeros(rows[0].numel(), device="cpu"))
    return merged


def _joined(name: str, shards: Sequence[Shard]) -> Tensor:
    if len(shapes := {tuple(shard.global_shape) for shard in shards}) > 1:
        raise ValueError(
            f"the states' errors of {name!r} are parts of different tensors, of shapes "
            f"{sorted(shapes)}; merge those of the "
            "ranks of one run"
        )
    whole = torch.zeros(shards[0].global_shape, dtype=torch.float32, device="cpu")
    seen = torch.zeros(len(whole), dtype=torch.bool, device="cpu")
    for shard in shards:
        at = slice(shard.offset[0], shard.offset[0] + len(shard.tensor))
        whole[at], seen[at] = shard.tensor.cpu(), True
    if not bool(seen.all()):
        raise ValueError(
            f"the states lack a part of the errors of {name!r}; merge those of all "
            f"{len(shards)} ranks or more"
        )
    return whole
