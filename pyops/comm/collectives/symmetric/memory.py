"""Collectives over symmetric memory: the GPUs of one node read and write each other's memory in a
kernel, through torch.distributed's symmetric memory.

    allocate -- all ranks say so -- rendezvous, once for each buffer -- all ranks say so

Sums are in rank order, fp32 inside, rounded once: the bits of two_shot. A tensor that lies in a
buffer of `symmetric_empty` is reduced in place; any other goes through a workspace. Where any rank
has no symmetric memory, all ranks take the backend's own collectives, and rank 0 says so once.

Who waits in a kernel for a rank that does not come gives up after the group's timeout: the result
is nan, and the next call on this group raises and names that rank.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import scale_in_place
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.symmetric.buffer import SymmetricBuffer
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.mesh import ProcessGroupLike
from pyops.ops.communication.symmetric import (
    MAX_CTAS,
    MAX_RANKS,
    PAD_WORDS,
    Peers,
    symmetric_sum_,
)
from pyops.ops.library import has_kernel
from pyops.torch_private import (
    group_store,
    symmetric_empty_tensor,
    symmetric_remote,
    symmetric_rendezvous,
)

__all__ = ["SymmetricMemory", "Unavailable", "memory_of", "symmetric_empty"]

WORKSPACE_BYTES = 16 << 20  # of each rank, for tensors that lie elsewhere
ONE_SHOT_BYTES = 256 << 10  # up to here every rank reads all of every rank's, in one round
LINE = 64  # elements: parts begin at multiples of it, so that no rank's accesses are out of line
PIECE = 2048  # elements of a CTA's turn: csrc/cuda/communication/symmetric_kernel.cuh
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Unavailable(Exception):
    """The ranks have no symmetric memory; the text says which rank, and why."""


class SymmetricMemory:
    """One rank's end, for tensors on one device. `memory_of` makes it; its methods are collectives.

    Every buffer is held until it is freed, by all ranks: a peer may be reading it.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """Raises Unavailable, on every rank alike."""
        self.comm, self.device = comm, device
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.timeout(device)
        self._store = group_store(comm.group)
        # Notes of a communicator that was released before stay in the store.
        self._life = self._store.add(f"pyops/symmetric/lives of {self.rank}", 1)
        self._told = 0
        self._last: Any = None
        self.buffers: list[SymmetricBuffer] = []
        self._refuse(self.tell(f"{device.type}|{_problem(device, comm.size)}"), of_device=True)
        pads = self.allocate(PAD_WORDS, torch.int64)
        pads.tensor.zero_()
        self.synchronize()
        self._refuse(self.tell(""))  # zeros before anybody comes
        failure = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.peers = Peers(pads.ranks, failure, self.rank, self.timeout)
        self.workspace = self.allocate(WORKSPACE_BYTES, torch.uint8)

    def tell(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Collective."""
        self._told += 1
        keys = [f"pyops/symmetric/{self._life}/{self._told}/{r}" for r in range(self.size)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            silent = [r for r, key in enumerate(keys) if not self._store.check([key])]
            raise CommunicationError(
                f"rank {self.rank}: ranks {silent} did not come to agree on symmetric memory "
                f"within the group's timeout of {self.timeout:g} s",
                ranks=silent,
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def _refuse(self, texts: list[str], *, of_device: bool = False) -> None:
        if of_device:
            kinds = [text.partition("|")[0] for text in texts]
            if other := [r for r, kind in enumerate(kinds) if kind != kinds[self.rank]]:
                raise DisagreementError(
                    f"rank {self.rank} called it for a tensor on {kinds[self.rank]}, rank "
                    f"{other[0]} for one on {kinds[other[0]]}",
                    ranks=other,
                )
            texts = [text.partition("|")[2] for text in texts]
        if problem := next((f"rank {r}: {text}" for r, text in enumerate(texts) if text), ""):
            raise Unavailable(problem)

    def allocate(self, numel: int, dtype: torch.dtype) -> SymmetricBuffer:
        """A buffer that all ranks see. Raises Unavailable, on every rank alike."""
        found = SymmetricBuffer(torch.empty(0), communicator=self.comm, memory=self)
        problem = ""
        try:
            found.tensor = symmetric_empty_tensor(numel, dtype=dtype, device=self.device)
        except (RuntimeError, ImportError) as error:
            problem = _first_line(error)
        self._refuse(self.tell(problem))  # nobody waits in the rendezvous for one that has none
        try:
            handle = symmetric_rendezvous(found.tensor, self.comm.group)
            found.ranks = [
                found.tensor if r == self.rank else symmetric_remote(handle, r, found.tensor)
                for r in range(self.size)
            ]
            found.multicast = bool(handle.multicast_ptr)
            if (
                symmetric_remote(handle, self.rank, found.tensor).data_ptr()
                != found.tensor.data_ptr()
            ):
                problem = "torch's symmetric memory shows another place than it allocated"
        except RuntimeError as error:
            problem = _first_line(error)
        told = self.tell(problem or f"|{found.multicast}")
        self._refuse([text if not text.startswith("|") else "" for text in told])
        found.multicast = all(text == "|True" for text in told)
        self.buffers.append(found)
        return found

    def close(self) -> None:
        """Let go of all buffers, when this rank's kernels have ended: then no peer reads them any
        more. Not a collective."""
        self.synchronize()
        for buffer in self.buffers:
            buffer.freed, buffer.ranks = True, []
        self.buffers.clear()

    def check(self) -> None:
        """CommunicationError, once a rank was lost in a kernel that has run so far."""
        lost = int(self.peers.failure.item()) - 1
        if lost < 0:
            return
        late = f"within the group's timeout of {self.timeout:g} s"
        raise CommunicationError(
            "the others gave up, because this rank did not come to a sum over symmetric memory "
            f"{late}"
            if lost == self.rank
            else f"rank {self.rank}: rank {lost} died or stalled: it did not come to a sum over "
            f"symmetric memory {late}; start the ranks anew, or make new groups",
            ranks=[lost],
        )

    def buffer_of(self, flat: Tensor) -> tuple[SymmetricBuffer, int] | None:
        """The buffer in which a tensor lies, and where."""
        for buffer in self.buffers:
            start = flat.data_ptr() - buffer.tensor.data_ptr()
            whole = buffer.tensor
            inside = 0 <= start <= (whole.numel() - flat.numel()) * whole.element_size()
            if inside and whole.dtype == flat.dtype:
                return buffer, start // flat.element_size()
        return None

    # --- sums
    # ----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, *, scale: float = 1.0) -> None:
        """flat = scale * (sum over ranks in rank order), in place."""
        if (found := self.buffer_of(flat)) is not None:
            buffer, start = found
            self.two_shot(buffer, buffer, scale, start=start, stop=start + flat.numel())
            return
        for piece in flat.split(WORKSPACE_BYTES // flat.element_size()) if flat.numel() else ():
            nbytes = piece.numel() * piece.element_size()
            ranks = [r[:nbytes].view(piece.dtype) for r in self.workspace.ranks]
            mine = ranks[self.rank]
            self._in_order()
            mine.copy_(piece)
            if nbytes <= ONE_SHOT_BYTES:
                self._sum(piece, [piece], ranks, most=piece.numel(), scale=scale)
            else:
                view = SymmetricBuffer(mine, ranks, self.comm)
                self.two_shot(view, view, scale)
                piece.copy_(mine)
                self._use(self.workspace)  # the next copy comes after this one

    def two_shot(
        self,
        buffer: SymmetricBuffer,
        out: SymmetricBuffer,
        scale: float,
        *,
        start: int = 0,
        stop: int | None = None,
        norm: Tensor | None = None,
    ) -> Tensor:
        """out[start:stop] = scale * (sum of buffer[start:stop] over ranks), on every rank."""
        stop = buffer.tensor.numel() if stop is None else stop
        each = -(-(stop - start) // self.size)
        each = -(-each // LINE) * LINE
        a, b = (min(stop, start + each * r) for r in (self.rank, self.rank + 1))
        whole = out.tensor[start:stop]
        rows, outs = [r[a:b] for r in buffer.ranks], [r[a:b] for r in out.ranks]
        self._sum(whole, outs, rows, most=each, scale=scale, norm=norm)
        for used in (buffer, out):
            self._use(used)
        return whole

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, starts: list[int], scale: float = 1.0
    ) -> None:
        """out = scale * (sum over ranks of flat[starts[rank]:starts[rank + 1]])."""
        if (found := self.buffer_of(flat)) is not None:
            self.scatter(found[0], flat, out, starts=starts, scale=scale, start=found[1])
            return
        parts = [flat[a:b] for a, b in itertools.pairwise(starts)]
        room = WORKSPACE_BYTES // self.size // flat.element_size() // LINE * LINE
        longest = max(len(part) for part in parts)
        for done in range(0, longest, room):
            ranks = [r.view(flat.dtype) for r in self.workspace.ranks]
            self._in_order()
            for r, part in enumerate(parts):
                piece = part[done : done + room]
                ranks[self.rank][r * room : r * room + len(piece)].copy_(piece)
            to, at = out[done : done + room], self.rank * room
            rows = [r[at : at + len(to)] for r in ranks]
            self._sum(to, [to], rows, most=min(room, longest - done), scale=scale)

    def scatter(
        self,
        buffer: SymmetricBuffer,
        flat: Tensor,
        out: Tensor,
        *,
        starts: list[int],
        scale: float,
        start: int = 0,
        norm: Tensor | None = None,
    ) -> Tensor:
        """`reduce_scatter` of `flat`, which begins at `start` of the buffer."""
        a, b = (start + starts[r] for r in (self.rank, self.rank + 1))
        most = max(stop - begin for begin, stop in itertools.pairwise(starts))
        self._sum(out, [out], [r[a:b] for r in buffer.ranks], most=most, scale=scale, norm=norm)
        self._use(buffer)
        return out

    def multimem(self, buffer: SymmetricBuffer, scale: float) -> Tensor:
        """The sum by the switch, in place: torch's own kernel."""
        self.check()
        self._in_order()
        torch.ops.symm_mem.multimem_all_reduce_(buffer.tensor, "sum", self.comm.group.group_name)
        scale_in_place(buffer.tensor, scale=scale)
        self._use(buffer)
        return buffer.tensor

    def _sum(
        self,
        whole: Tensor,
        outs: list[Tensor],
        rows: list[Tensor],
        *,
        most: int,
        scale: float,
        norm: Tensor | None = None,
    ) -> None:
        def kernel(peers: Peers, ctas: int) -> None:
            symmetric_sum_(whole, outs, rows, peers, ctas=ctas, scale=scale, norm=norm)

        self.launch(kernel, most=most, uses=(self.workspace,))

    def launch(
        self,
        kernel: Callable[[Peers, int], None],
        *,
        most: int,
        uses: Sequence[SymmetricBuffer],
    ) -> None:
        """kernel(peers, CTAs) after those before it: they share the pads. Collective.

        Args:
            kernel: Waits for the ranks on the current stream.
            most: Elements of the longest part of any rank, from which all ranks take the same
                number of CTAs.
            uses: The buffers that it reads or writes.
        """
        self.check()
        self._in_order()
        kernel(self.peers, max(1, min(MAX_CTAS, -(-most // PIECE))))
        for buffer in uses:
            self._use(buffer)

    # --- streams
    # ----------------------------------------------------------------------------------------------

    def _in_order(self) -> None:
        """The current stream goes on after the last kernel that used the pads or the workspace,
        on whatever stream."""
        if self._last is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_event(self._last)

    def _use(self, buffer: SymmetricBuffer) -> None:
        """What the current stream has so far uses the buffer."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._last = buffer.used = torch.cuda.current_stream(self.device).record_event()

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _problem(device: torch.device, size: int) -> str:
    """Why this rank has no symmetric memory, as far as it can tell alone; "" where it may."""
    if device.type != "cuda":
        return "tensors on the CPU have no symmetric memory"
    if not has_kernel("symmetric_sum_", "cuda"):
        return "pyops was built without CUDA kernels"
    return "" if size <= MAX_RANKS else f"{size} ranks are more than {MAX_RANKS}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def memory_of(comm: Communicator, device: torch.device) -> SymmetricMemory | None:
    """The group's symmetric memory for tensors on `device`. Collective at the first call; None, on
    every rank alike, where any rank has none, which rank 0 then says in a warning."""
    if device not in comm.symmetric:
        try:
            comm.symmetric[device] = SymmetricMemory(comm, device)
        except Unavailable as reason:
            comm.symmetric[device] = None
            if comm.rank == 0:
                warnings.warn(
                    "algorithm='symmetric' does not work in this group, and all ranks take "
                    f"'native' instead, whose order of summation is the backend's: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
    found: SymmetricMemory | None = comm.symmetric[device]
    return found


def symmetric_empty(
    numel: int, *, dtype: torch.dtype, device: torch.device, group: ProcessGroupLike = None
) -> SymmetricBuffer:
    """A flat buffer, of as many elements on every rank, that all ranks of `group` see. Collective.
    `algorithm="symmetric"` reduces what lies in it in place.

    Args:
        numel: Elements.
        dtype: float32, bfloat16 or float16.
        device: This rank's GPU.
        group: The ranks; None for the default group.

    Returns:
        The buffer; one of ordinary memory, on every rank alike, where any rank has no symmetric
        memory.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if numel < 1:
        raise ValueError(f"numel is {numel}; give at least 1")
    comm = Communicator.of(group)
    memory = memory_of(comm, device) if comm.size > 1 else None
    if memory is not None:
        try:
            return memory.allocate(numel, dtype)
        except Unavailable as reason:
            raise torch.OutOfMemoryError(
                f"no symmetric buffer of {numel} elements of {dtype}: {reason}"
            ) from None
    return SymmetricBuffer(torch.empty(numel, dtype=dtype, device=device), communicator=comm)
