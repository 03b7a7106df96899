"""Error-feedback residuals of gradient buckets, stored by parameter.

    bucket 0   | head.weight |pad|                      worker [numel], server [this rank's part]
    bucket 1   | block.0.bias |pad| block.0.weight |    worker [numel], server [this rank's part]
    state      {"codec": name, "worker": {"head.weight": Shard, ...}, "server": {...}}

By parameter, they survive a change of the bucket layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.buckets.bucket import Bucket
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.flat import FlatLayout, Shard

__all__ = [
    "BucketErrors",
    "check_codec",
    "fold",
    "join_states",
    "layout_of_bucket",
    "new_memory",
    "part_of_state",
    "take",
]


def layout_of_bucket(bucket: Bucket, layout: FlatLayout) -> FlatLayout:
    """The layout of the bucket's tensors within the bucket."""
    members = bucket.parameters
    return FlatLayout(
        tuple(layout.names[m] for m in members),
        tuple(layout.shapes[m] for m in members),
        tuple(layout.offsets[m] - bucket.start for m in members),
        bucket.stop - bucket.start,
    )


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the state_dicts of memories that hold different parameters.

    Their mappings by name become one mapping.
    """
    joined: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, Mapping):
                joined.setdefault(key, {}).update(value)
            else:
                joined[key] = value
    return joined


def part_of_state(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The part of a joined state that belongs to these parameters."""
    return {
        key: {n: value[n] for n in names if n in value} if isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def new_memory(
    codec: Codec, layout: FlatLayout, *, rank: int, size: int, device: torch.device
) -> Any:
    """Errors of zero for a bucket of this layout: the codec's own kind, or an ErrorFeedback."""
    make = getattr(codec, "memory", ErrorFeedback)
    return make(layout, codec=codec, rank=rank, size=size, device=device)


def fold(memory: Any) -> None:
    """Move this rank's part of the shared errors to its own.

    There they add as much to the mean over the ranks.
    """
    begin, end = memory.starts[memory.rank], memory.starts[memory.rank + 1]
    memory.worker[begin:end].add_(memory.server, alpha=memory.size)
    memory.server.zero_()


def take(memory: Any, name: str, other: Any) -> None:
    """Copy a parameter's own errors, and directions if there are any, from another memory.

    Call `fold` on the other memory before.
    """
    memory.worker[memory.layout.slice(name)] = other.worker[other.layout.slice(name)]
    if hasattr(memory, "take_basis"):
        memory.take_basis(name, other)


def _padding(layout: FlatLayout) -> Tensor:
    """The elements of a buffer that no tensor has."""
    free = torch.ones(layout.numel, dtype=torch.bool, device="cpu")
    for index in range(len(layout.names)):
        free[layout.slice_at(index)] = False
    return free.nonzero().flatten()


class BucketErrors:
    """One error memory for each bucket of a Reducer: errors[i] is that of bucket i.

    Args:
        codec: What the buckets are compressed with.
        buckets: The plan of buckets.
        layouts: The layouts of the flat buffers.
        rank: This rank's number in the group.
        size: The number of ranks in the group.
        devices: The devices of the flat buffers.
    """

    def __init__(
        self,
        codec: Codec,
        buckets: Sequence[Bucket],
        *,
        layouts: Sequence[FlatLayout],
        rank: int,
        size: int,
        devices: Sequence[torch.device],
    ) -> None:
        self.codec, self.buckets = codec, list(buckets)
        self._place = {
            (b.buffer, p): (i, j) for i, b in enumerate(buckets) for j, p in enumerate(b.parameters)
        }
        self._memories: list[Any] = []
        self._padding: list[Tensor] = []
        self._own_padding: list[
            Tensor
        ] = []  # of this rank's part: counted once, since counting waits for a GPU
        for bucket in buckets:
            layout, device = (
                layout_of_bucket(bucket, layouts[bucket.buffer]),
                devices[bucket.buffer],
            )
            memory = new_memory(codec, layout, rank=rank, size=size, device=device)
            self._memories.append(memory)
            places, (begin, end) = _padding(layout), memory.starts[rank : rank + 2]
            self._padding.append(places.to(device))
            self._own_padding.append(
                (places[(places >= begin) & (places < end)] - begin).to(device)
            )

    def __getitem__(self, index: int) -> Any:
        return self._memories[index]

    def _parts(self, buffer: int, parameter: int) -> list[Tensor]:
        """Views of all that is kept of a parameter on this rank."""
        bucket, member = self._place[buffer, parameter]
        memory = self._memories[bucket]
        place = memory.layout.slice_at(member)
        begin, end = memory.starts[memory.rank], memory.starts[memory.rank + 1]
        low, high = max(begin, place.start), min(end, place.stop)
        return [
            memory.worker[place],
            *([memory.server[low - begin : high - begin]] if low < high else []),
        ]

    def keep(self, buffer: int, parameter: int) -> list[Tensor]:
        """A copy of a parameter's errors, for `put_back`."""
        return [part.clone() for part in self._parts(buffer, parameter)]

    def put_back(self, buffer: int, parameter: int, kept: Sequence[Tensor]) -> None:
        """The errors as they were: nobody used what was sent of this parameter."""
        for part, before in zip(self._parts(buffer, parameter), kept, strict=True):
            part.copy_(before)

    def clear_padding(self, index: int, gradient: Tensor) -> None:
        """Zero what decoding wrote between the parameters of a bucket, and the errors there."""
        places, memory = self._padding[index], self._memories[index]
        if not len(places):
            return
        gradient[places] = 0
        memory.worker[places] = 0
        memory.server[self._own_padding[index]] = 0

    def state_dict(self) -> dict[str, Any]:
        """By parameter name; the tensors are `pyops.flat.Shard`s of all ranks' errors."""
        return join_states([memory.state_dict() for memory in self._memories])

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of another codec, one that lacks a parameter, or one that does not
        fit. Nothing is changed."""
        check_codec(state, self.codec)
        for memory in self._memories:
            absent = [name for name in memory.layout.names if name not in state["worker"]]
            if absent:
                raise ValueError(
                    f"the communication state has no errors for {absent[0]!r}; it is of "
                    "another model: build that model, or go "
                    "on without the state, which begins with errors of zero"
                )
            trial = new_memory(
                self.codec,
                memory.layout,
                rank=memory.rank,
                size=memory.size,
                device=torch.device("cpu"),
            )
            trial.load_state_dict(part_of_state(state, memory.layout.names))

    def load_state_dict(self, state: Mapping[str, Any], *, op: str = "mean") -> None:
        """Load the errors of another run, on any number of ranks and with any buckets.

        Args:
            state: What `state_dict` gave.
            op: "mean" or "sum": what becomes of the ranks' gradients. On another number of ranks
                the mean, or the sum, of the errors stays.

        Raises:
            ValueError: As `check`.
        """
        self.check(state)
        for memory in self._memories:
            memory.load_state_dict(part_of_state(state, memory.layout.names))
            ranks_before = _ranks_of(state["worker"][memory.layout.names[0]])
            if op == "sum" and ranks_before != memory.size:
                memory.worker.mul_(ranks_before / memory.size)


def _ranks_of(rows: Tensor | Shard) -> int:
    """Of how many ranks there are errors."""
    return (rows.global_shape if isinstance(rows, Shard) else rows.shape)[0]


def check_codec(state: Mapping[str, Any], codec: Codec) -> None:
    """ValueError when the state is none, or that of another codec."""
    if (
        not isinstance(state, Mapping)
        or "codec" not in state
        or not isinstance(state.get("worker"), Mapping)
    ):
        raise ValueError(
            "this is no communication state; pass what communication_state(), or a "
            "hook's state_dict(), gave"
        )
    if state["codec"] != codec.name:
        raise ValueError(
            f"the communication state is of codec {state['codec']}, this run uses "
            f"{codec.name}; use that codec, or go on "
            "without the state, which begins with errors of zero"
        )
