"""PeerCopies: a state shared out over the ranks, each rank's portion kept by it and by a neighbor.

    rank 0   [portion 0] [portion 2]       portion r: what rank r alone has of the state, and
    rank 1   [portion 1] [portion 0]       one of N parts of what all have alike
    rank 2   [portion 2] [portion 1]       the same of the step before, until all have the new one

A rank that is lost leaves its portion at its neighbor, so those that are left have the whole state
of the last step of which every rank had its copies (Wang et al., Gemini, SOSP 2023).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.checkpoint.memory.checkpoints import neighbor_distance
from pyops.checkpoint.memory.room import machine
from pyops.comm.agreement import gather
from pyops.failure import naming_lost_ranks
from pyops.flat import Shard, Shards
from pyops.healing.peer_state import send_state
from pyops.healing.state_lost import StateLostError

__all__ = ["PeerCopies", "Wanted"]

CHUNK = 32 << 20  # bytes of a message to the neighbor
ALIGNED = 16  # bytes at whose multiples tensors begin
Path = tuple[Any, ...]  # keys from the outermost dictionary in
Wanted = Callable[[Path, tuple[int, ...]], Sequence[tuple[int, int]] | None]
"""(path, shape of the whole tensor) -> the ranges of its elements that this rank takes up, or None
for all of them."""


@dataclass(frozen=True)
class _Place:
    """Which elements [start, start + numel) of which tensor lie at `offset` of the bytes."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class _Portion:
    """Of one rank, of one step."""

    step: int
    meeting: int
    owner: int
    size: int
    values: dict[Path, Any]
    places: tuple[_Place, ...]
    data: Tensor

    @property
    def of(self) -> tuple[int, int, int]:
        """Which state it is a portion of."""
        return self.step, self.meeting, self.size

    def tensors(self) -> Iterator[tuple[_Place, Tensor]]:
        """Views of the bytes."""
        for place in self.places:
            nbytes = place.numel * place.dtype.itemsize
            yield place, self.data[place.offset : place.offset + nbytes].view(place.dtype)


class PeerCopies:
    """The portions that this rank keeps in host memory. `join` a group first; every method is a
    collective of it but `settle`.

    A state is nested dictionaries of tensors, which all ranks have alike and of which each keeps
    one of N parts; of `pyops.flat.Shard`s, of which a rank keeps those that are not marked as
    copies; and of what can be pickled, which is taken from any rank.
    """

    def __init__(self) -> None:
        self._kept: list[_Portion] = []
        self._spare: list[Tensor] = []
        self._meeting = -1

    def join(self, group: dist.ProcessGroup) -> None:
        """Exchange with the ranks of this group from now on; what is kept of others stays."""
        self._group, self._rank = group, dist.get_rank(group)
        self._size = dist.get_world_size(group)
        told = gather((machine(), self._meeting), group=group)
        self._meeting = 1 + max(meeting for _, meeting in told)
        self._distance = neighbor_distance([where for where, _ in told])

    @property
    def nbytes(self) -> int:
        """Bytes of the portions that this rank keeps now."""
        return sum(portion.data.numel() for portion in self._kept)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep this rank's portion of the state, and that of the rank whose neighbor it is.

        Args:
            step: How many steps have led to the state.
            state: See the class; it is copied.

        Raises:
            CommunicationError: A rank is lost. What was kept before is kept still.
            ValueError: For boxes that tensor parallelism has cut.
        """
        values: dict[Path, Any] = {}
        pieces: list[tuple[_Place, Tensor]] = []
        end = 0
        for path, value in _leaves(state, ()):
            if not isinstance(value, Tensor | Shard | Shards):
                values[path] = copy.deepcopy(value)
                continue
            for shape, start, tensor in self._portion_of(value, path):
                place = _Place(path, shape, tensor.dtype, start, tensor.numel(), end)
                end += -(-tensor.nbytes // ALIGNED) * ALIGNED
                pieces.append((place, tensor))
        data = self._memory(end)
        places = tuple(place for place, _ in pieces)
        mine = _Portion(step, self._meeting, self._rank, self._size, values, places, data)
        for (_, into), (_, tensor) in zip(mine.tensors(), pieces, strict=True):
            into.copy_(tensor)
        self._kept.append(mine)
        if self._size > 1:
            self._kept.append(self._swapped(mine))

    def settle(self) -> None:
        """Let go of older steps: call it when every rank has ended `save`, which any collective
        that came after it tells."""
        newest = max((portion.of for portion in self._kept), default=None)
        old = [portion for portion in self._kept if portion.of != newest]
        self._kept = [portion for portion in self._kept if portion.of == newest]
        self._spare = [portion.data for portion in old]

    def recover(self, wanted: Wanted) -> tuple[int, dict[str, Any]] | None:
        """The newest state of which the ranks have every portion.

        Args:
            wanted: What this rank takes up.

        Returns:
            How many steps have led to it, and the state: tensors on the CPU, `Shards` where ranges
            are wanted; the same object for nothing that is kept. None where no rank has anything.

        Raises:
            StateLostError: On every rank alike: a portion of each step is lost.
            CommunicationError: A rank is lost.
        """
        everyone = gather([(each.of, each.owner) for each in self._kept], group=self._group)
        holders: dict[tuple[int, int, int], dict[int, int]] = {}
        for rank, claims in enumerate(everyone):
            for of, owner in claims:
                holders.setdefault(of, {}).setdefault(owner, rank)
        whole = [of for of, owners in holders.items() if len(owners) == of[2]]
        if not holders:
            return None
        if not whole:
            step, _, size = newest = max(holders)
            missing = sorted(set(range(size)) - set(holders[newest]))
            raise StateLostError(
                f"the states of step {step} that ranks {missing} of {size} had are lost, with the "
                "copies at their neighbors: go on from a checkpoint"
            )
        chosen = max(whole)
        # Portions of a newer step, of which a lost rank had the others, would be `settle`'s newest.
        self._kept = [portion for portion in self._kept if portion.of <= chosen]
        result = _Assembled(wanted)
        for owner in range(chosen[2]):
            holder = holders[chosen][owner]
            mine = next((p for p in self._kept if (p.of, p.owner) == (chosen, owner)), None)
            sent = (mine.values, mine.places, mine.data) if mine and holder == self._rank else None
            values, places, data = send_state(sent, source=holder, group=self._group)
            result.take(_Portion(*chosen[:2], owner, chosen[2], values, places, data))
        return chosen[0], result.state()

    def _portion_of(
        self, value: Tensor | Shard | Shards, path: Path
    ) -> list[tuple[tuple[int, ...], int, Tensor]]:
        """(shape of the whole, first element, elements) of what this rank keeps of a value."""
        if isinstance(value, Tensor):
            start, stop = (r * value.numel() // self._size for r in (self._rank, self._rank + 1))
            return [(tuple(value.shape), start, value.detach().reshape(-1)[start:stop])]
        found = []
        for shard in [value] if isinstance(value, Shard) else value:
            shape = tuple(shard.global_shape)
            if not shard.is_range and shard.shape != shape:
                raise ValueError(
                    f"{path[-1]} is cut over ranks (tensor parallelism), and the part of a lost "
                    "rank can't be healed; use parameters that are whole on each replica"
                )
            if not shard.copy:
                start = shard.offset[0] if shard.is_range else 0
                found.append((shape, start, shard.tensor.detach().reshape(-1)))
        return found

    def _memory(self, nbytes: int) -> Tensor:
        """That of a step before where it has the size: new memory costs more than the copy."""
        for number, spare in enumerate(self._spare):
            if spare.numel() == nbytes:
                return self._spare.pop(number)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _swapped(self, mine: _Portion) -> _Portion:
        """Send this rank's portion; the one of the rank whose neighbor it is."""
        to, source = ((self._rank + sign * self._distance) % self._size for sign in (1, -1))
        told = pickle.dumps((*mine.of[:2], mine.owner, mine.size, mine.values, mine.places))
        head = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        with naming_lost_ranks("handing states to the neighbor", group=self._group):
            sizes = torch.tensor([head.numel(), mine.data.numel()], device="cpu")
            theirs = torch.empty_like(sizes)
            self._pass_on([(sizes, theirs)], to=to, source=source)
            header = torch.empty(int(theirs[0]), dtype=torch.uint8, device="cpu")
            data = self._memory(int(theirs[1]))
            self._pass_on([(head, header), (mine.data, data)], to=to, source=source)
        step, meeting, owner, size, values, places = pickle.loads(header.numpy().tobytes())
        return _Portion(step, meeting, owner, size, values, places, data)

    def _pass_on(self, messages: Sequence[tuple[Tensor, Tensor]], *, to: int, source: int) -> None:
        for sent, received in messages:
            outgoing, incoming = list(sent.split(CHUNK)), list(received.split(CHUNK))
            for turn in range(max(len(outgoing), len(incoming))):
                works = []
                if turn < len(outgoing) and outgoing[turn].numel():
                    works.append(dist.isend(outgoing[turn], group=self._group, group_dst=to))
                if turn < len(incoming) and incoming[turn].numel():
                    works.append(dist.irecv(incoming[turn], group=self._group, group_src=source))
                for work in works:
                    if work is not None:
                        work.wait()


