"""The bench of pyops.parallel beside other libraries: teams of processes take turns, wrong losses
are not timed, and what is not installed is said."""

from __future__ import annotations

import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks.instruments import harness, report
from benchmarks.instruments.rank_teams import Team
from benchmarks.parallel.tensor import bench_parallelize, llama_teams
from tests.grids import full

pytestmark = pytest.mark.cpu_only

ALONE, DDP, OURS = bench_parallelize.ONE_PROCESS, "torch DDP", "pyops, ZeRO stage 0"


def options(**changes):
    return SimpleNamespace(**{"device": torch.device("cpu"), "rounds": 1, "only": None, **changes})


def test_it_is_one_of_the_benches():
    assert "parallelize" in entry.names()


def test_every_way_is_known_and_every_rival_is_beside_ours():
    rivals = {rival for each in bench_parallelize.STEPS.values() for rival in each}
    assert rivals | {bench_parallelize.ONE_PROCESS} == set(llama_teams.RIVALS)
    assert set(bench_parallelize.STEPS) <= set(llama_teams.OURS)
    assert set(bench_parallelize.COMPOSED) <= set(llama_teams.OURS)
    needed = {name for name in rivals if not name.startswith("torch")}
    assert {name.split()[0] for name in needed} == set(bench_parallelize.NEEDS)


def test_only_chooses_cases():
    def named(only):
        return [make.args for make, _ in bench_parallelize.cases(options(only=only))]

    assert len(named("step pyops, ZeRO")) == 4 + 1  # with the first step of stage 1
    assert len(named("composition")) == len(bench_parallelize.COMPOSED)
    assert named("nothing") == []


@pytest.mark.full  # three processes with torch and transformers
@pytest.mark.slow
def test_a_step_beside_another_becomes_a_row(monkeypatch):
    """Ours on two ranks, and plain transformers on one, which here is the rival too."""
    plain = llama_teams.one_process(llama_teams.SIZES["tiny"])["step"]
    losses = tuple(plain() for _ in range(llama_teams.CHECKED_STEPS))
    monkeypatch.setattr(bench_parallelize, "expected", lambda size: losses)
    monkeypatch.setattr(bench_parallelize, "STEPS", {OURS: (ALONE,)})
    with ExitStack() as stack:
        case = bench_parallelize.step_case(stack, OURS, "tiny")
        row = harness.measure(case, rounds=1, sample_seconds=1e-6)
    assert list(row["us"]) == [OURS, ALONE]
    assert row["max_error"] < 1e-6
    for imported, peak in row["rank_mib"].values():
        assert 100 < imported < peak
    assert row["libraries"].keys() == {"transformers"}
    found = report.table([row])
    assert re.search(r"\d+\.\d\dx, \d+\.\d\d to \d+\.\d\d \(aim 1x\)", found)
    assert re.search(rf"\| {OURS} \d+, {ALONE} \d+ \|", found)


def test_a_way_that_learns_otherwise_is_not_timed(monkeypatch):
    def called(name, what):
        return [[3.0, 2.5, 2.0], [3.0, 2.5, 2.2]] if name == DDP else [[3.0, 3.0, 3.0]]

    teams = SimpleNamespace(call=called)
    monkeypatch.setattr(bench_parallelize, "expected", lambda size: (3.0, 2.5, 2.1))
    assert bench_parallelize.agrees(teams, DDP, "tiny") == pytest.approx(0, abs=1e-9)
    with pytest.raises(AssertionError, match="the loss does not fall"):
        bench_parallelize.agrees(teams, "another", "tiny")
    monkeypatch.setattr(bench_parallelize, "expected", lambda size: (3.0, 2.5, 2.0))
    with pytest.raises(AssertionError, match="plain transformers' are"):
        bench_parallelize.agrees(teams, DDP, "tiny")
    assert bench_parallelize.losses_of([[None, None], [3.0, 2.0]]) == [3.0, 2.0]


def test_a_library_that_is_not_installed_is_left_out_and_said(monkeypatch, capsys):
    monkeypatch.setitem(bench_parallelize.NEEDS, "DeepSpeed", "no_such_package")
    monkeypatch.delenv("PYOPS_RIVALS_PYTHON", raising=False)
    assert not bench_parallelize.is_there("DeepSpeed ZeRO 1")
    assert "no_such_package is not installed; pip install" in capsys.readouterr().out
    assert bench_parallelize.is_there(DDP)
    assert bench_parallelize.version_of("no_such_package") is None


@pytest.mark.parametrize(
    ("module", "said"),
    [
        full("benchmarks.parallel.tensor.llama_teams", "nobody: rank 0: KeyError: 'nobody'"),
        ("no_such_module", r"(?s)nobody: rank 0 ended; printed was: .*no_such_module"),
    ],
)
def test_a_team_that_fails_says_which_rank_and_why(module, said):
    with (
        Team("nobody", ranks=1, size="tiny", module=module) as team,
        pytest.raises(RuntimeError, match=said),
    ):
        team.call("step")


def test_there_is_nothing_for_other_devices(capsys):
    assert bench_parallelize.run(options(device=torch.device("cuda"))) == []
    assert "nothing to time on another device" in capsys.readouterr().out
