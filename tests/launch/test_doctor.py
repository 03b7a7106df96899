"""`pyops doctor` names each planted fault, with the rank and its host, and nothing where all is
well."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pyops.cli.commands import main
from pyops.launch.doctor import CHECKS, Report, diagnosed, examine
from pyops.launch.facts import Facts

pytestmark = pytest.mark.cpu_only

MIB = float(1 << 20)
VERSIONS = {"torch": "2.13.0", "NCCL": "2.27.3", "NVIDIA driver": "570.1", "pyops": "0.1.0"}


def well() -> list[Facts]:
    """Two hosts of two ranks, without a fault."""
    return [
        Facts(
            rank,
            host=f"node{rank // 2}",
            local_rank=rank % 2,
            launcher="torchrun",
            versions=VERSIONS,
            variables={"NCCL_SOCKET_IFNAME": "eth0"},
            devices=2,
            device=f"GPU-{rank}",
            clock=0.01 * rank,
            address=f"10.0.0.{rank // 2 + 1}",
            cores=16,
            threads=8,
            seconds=0.002 if rank % 2 else 0.01,
        )
        for rank in range(4)
    ]


def test_nothing_is_found_where_all_is_well():
    assert diagnosed(well()) == []
    assert diagnosed([Facts(0)]) == []
    assert "nothing was found" in Report(tuple(well()), ()).text()


FAULTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "versions": (3, {"versions": {**VERSIONS, "NCCL": "2.26"}}, "NCCL is 2.27.3 on 3 of 4 ranks"),
    "variables": (1, {"variables": {}}, "NCCL_SOCKET_IFNAME is eth0 on 3 of 4 ranks, but none on"),
    "clock": (2, {"clock": -90.0}, "-90.0 s from the others; start chrony"),
    "interface": (2, {"address": "127.0.1.1"}, "127.0.1.1, which is this host itself"),
    "another network": (3, {"address": "192.168.0.7"}, "another network than most, 10.0.0"),
    "no route": (3, {"address": ""}, "no route"),
    "folder": (3, {"sees_folder": False}, "did not see in runs what rank 0 wrote"),
    "shared memory": (1, {"shared_free": 64 * MIB}, "0.0625 GiB free.*--shm-size"),
    "disk": (0, {"disk_free": 100 * MIB}, "runs has 0.0977 GiB free"),
    "memory": (2, {"memory_free": 10 * MIB}, "the host's memory"),
    "open files": (2, {"open_files": 256.0}, "256 files"),
    "local ranks": (3, {"local_rank": 0}, "ranks 2, 3 all are local rank 0 of node1"),
    "device": (3, {"device": "GPU-2"}, "ranks 2, 3 share the device GPU-2 of node1"),
    "no device": (1, {"device": ""}, "found no GPU for themselves.*node0"),
    "threads": (3, {"threads": 64}, "72 threads for 16 cores; set OMP_NUM_THREADS to 8"),
    "link": (3, {"seconds": 0.2}, "from rank 2 .* to rank 3 .node1. took 200 ms"),
    "link between hosts": (2, {"seconds": 0.2}, "from rank 1 .node0. to rank 2 .node1."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    rank, planted, said = FAULTS[fault]
    facts = well()
    facts[rank] = dataclasses.replace(facts[rank], **planted)
    found = diagnosed(facts)
    assert len(found) == 1
    assert rank in found[0].ranks
    assert re.search(said, found[0].text), found[0].text
    text = Report(tuple(facts), tuple(found)).text()
    assert f"* {rank}" in text
    assert "nothing was found" not in text


def test_faults_do_not_hide_each_other():
    facts = well()
    for rank, planted, _ in FAULTS.values():
        facts[rank] = dataclasses.replace(facts[rank], **planted)
    assert len(diagnosed(facts)) > len(CHECKS)


def test_the_first_is_usual_where_two_halves_differ():
    facts = well()
    for rank in (2, 3):
        facts[rank] = dataclasses.replace(facts[rank], versions={**VERSIONS, "torch": "2.12"})
    assert diagnosed(facts)[0].ranks == (2, 3)


def _examine(rank: int, group: Any, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    if rank == 1:  # another folder, as a local disk has it, and another variable
        os.environ["NCCL_IB_DISABLE"] = "1"
        folder = folder / "local"
    try:
        return [(each.what, each.ranks) for each in examine(folder).findings]
    finally:
        os.environ.pop("NCCL_IB_DISABLE", None)


def test_ranks_that_run_find_what_is_planted(world, tmp_path):
    first, second = world(2).run(_examine, tmp_path)
    assert first == second
    assert {("variables", (1,)), ("folder", (1,))} <= set(first)
    # The ranks of tests have no LOCAL_RANK, and the host is busy.
    assert {what for what, _ in first} <= {"variables", "folder", "local ranks", "link", "threads"}
    assert not list(tmp_path.rglob(".doctor*"))


def test_a_process_alone_is_examined(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pyops.launch.doctor.MIN_DISK", 0.0)
    main(["doctor", "--folder", str(tmp_path / "runs")])
    assert "1 rank(s), started by: alone" in capsys.readouterr().out
    file = tmp_path / "file"
    file.write_text("")
    assert main(["doctor", "--folder", str(file)]) == 2
    assert "can't be written by rank 0" in capsys.readouterr().out
