"""What notes calls in the record of this process: those of torch.distributed, while `recording`,
and those of pyops, which call `begin_in` and `message` themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.flight_record.call_log import Kind
from pyops.flight_record.record import ENTRIES, FlightRecord

__all__ = [
    "active",
    "begin_in",
    "entered",
    "inside",
    "kind_in",
    "message",
    "recording",
    "run_noted",
    "waiting",
]


_active: FlightRecord | None = None


def inside() -> bool:
    """Whether this thread is within a call that is already noted in the active record."""
    return _active is not None and _active.log.inside()


class entered:
    """Within the block, on this thread, calls belong to one that is already noted in the record
    that is active where the block begins."""

    __slots__ = ("_log",)

    def __enter__(self) -> None:
        self._log = None if _active is None else _active.log
        if self._log is not None:
            self._log.shift(1)

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.shift(-1)


def active() -> FlightRecord | None:
    """The record that this process writes now."""
    return _active


# Which argument has the tensor that all ranks give alike ("": there is none), and whether its size
# is the same on every rank.
COLLECTIVES = {
    "all_reduce": ("tensor", True),
    "broadcast": ("tensor", True),
    "reduce": ("tensor", True),
    "all_gather": ("tensor", False),
    "all_gather_into_tensor": ("input_tensor", True),
    "reduce_scatter": ("output", False),
    "reduce_scatter_tensor": ("output", True),
    "all_to_all": ("", False),
    "all_to_all_single": ("input", False),
    "gather": ("tensor", True),
    "scatter": ("tensor", True),
    "barrier": ("", False),
    "all_gather_object": ("", False),
    "broadcast_object_list": ("", False),
    "gather_object": ("", False),
    "scatter_object_list": ("", False),
}
MESSAGES = {"send": "dst", "recv": "src"}


@contextlib.contextmanager
def recording(
    folder: str | Path, *, rank: int | None = None, size: int | None = None, entries: int = ENTRIES
) -> Iterator[FlightRecord]:
    """Within the block, the collectives of pyops and of torch.distributed are noted in
    `folder`/rankR.flight.

    What torch's own wrappers do in C++ is not seen: the reductions of DistributedDataParallel and
    of DTensor.

    Args:
        folder: For all ranks.
        rank, size: By default those of torch.distributed.
        entries: How many calls are kept.

    Raises:
        RuntimeError: There is a record already.
        ValueError: See `FlightRecord`.
    """
    global _active
    if _active is not None:
        raise RuntimeError(f"{_active.path} is being written already; end that record first")
    joined = dist.is_initialized()
    own = rank if rank is not None else dist.get_rank() if joined else 0
    all_ranks = size if size is not None else dist.get_world_size() if joined else 1
    record = FlightRecord(folder, rank=own, size=all_ranks, entries=entries)
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, *MESSAGES)}
    for name, function in before.items():
        setattr(dist, name, _noted(name, function))
    _active = record
    failed = True
    try:
        yield record
        failed = False
    finally:
        _active = None
        for name, function in before.items():
            setattr(dist, name, function)
        record.close(failed=failed)


# Names and ranks of groups, which are not kept alive by this.
_names: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _named(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
    found = _names.get(group)
    if found is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        found = _names[group] = (str(group.group_name), ranks)
    return found


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_in(
    group: dist.ProcessGroup, op: str, *, dtype: torch.dtype | None, label: str = ""
) -> Kind:
    """As `FlightRecord.kind` of the active record.

    Args:
        group: The ranks.
        op: The operation.
        dtype: Of the tensor that all ranks give alike; None where they may differ.
        label: What it is for.
    """
    assert _active is not None
    named = "" if dtype is None else _dtype_name(dtype)
    return _active.kind(op, group=_named(group), dtype=named, label=label)


def begin_in(
    group: dist.ProcessGroup,
    op: str,
    *,
    tensor: Tensor | None,
    frame: FrameType,
    peer: int = -1,
    label: str = "",
) -> int:
    """As `FlightRecord.begin` of the active record.

    Args:
        group: The ranks.
        op: The operation.
        tensor: That all ranks give alike; None where they may differ.
        frame: Of the call.
        peer: The other rank of a message, counted within the group; -1: all.
        label: What it is for.
    """
    assert _active is not None
    name = _named(group)
    return _active.begin(
        op,
        group=name,
        nbytes=0 if tensor is None else tensor.nbytes,
        dtype="" if tensor is None else _dtype_name(tensor.dtype),
        peer=peer if peer < 0 else name[1][peer],
        label=label,
        frame=frame,
    )


def _argument(names: list[str], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else None


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, noted in the active record."""
    names = list(inspect.signature(function).parameters)
    of_tensor, same_size = COLLECTIVES.get(name, ("tensor", False))
    to_whom = MESSAGES.get(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        record = _active
        if record is None or inside() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        group = _argument(names, "group", args, kwargs) or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return function(*args, **kwargs)
        peer = -1
        if to_whom is not None:
            given = _argument(names, to_whom, args, kwargs)
            within = _argument(names, f"group_{to_whom}", args, kwargs)
            if given is None and within is None:
                return function(*args, **kwargs)  # from anyone
            peer = within if given is None else dist.get_group_rank(group, given)
        tensor = _argument(names, of_tensor, args, kwargs) if of_tensor else None
        told = tensor if same_size or to_whom else None
        index = begin_in(group, name, tensor=told, frame=sys._getframe(1), peer=peer)
        return run_noted(record, index, lambda: function(*args, **kwargs), tensor)

    return call


@contextlib.contextmanager
def message(group: dist.ProcessGroup, op: str, *, peer: int, label: str = "") -> Iterator[None]:
    """Note that the program waits for a rank within the block, where a record is written.

    Args:
        group: The ranks.
        op: What it waits in: "receive".
        peer: The other rank, counted within the group.
        label: What the message is.
    """
    record = _active
    if record is None or inside():
        yield
        return
    frame = sys._getframe(2)
    index = begin_in(group, op, tensor=None, frame=frame, peer=peer, label=label)
    failed = True
    try:
        with waiting(record):
            yield
        failed = False
    finally:
        record.finish(index, failed=failed)


class waiting:
    """Within the block, this thread waits in a call that is noted: what it calls is not noted by
    itself, and where it is the program's own thread, its time counts as waited.

    Args:
        record: Where the call is noted; None: nowhere, and the block is like any other.
    """

    __slots__ = ("_begun", "_record")

    def __init__(self, record: FlightRecord | None) -> None:
        self._record, self._begun = record, -1.0

    def __enter__(self) -> None:
        if self._record is not None:
            self._begun = self._record.log.enter()

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            self._record.log.leave(self._begun)


def run_noted(
    record: FlightRecord, index: int, call: Callable[[], Any], tensor: Tensor | None
) -> Any:
    """Run a call that was begun, and note its end: of a Work, when that is done; of a tensor on a
    GPU, when the stream has come so far.

    Args:
        record: Where it was begun.
        index: What `begin` returned.
        call: What to run; what it calls is not noted by itself.
        tensor: Whose device counts.
    """
    try:
        found = record.run(0, call)  # which notes no end: it may be later
    except BaseException:
        record.finish(index, failed=True)
        raise
    if hasattr(found, "is_completed"):
        record.finish_later(index, found.is_completed)
    elif isinstance(tensor, Tensor) and tensor.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            record.finish(index)
        else:
            event = torch.cuda.current_stream(tensor.device).record_event()
            record.finish_later(index, event.query)
    else:
        record.finish(index)
    return found