class _Assembled:
    """A state that portions are put into."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._values: dict[Path, Any] = {}
        self._whole: dict[Path, Tensor] = {}
        self._ranges: dict[Path, list[tuple[int, Tensor]]] = {}
        self._shapes: dict[Path, tuple[int, ...]] = {}
        self._missing: dict[Path, int] = {}

    def take(self, portion: _Portion) -> None:
        """Put in what is wanted of it."""
        for path, value in portion.values.items():
            if path not in self._values:
                self._values[path] = copy.deepcopy(value)
        for place, elements in portion.tensors():
            if place.path not in self._shapes:
                self._make(place)
            for start, target in self._ranges[place.path]:
                low = max(start, place.start)
                high = min(start + target.numel(), place.start + place.numel)
                if low < high:
                    target[low - start : high - start] = elements[
                        low - place.start : high - place.start
                    ]
                    self._missing[place.path] -= high - low

    def _make(self, place: _Place) -> None:
        ranges = self._wanted(place.path, place.shape)
        self._shapes[place.path] = place.shape
        if ranges is None:
            whole = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            self._whole[place.path] = whole
            found = [(0, whole.view(-1))]
        else:
            found = [
                (start, torch.empty(stop - start, dtype=place.dtype, device="cpu"))
                for start, stop in ranges
            ]
        self._ranges[place.path] = found
        self._missing[place.path] = sum(target.numel() for _, target in found)

    def state(self) -> dict[str, Any]:
        """What was put together."""
        result: dict[str, Any] = {}
        found: dict[Path, Any] = dict(self._values)
        for path, shape in self._shapes.items():
            if self._missing[path]:
                raise ValueError(
                    f"{self._missing[path]} of the {prod(shape)} elements of {path} are in no "
                    "rank's portion"
                )
            if path in self._whole:
                found[path] = self._whole[path]
            elif self._ranges[path]:
                found[path] = Shards(
                    tuple(Shard(shape, (start,), part) for start, part in self._ranges[path])
                )
        for path, value in sorted(found.items(), key=lambda pair: len(pair[0])):
            inner = result
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = value
        return result


def _leaves(state: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(state, Mapping) and state:
        for key, value in state.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, state
