"""Plain lines where there is no terminal, a live line where there is one, silence on other
ranks."""

from __future__ import annotations

import io
import re
import sys

import pytest

from pyops.train.report.display import Display, describe, describe_transition

pytestmark = pytest.mark.cpu_only

ROW = {"step": 9, "loss": 2.34567, "tokens_per_s": 12345.6, "memory_gib": 0.5, "skipped": 0}


def test_a_line_says_it_all():
    line = describe(
        {**ROW, "validation_loss": 2.5, "skipped": 2}, num_steps=20, seconds_left=3723.0
    )
    assert (
        line == "step 10/20  loss 2.346  validation 2.500  12,346 tokens/s  0.50 GiB  2 skipped  "
        "1:02:03 left"
    )
    assert "loss not finite" in describe({**ROW, "loss": None}, num_steps=20, seconds_left=None)


ELASTIC = {
    "step": 11,
    "epoch": 2,
    "loss": 0.4142,
    "lr": 1e-3,
    "grad_norm": 1.0,
    "samples_per_s": 812.4,
    "frozen": 5,
    "stages": 2,
    "replicas": 2,
    "micro_batches": 4,
    "cached": True,
    "memory_gib": 0.4,
}


def test_a_line_of_a_run_that_freezes():
    line = describe({**ELASTIC, "accuracy": 0.9314}, num_steps=60, seconds_left=41.0)
    assert line == (
        "epoch 3  step 12/60  loss 0.414  accuracy 93.1 %  frozen 5  2 stages x 2 "
        "replicas  812 samples/s, cached  0.40 GiB  "
        "0:00:41 left"
    )
    last = {
        **ELASTIC,
        "stages": 1,
        "replicas": 4,
        "cached": 0.8,
        "validation_accuracy": 0.975,
        "frozen": 0,
        "transition_s": 0.3,
    }
    line = describe(last, num_steps=60, seconds_left=None)
    assert (
        "  validation 97.5 %  frozen 0  1 stage x 4 replicas  812 samples/s, 80 % cached  " in line
    )
    assert "cached" not in describe({**ELASTIC, "cached": False}, num_steps=60, seconds_left=None)
    assert "validation 0.250" in describe(
        {**ELASTIC, "validation_loss": 0.25}, num_steps=60, seconds_left=None
    )


def test_a_line_of_a_change_of_layout():
    after = {**ELASTIC, "frozen": 7, "stages": 1, "replicas": 4}
    assert describe_transition(ELASTIC, after, seconds=0.4249, reason="all fits") == (
        "frozen 5 -> 7, 2 stages x 2 replicas -> 1 stage x 4 replicas, in 0.42 s: all fits"
    )
    assert (
        describe_transition(ELASTIC, {**ELASTIC, "frozen": 6}, seconds=0.1)
        == "frozen 5 -> 6, 2 stages x 2 replicas, in 0.10 s"
    )


def test_accuracy_is_shown_when_it_is_measured(capsys):
    display = Display("run", num_steps=20, every=20)
    for step in range(5):
        display.step(
            {**ELASTIC, "step": step, **({"validation_accuracy": 0.5} if step == 3 else {})}
        )
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == ["4/20"]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"bytes_sent": 236_000, "compression": 30.81}, "  236 kB sent (30.8x less than fp32)  "),
        ({"bytes_sent": 7_200_000, "compression": 1.0}, "  7.2 MB sent  "),
        ({"bytes_sent": 0, "compression": 60.0}, "  0 B sent (60x less than fp32)  "),
        ({"bytes_sent": 12_345_678_901}, "  12.3 GB sent  "),
    ],
)
def test_what_was_sent(row, shown):
    assert shown in describe({**ROW, **row}, num_steps=20, seconds_left=1.0)


def test_plain_lines(capsys):
    display = Display("run", num_steps=20, every=5)
    for step in range(10):
        display.step({**ROW, "step": step, **({"validation_loss": 2.5} if step == 6 else {})})
    display.note("a note")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["5/20", "7/20", "10/20"]
    assert "validation 2.500" in lines[1]
    assert lines[-1] == "a note"


def test_other_ranks_are_silent(capsys):
    display = Display("run", num_steps=20, quiet=True)
    display.step({**ROW, "validation_loss": 1.0})
    display.note("a note")
    display.close()
    assert capsys.readouterr().out == ""


def shown_of(monkeypatch, rows, *, columns: int = 160, every: int = 1, name: str = "my run") -> str:
    """All that a terminal gets."""
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    display = Display(name, num_steps=20, every=every)
    for row in rows:
        display.step(row)
    display.note("a [note]")
    display.close()
    return terminal.getvalue()


def test_a_terminal_gets_a_live_line(monkeypatch):
    shown = shown_of(monkeypatch, [{**ROW, "validation_loss": 2.5}, {**ROW, "step": 10}])
    assert "my run" in shown
    assert "step 11/20" in shown
    assert "validation 2.500" in shown, "it stays until the next one"
    assert "a [note]" in shown


def test_a_terminal_keeps_the_accuracy(monkeypatch):
    shown = shown_of(
        monkeypatch, [{**ELASTIC, "validation_accuracy": 0.5}, {**ELASTIC, "step": 12}]
    )
    assert "epoch 3  step 13/20  loss 0.414  validation 50.0 %  " in shown


def test_a_narrow_terminal_keeps_the_bar_and_the_time_left(monkeypatch):
    """A long row at 80 columns: one line, whose bar and time are whole; the rest gives way from its
    end."""
    row = {
        **ELASTIC,
        "accuracy": 0.9314,
        "bytes_sent": 7_200_000,
        "compression": 31.0,
        "loss_scale": 65536.0,
        "skipped": 3,
    }
    for columns in (80, 40, 160):
        shown = shown_of(
            monkeypatch, [{**row, "step": step} for step in range(13)], columns=columns, every=100
        )
        last = (
            re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
            .split("\r")[-1]
            .rstrip("\n")
            .split("\n")[-1]
        )
        assert len(last) <= columns
        (bar,) = re.findall(r"[━╸╺]+", last)
        assert len(bar) == (20 if columns == 160 else 10), last
        assert re.search(r" 0:00:0\d left *$", last), last
        assert ("loss 0.414" in last, "0.40 GiB" in last) == (columns >= 80, columns == 160), last


def test_a_long_name_gives_way_to_the_bar_and_the_time_left(monkeypatch):
    shown = shown_of(
        monkeypatch,
        [{**ROW, "step": step} for step in range(3)],
        columns=60,
        every=100,
        name="a long name " * 8,
    )
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split("\r")[-1].rstrip("\n").split("\n")[-1]
    assert last.startswith("a long name a long name ")
    assert len(last) <= 60
    assert re.search(r"[━╸╺]{10} .* 0:00:0\d left *$", last), last


def test_a_terminal_keeps_the_lines_of_a_log(monkeypatch):
    """Every `every`-th step, and what was measured, stays above the live line, whole."""
    rows = [
        {**ROW, "step": step, **({"validation_loss": 2.5} if step == 6 else {})}
        for step in range(10)
    ]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown_of(monkeypatch, rows, columns=60, every=5))
    kept = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("step ")]
    assert [line.split()[1] for line in kept] == ["5/20", "7/20", "10/20"]
    assert all("12,346 tokens/s  0.50 GiB" in line for line in kept), (
        "longer than the terminal, and nothing is lost"
    )
