"""join: torchrun's variables under every launcher, and what it refuses."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta

import pytest

from pyops.launch.joining import join, launched, told_by_mpi
from pyops.launch.rendezvous import Rendezvous
from pyops.launchers import Launch, LaunchError, recognized
from tests.test_launchers import HYDRA, SRUN, TORCHRUN

pytestmark = pytest.mark.cpu_only


class World:
    """MPI's world as one rank sees it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.sent: list[object] = []

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def bcast(self, value, root):
        self.sent.append(value)
        return value if self._rank == root else ("node1", 5)


@pytest.fixture
def nowhere(monkeypatch):
    for name in [*TORCHRUN, *HYDRA, *SRUN]:
        monkeypatch.delenv(name, raising=False)


def test_a_process_alone_stays_alone(nowhere):
    assert join() == Launch("alone")


def test_the_variables_of_srun_become_torchruns():
    environment = dict(SRUN)
    found = launched(environment)
    assert (found.launcher, environment["RANK"], environment["MASTER_ADDR"]) == (
        "srun",
        "5",
        "gpu003",
    )
    # Whoever asks again gets the same ranks.
    assert launched(environment).rank == 5


def test_mpi_tells_where_ranks_of_several_hosts_meet():
    world = World(5, 8)
    assert told_by_mpi(recognized(HYDRA), world=lambda: (world, "MPICH")) == ("node1", 5)
    first = World(0, 8)
    found = told_by_mpi(recognized({**HYDRA, "PMI_RANK": "0"}), world=lambda: (first, "MPICH"))
    assert found is not None
    assert found[0] == socket.gethostname()
    assert first.sent == [found]
    assert told_by_mpi(recognized(HYDRA), world=lambda: None) is None


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (4, 8)])
def test_mpi4py_of_another_mpi_is_refused(rank, size):
    world = World(rank, size)
    with pytest.raises(
        LaunchError,
        match=rf"Hydra started .* rank 5 of 8, but mpi4py sees rank {rank} of {size}.*Open MPI v5",
    ):
        told_by_mpi(recognized(HYDRA), world=lambda: (world, "Open MPI v5"))
    assert not world.sent


def test_hosts_of_which_nobody_tells_are_refused(monkeypatch):
    monkeypatch.setattr("pyops.launch.joining._mpi_world", lambda: None)
    with pytest.raises(LaunchError, match=r"several hosts.*pip install mpi4py"):
        launched(dict(HYDRA))
    with pytest.raises(LaunchError, match=r"rank 1 of 2 has no host.*set MASTER_ADDR"):
        launched({"RANK": "1", "WORLD_SIZE": "2"})
    one_host = {**HYDRA, "MPI_LOCALNRANKS": "8"}
    assert launched(one_host).address == "127.0.0.1"


def _set(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_port_that_is_taken_and_one_that_nobody_has(monkeypatch, nowhere):
    with closing(socket.socket()) as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _set(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(LaunchError, match=rf"rank 0 .*port {port} .*another process has"):
            Rendezvous.of_environment(timeout=timedelta(seconds=2))
    _set(monkeypatch, RANK="1")
    with pytest.raises(LaunchError, match=rf"rank 1 did not reach 127.0.0.1:{port}.*within 1 s"):
        Rendezvous.of_environment(timeout=timedelta(seconds=1))
