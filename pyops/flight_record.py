"""A record of the last collectives of each rank, in a file that outlives the process.

    program     all_reduce #41   all_reduce #42 ...        what `begin` and `finish` note
                     |                |
    rank3.flight  [header | entry | entry | ... ]          memory-mapped: a killed process leaves it

An entry has the operation, its bytes and dtype, the group and the number of the call within the
group, the line of the user's program, when it began and when it ended. Nothing has to be written
when a rank fails: the kernel keeps what the process wrote to the mapping. `pyops.observe` reads the
files of all ranks and says who waits for whom.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "ENTRY",
    "FAILED",
    "FINISHED",
    "HEADER_BYTES",
    "LIFE",
    "LIFE_AT",
    "RUNNING",
    "FlightRecord",
    "active",
    "begin_in",
    "entered",
    "inside",
    "message",
    "recording",
    "run_noted",
    "user_frame",
    "waiting",
]

ENTRY = struct.Struct("<QQddIiQB24s12s40s115s")
"""index, sequence, begun, ended, group, peer, bytes, state, operation, dtype, label, place"""
HEADER_BYTES = 4096
LIFE = struct.Struct("<Bd")
"""How the process stands (RUNNING, FINISHED, FAILED), and when it was last seen alive."""
LIFE_AT = HEADER_BYTES - LIFE.size
RUNNING, FINISHED, FAILED = 1, 2, 3
VERSION = 1
ENTRIES = 2048
LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(contextlib.__file__) + os.sep,  # Python's own library
    os.path.join(sys.prefix, "bin") + os.sep,
)
OWN = os.path.dirname(__file__) + os.sep
CARRIERS = tuple(OWN + name for name in ("comm", "flight_record", "failure", "mesh"))

_inside = threading.local()


def inside() -> bool:
    """Whether this thread is within a call that is already noted."""
    return getattr(_inside, "depth", 0) > 0


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Within the block, on this thread, calls belong to one that is already noted."""
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth -= 1


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, or else of the room of pyops that communicates;
    None outside of both.

    Args:
        frame: Where to begin; its callers are looked at.
    """
    own = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            if own is None and not name.startswith(CARRIERS):
                own = frame
        elif not name.startswith(LIBRARIES) and not name.startswith("<"):
            return frame
        frame = frame.f_back
    return own


class FlightRecord:
    """The record of one rank: `folder`/rankR.flight.

    Args:
        folder: Of the run; made where it is not there. All ranks write to it, on a disk that they
            share where one reader is to see them all.
        rank: Of this process.
        size: How many ranks there are.
        entries: How many calls are kept: the last ones.

    Attributes:
        waited: Seconds that the thread which made this spent within collectives so far.
        thread: The number of that thread.
        on_wait: Called with True where that thread begins to wait, and with False where it ends.
        oldest: When the oldest call that has not ended began, by time.monotonic; None: there is
            none.

    Raises:
        ValueError: `rank` is not below `size`, or `entries` is less than 1.
    """

    def __init__(self, folder: str | Path, *, rank: int, size: int, entries: int = ENTRIES) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; give one of 0 to {size - 1}")
        if entries < 1:
            raise ValueError(f"entries is {entries}; give 1 or more")
        self.folder, self.rank, self.size = Path(folder), rank, size
        self.path = self.folder / f"rank{rank}.flight"
        self.waited, self.thread = 0.0, threading.get_ident()
        self.on_wait: Callable[[bool], None] | None = None
        self._entries, self._index = entries, 0
        self._lock = threading.Lock()
        self._groups: dict[Any, int] = {}
        self._sequences: dict[tuple[int, str, int], int] = {}
        self._places: dict[tuple[CodeType, int], bytes] = {}
        self._begun: dict[int, float] = {}
        self._later: deque[tuple[int, Callable[[], bool]]] = deque()
        self._clock = time.time() - time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        length = HEADER_BYTES + entries * ENTRY.size
        with open(self.path, "w+b") as file:
            file.truncate(length)
            self._map = mmap.mmap(file.fileno(), length)
        header = {
            "version": VERSION,
            "entries": entries,
            "rank": rank,
            "size": size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "program": sys.argv[0] if sys.argv else "",
            "started": time.time(),
        }
        text = json.dumps(header).encode()[: LIFE_AT - 1]
        self._map[: len(text)] = text
        self._groups_path = self.folder / f"rank{rank}.groups"
        self._groups_path.write_text("")
        self.alive()

    @property
    def oldest(self) -> float | None:
        """See the class."""
        self._look()
        with self._lock:
            return min(self._begun.values(), default=None)

    def alive(self) -> None:
        """Note that the process lives."""
        LIFE.pack_into(self._map, LIFE_AT, RUNNING, time.time())

    def begin(
        self,
        op: str,
        *,
        group: tuple[str, Sequence[int]],
        nbytes: int = 0,
        dtype: str = "",
        peer: int = -1,
        label: str = "",
        frame: FrameType | None = None,
    ) -> int:
        """Note that a call begins.

        Args:
            op: The operation: "all_reduce".
            group: The group's name, the same on its ranks, and its ranks.
            nbytes: Of the tensor that all ranks give alike; 0 where ranks may differ.
            dtype: Of it; "" where ranks may differ.
            peer: The other rank of a message, counted among all; -1: all ranks of the group.
            label: What the call is for: the bucket.
            frame: Of the call; the user's line is looked for from there.

        Returns:
            The number of the call, for `finish`.
        """
        now = time.monotonic()
        place = self._place(frame or sys._getframe(1))
        if self._later:
            self._look()
        with self._lock:
            number = self._groups.get(group[0])
            if number is None:
                number = self._new_group(group)
            key = (number, op if peer >= 0 else "", peer)
            sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
            self._index += 1
            index = self._index
            self._begun[index] = now
        ENTRY.pack_into(
            self._map,
            self._offset(index),
            index,
            sequence,
            now + self._clock,
            0.0,
            number,
            peer,
            nbytes,
            RUNNING,
            op.encode()[:24],
            dtype.encode()[:12],
            label.encode()[:40],
            place,
        )
        return index

    def finish(self, index: int, *, failed: bool = False) -> None:
        """Note that a call has ended.

        Args:
            index: What `begin` returned.
            failed: Whether it raised.
        """
        now = time.monotonic()
        with self._lock:
            begun = self._begun.pop(index, None)
            if begun is None or self._index - index >= self._entries:
                return  # ended before, or its place is that of a later call
        offset = self._offset(index)
        struct.pack_into("<d", self._map, offset + 24, now + self._clock)
        self._map[offset + 48] = FAILED if failed else FINISHED

    def finish_later(self, index: int, is_done: Callable[[], bool]) -> None:
        """A call that goes on beside the program: it has ended when `is_done()` is true, which is
        asked at later calls and by whoever asks for `oldest`."""
        with self._lock:
            self._later.append((index, is_done))

    def close(self, *, failed: bool = False) -> None:
        """The program has come to its end.

        Args:
            failed: With an error.
        """
        self._look()
        LIFE.pack_into(self._map, LIFE_AT, FAILED if failed else FINISHED, time.time())
        self._map.flush()

    def flush(self) -> None:
        """Hand the file to the disk, for readers on other hosts."""
        self._map.flush()

    def _offset(self, index: int) -> int:
        return HEADER_BYTES + (index - 1) % self._entries * ENTRY.size

    def _place(self, frame: FrameType) -> bytes:
        found = user_frame(frame)
        if found is None:
            return b"?"
        key = found.f_code, found.f_lineno
        if (place := self._places.get(key)) is None:
            path = Path(found.f_code.co_filename)
            name = "/".join(path.parts[-3:])
            text = f"{name}:{found.f_lineno} {found.f_code.co_name}"
            place = self._places[key] = text.encode()[-115:]
        return place

    def _new_group(self, group: tuple[str, Sequence[int]]) -> int:
        number = self._groups[group[0]] = len(self._groups)
        with open(self._groups_path, "a") as file:
            file.write(json.dumps({"name": group[0], "ranks": list(group[1])}) + "\n")
        return number

    def _look(self) -> None:
        """Note the ends of calls that went on beside the program."""
        with self._lock:
            waiting, self._later = self._later, deque()
        for index, is_done in waiting:
            if is_done():
                self.finish(index)
            else:
                with self._lock:
                    self._later.append((index, is_done))


_active: FlightRecord | None = None


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
        nbytes=0 if tensor is None else tensor.numel() * tensor.element_size(),
        dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
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
        with entered(), waiting(record):
            yield
        failed = False
    finally:
        record.finish(index, failed=failed)


@contextlib.contextmanager
def waiting(record: FlightRecord | None) -> Iterator[None]:
    """Count the time of the block as waited, where it is the program's own thread that waits."""
    if record is None or threading.get_ident() != record.thread:
        yield
        return
    begun = time.monotonic()
    if record.on_wait is not None:
        record.on_wait(True)
    try:
        yield
    finally:
        record.waited += time.monotonic() - begun
        if record.on_wait is not None:
            record.on_wait(False)


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
        with entered(), waiting(record):
            found = call()
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
