"""`pyops simulate` prints a schedule's timeline and what it costs, and writes its picture and
trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyops.cli.commands import main
from pyops.pipeline import LayerCosts, Profile

pytestmark = pytest.mark.cpu_only


def test_a_schedule_is_shown(capsys):
    assert main(["simulate", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  0 | 0  1  .  .  0' 0' 2  1' 1' .  2' 2'",
        "  1 | .  0  0' 0' 1  1' 1' 2  2' 2' .  .",
        "1f1b, 2 ranks, 3 micro-batches: 12 long, 25.0% idle, 33.3% longer than without a bubble",
        "micro-batches kept, rank by rank: 2 1",
    ]


def test_options_and_files(capsys, tmp_path: Path):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    call = [
        "simulate",
        "interleaved",
        "--option",
        "v=2",
        "--latency",
        "0.1",
        "--draw",
        str(picture),
        "--trace",
        str(trace),
    ]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "micro-batches kept, rank by rank: 5.5 4.5 3.5 2.5" in out
    assert f"picture: {picture}" in out
    assert picture.stat().st_size > 1000
    assert trace.stat().st_size > 1000


def test_a_trace_needs_no_matplotlib(capsys, tmp_path: Path, monkeypatch):
    for name in (
        "matplotlib",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "matplotlib.patches",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    trace = tmp_path / "a.json"
    assert main(["simulate", "1f1b", "--trace", str(trace)]) == 0
    assert f"trace: {trace}" in capsys.readouterr().out
    written = trace.read_bytes()
    trace.unlink()
    assert main(["simulate", "1f1b", "--trace", str(trace), "--draw", str(tmp_path / "a.svg")]) == 2
    assert (
        "drawing a schedule needs matplotlib: pip install matplotlib, or pyops-train[train]"
        in capsys.readouterr().err
    )
    assert trace.read_bytes() == written, "what can be written is written"


def test_a_timeline_is_as_wide_as_the_terminal(capsys, monkeypatch):
    widths = []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["simulate", "1f1b", "--microbatches", "32"]) == 0
        widths.append(
            max(len(line) for line in capsys.readouterr().out.splitlines() if " | " in line)
        )
    assert 70 <= widths[0] <= 80
    assert 110 <= widths[1] <= 120


def test_a_profile_is_balanced_and_simulated(capsys, tmp_path: Path):
    layers = [
        LayerCosts(forward=f, backward=2 * f, kept=((i, 1 << 20),))
        for i, f in enumerate((2.0, 1, 1, 2))
    ]
    path = Profile(tuple(layers)).save(tmp_path / "p.json")
    assert (
        main(
            [
                "simulate",
                "1f1b",
                "--stages",
                "2",
                "--microbatches",
                "3",
                "--profile",
                str(path),
                "--latency",
                "0.5",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "1f1b, 2 ranks, 3 micro-batches: 38 long" in out
    assert "layers that stages begin with: 0 2" in out
    assert "MiB, rank by rank: 4.0 2.0" in out


def test_what_skips_stages_is_simulated(capsys, tmp_path: Path):
    layers = tuple(LayerCosts(forward=1, backward=2) for _ in range(3))
    path, slow = tmp_path / "p.json", tmp_path / "q.json"
    Profile(layers).save(path)
    Profile(layers, skips=((0, 2, 20),)).save(slow)
    lengths = []
    for file in (path, slow):
        assert (
            main(
                [
                    "simulate",
                    "gpipe",
                    "--stages",
                    "3",
                    "--microbatches",
                    "1",
                    "--profile",
                    str(file),
                    "--bandwidth",
                    "2",
                ]
            )
            == 0
        )
        lengths.append(capsys.readouterr().out)
    assert "1 micro-batches: 9 long" in lengths[0]
    assert "1 micro-batches: 26 long" in lengths[1]  # 1, there 10, 1 and 2, back 10, 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpip"], "there is no schedule 'gpip'; there are gpipe"),
        (["zbv", "--option", "v=3"], "zbv has no option 'v'; it has none"),
        (["gpipe", "--option", "v"], "--option v is no assignment"),
        (["gpipe", "--stages", "0"], "num_stages is 0"),
        (["gpipe", "--forward", "-1"], r"costs.forward of stage 0 is -1"),
        (["gpipe", "--profile", "none.json"], "none.json"),
        (["gpipe", "--profile", __file__], "test_simulate.py is no profile"),
        (["gpipe", "--draw", "a.txt"], "give it the ending .svg"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments: list[str], message: str):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr().err
    assert message in captured
    assert captured.count("\n") == 1
