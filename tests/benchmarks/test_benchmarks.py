"""The harness: a wrong result is never timed, rows can be read back, tables come from rows."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks.instruments import harness, machine, report
from benchmarks.links import bench_slow_link, slow_link_picture
from benchmarks.ops.optimizers import bench_optim
from pyops import optim

pytestmark = pytest.mark.cpu_only


def case(**changes):
    counts = {"ours": 0, "theirs": 0}

    def count(name):
        counts[name] += 1

    settings = {
        "bench": "demo",
        "name": "a case",
        "implementations": {"pyops": lambda: count("ours"), "rival": lambda: count("theirs")},
        "check": lambda: 0.25,
        "bytes_moved": 1000,
        "targets": {"rival": 1e-9},
    }
    return harness.Case(**{**settings, **changes}), counts


def test_a_row_has_what_a_table_needs():
    made, counts = case()
    row = harness.measure(made, rounds=3, sample_seconds=1e-5)
    assert counts["ours"] > 3
    assert counts["theirs"] > 3
    low, middle, high = row["us"]["pyops"]
    assert 0 < low <= middle <= high
    assert row["max_error"] == 0.25
    assert math.isclose(row["gb_per_s"], 1000 / middle / 1000, rel_tol=0.1)
    assert row["speedup"]["rival"] > 0
    assert json.loads(json.dumps(row)) == row
    assert "a case" in harness.format_row(row)
    assert "meets" in harness.format_row(row)
    without_times = row | {"us": {}, "speedup": {}, "targets": {}}
    assert "a case" in harness.format_row(without_times)


def test_a_wrong_result_is_not_timed():
    def wrong():
        raise AssertionError("differs")

    made, counts = case(check=wrong)
    with pytest.raises(AssertionError, match="differs"):
        harness.measure(made, rounds=3)
    assert counts["ours"] == 0


def test_preparation_is_called_before_each_call_and_not_timed():
    order = []
    made, _ = case(
        implementations={"pyops": lambda: order.append("call")},
        prepare={"pyops": lambda: order.append("prepare")},
        targets={},
    )
    harness.measure(made, rounds=2, sample_seconds=1e-6)
    assert order[::2] == ["prepare"] * (len(order) // 2)
    assert order[1::2] == ["call"] * (len(order) // 2)


def test_ranks_wait_for_each_other_and_the_slowest_counts():
    class Slow(harness.Alone):
        barriers = 0

        def barrier(self):
            self.barriers += 1

        def agree(self, value):
            return 2

        def slowest(self, seconds):
            return 1.0

    ranks = Slow()
    row = harness.measure(case()[0], rounds=2, ranks=ranks)
    assert row["us"]["pyops"] == [1e6, 1e6, 1e6]
    assert ranks.barriers == 2 * (6 + 2)


def test_rows_are_appended_and_read_back(tmp_path):
    row = harness.measure(case()[0], rounds=2, sample_seconds=1e-6)
    path = harness.append_rows([row], folder=tmp_path)
    assert harness.append_rows([row], folder=tmp_path) == path
    assert report.read_rows(tmp_path) == [row, row]
    assert harness.append_rows([], folder=tmp_path) is None
    path.write_text(path.read_text() + "{half a row\n")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        report.read_rows(tmp_path)


def test_tables_hold_the_newest_row_between_the_markers():
    old = harness.measure(case()[0], rounds=2, sample_seconds=1e-6)
    new = {
        **old,
        "us": {"pyops": [1.0, 2.0, 3.0], "rival": [4.0, 5.0, 6.0]},
        "speedup": {"rival": 2.5},
    }
    text = (
        "before\n<!-- results:demo -->\nstale\n<!-- /results -->\nafter\n<!-- results:other "
        "-->\n<!-- /results -->\n"
    )
    filled = report.fill(text, [old, new])
    assert "| a case | 2 us |" in filled
    assert "2.50x" in filled
    assert "stale" not in filled
    assert filled.startswith("before\n")
    assert "(no rows yet)" in filled
    assert report.fill(filled, [old, new]) == filled


def test_names_of_machines_say_nothing_of_hosts():
    assert (
        machine.slug({"cpu": "Some(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "cores": 8})
        == "some-xeon-e5-2690-v4-8-cores"
    )
    described = machine.describe(torch.device("cpu"))
    assert set(described) == {"cpu", "cores", "threads"}
    assert machine.slug({**described, "gpu": "NVIDIA H200"}) == "nvidia-h200"


def test_an_unknown_bench_is_named(capsys):
    assert "optim" in entry.names()
    with pytest.raises(SystemExit):
        entry.main(["no_such_bench", "--no-save"])
    assert "no bench called no_such_bench" in capsys.readouterr().err


def test_every_case_of_the_optimizer_bench_checks(monkeypatch):
    """Sizes made small: the checks themselves must pass, and see a step that does nothing."""
    monkeypatch.setattr(bench_optim, "MI", 64)
    monkeypatch.setattr(bench_optim, "KI", 2)
    monkeypatch.setattr(bench_optim, "MANY", 12)
    monkeypatch.setattr(bench_optim, "SOME", 12)
    made = [make() for _, make in bench_optim.cases(torch.device("cpu"))]
    assert len(made) >= 7
    for each in made:
        assert each.check() is not None
    for kind in ("AdamW", "SGD", "Lion", "Adagrad"):
        monkeypatch.setattr(getattr(optim, kind), "_launch", lambda *_: None)
    for each in made:
        with pytest.raises(AssertionError):
            each.check()


def slow_link_row(way, *, seconds, sent):
    found = {
        way: {"seconds": seconds, "sent": sent},
        bench_slow_link.BASELINE: {"seconds": [1.0, 2.0, 3.0], "sent": [6e6] * 3},
    }
    return bench_slow_link._row(
        f"loss, {way}", way, found, rival=bench_slow_link.BASELINE, ranks=2, mbit=100, target=10.0
    )


def test_a_row_of_the_slow_link():
    row = slow_link_row("OneBitAdam", seconds=[0.25, 0.2, 0.1], sent=[2e5, 2e5, 2e5])
    assert row["us"]["OneBitAdam"] == [1e5, 2e5, 2.5e5]
    assert row["speedup"] == {bench_slow_link.BASELINE: 10.0}
    assert (row["wire_bytes"], row["wire_ratio"], row["wire_target"]) == (200_000, 30.0, 30.0)
    assert "| 0.2 | 30.0x (aim 30x) | 10.00x (aim 10x) |" in report.table([row])
    alone = slow_link_row(bench_slow_link.BASELINE, seconds=[1.0, 2.0, 3.0], sent=[6e6] * 3)
    assert alone["speedup"] == {}
    assert "wire_ratio" not in alone


@pytest.mark.full
def test_the_picture_has_a_line_for_each_run(tmp_path):
    rows = [
        slow_link_row(way, seconds=[3.0], sent=[1])
        | {"curve": [[1, 3.0], [2, 2.5], [3, 2.0]], "validation_loss": 2.0}
        for way in ("OneBitAdam", bench_slow_link.BASELINE)
    ]
    slow_link_picture.draw(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert slow_link_picture.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert slow_link_picture.smooth([1.0, 3.0])[1] == pytest.approx(
        (0.9 * 0.1 * 1 + 0.1 * 3) / 0.19
    )


def test_a_wrong_case_costs_no_other(tmp_path, monkeypatch, capsys):
    def wrong():
        raise AssertionError("differs")

    monkeypatch.setenv("PYOPS_BENCH_ROWS", str(tmp_path / "rows.jsonl"))
    cases = [case(name="one")[0], case(name="two", check=wrong)[0], case(name="three")[0]]
    with pytest.raises(
        harness.FailedCases, match="1 cases failed, 2 did not: AssertionError: differs"
    ) as error:
        harness.run_cases(cases, rounds=1, sample_seconds=1e-6)
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (
        [row["case"] for row in kept]
        == [row["case"] for row in error.value.rows]
        == ["one", "three"]
    )
    assert "FAILED AssertionError: differs" in capsys.readouterr().out


def test_a_bench_with_a_wrong_case_ends_with_another_status(monkeypatch, capsys):
    rows = [harness.measure(case()[0], rounds=1, sample_seconds=1e-6)]

    def run(options):
        raise harness.FailedCases(rows, ["AssertionError: differs"])

    monkeypatch.setattr(bench_optim, "run", run)
    assert entry.main(["optim", "--no-save", "--device", "cpu"]) == 1
    assert "optim: 1 cases failed, 1 did not: AssertionError: differs" in capsys.readouterr().out


def test_the_script_leaves_the_clocks_alone():
    """ncu locks them unless it is told not to, and they are the machine's."""
    script = (report.ROOT / "benchmarks" / "gpu.sh").read_text()
    calls = re.findall(r"^ *ncu (?!--version).*", script, re.MULTILINE)
    assert calls
    assert all("--clock-control none" in call for call in calls), calls
    assert not re.search(r"nvidia-smi.*(-lgc|-lmc|-ac|-pl|-pm|--lock|--power-limit)", script)
