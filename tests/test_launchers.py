"""Launchers are recognized by their variables alone; what contradicts is refused with both
values."""

from __future__ import annotations

import pytest

from pyops.launchers import (
    PORTS,
    Launch,
    LaunchError,
    first_host,
    recognized,
    started_together,
    tasks_per_node,
)

pytestmark = pytest.mark.cpu_only

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-10563@1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_JOB_ID": "31",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
AGENT = {**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("alone")),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node1", 29400)),
        (OPEN_MPI, Launch("Open MPI", 5, 8, 1, 4)),
        (HYDRA, Launch("Hydra", 5, 8, 1, 4)),
        (SRUN, Launch("srun", 5, 8, 1, 4, "gpu003", PORTS[0] + 31)),
        # Slurm's own PMI has PMI_RANK as well.
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("srun", 5, 8, 1, 4, "gpu003", 20031)),
        # The inner launcher counts: srun of torchrun's agents, of mpirun's daemons.
        ({**AGENT, **TORCHRUN}, Launch("torchrun", 5, 8, 1, 4, "node1", 29400)),
        ({**AGENT, **HYDRA}, Launch("Hydra", 5, 8, 1, 4)),
        # A script that hands srun's numbers on.
        (
            {**SRUN, "RANK": "5", "WORLD_SIZE": "8"},
            Launch("environment", 5, 8, 0, 0),
        ),
        ({"WORLD_SIZE": "1"}, Launch("alone")),
        ({"SLURM_JOB_ID": "31", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Launch("alone")),
    ],
)
def test_launchers_are_recognized(environment, expected):
    found = recognized(environment)
    port = found.port if expected.port is None else expected.port
    assert found == Launch(**{**vars(expected), "port": port})


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "RANK=0 is in the environment, but no WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 in the environment, but no RANK"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK=8, but WORLD_SIZE=8: ranks are 0 to 7"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' .* no whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4 .* contradict"),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
            "RANK and WORLD_SIZE say rank 0 of 1, but srun says rank 5 of 8; unset",
        ),
        (
            {**OPEN_MPI, "RANK": "4", "WORLD_SIZE": "8"},
            "say rank 4 of 8, but Open MPI says rank 5 of 8",
        ),
        ({**SRUN, "WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment, but srun started 8"),
        (
            {**OPEN_MPI, **HYDRA, "PMI_SIZE": "6"},
            "Open MPI says rank 5 of 8, but Hydra says rank 5 of 6",
        ),
        (
            {"SLURM_JOB_ID": "31", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            r"4 tasks \(SLURM_NTASKS\).*without srun.*write srun in front",
        ),
        ({**SRUN, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x'"),
    ],
)
def test_contradictions_are_refused_with_both_values(environment, said):
    with pytest.raises(LaunchError, match=said):
        recognized(environment)


def test_ranks_of_one_host_meet_there():
    one = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    found = recognized(one)
    assert found.address == "127.0.0.1"
    assert found.port is not None
    assert PORTS[0] <= found.port < sum(PORTS)
    assert recognized({**one, "PMIX_NAMESPACE": "another@1"}).port != found.port
    assert recognized({**one, "MASTER_PORT": "5000"}).port == 5000


def test_torchruns_variables_are_made_of_a_launch():
    assert recognized(SRUN).variables() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "20031",
    }
    assert recognized({}).variables() == {}
    # They are not taken for those of another launcher afterwards.
    again = recognized({**SRUN, **recognized(SRUN).variables()})
    assert (again.rank, again.size, again.local_rank) == (5, 8, 1)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[003-008,011],login1", "gpu003"),
        ("rack1-gpu[7,9]-ib,b", "rack1-gpu7-ib"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, host):
    assert first_host(nodes) == host


def test_tasks_of_slurms_nodes():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("") == tasks_per_node("x") == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("", 1)),
        ({"WORLD_SIZE": "4"}, ("WORLD_SIZE", 4)),
        (OPEN_MPI, ("OMPI_COMM_WORLD_SIZE", 8)),
        (HYDRA, ("PMI_SIZE", 8)),
        ({"PMI_SIZE": "8"}, ("", 1)),
        (SRUN, ("SLURM_STEP_NUM_TASKS", 8)),
        ({"WORLD_SIZE": "many"}, ("", 1)),
    ],
)
def test_ranks_that_were_started_together(environment, expected):
    assert started_together(environment) == expected
