"""Plain lines where there is no terminal, a live line where there is one, silence on other ranks."""

from __future__ import annotations

import io
import sys

import pytest

from pyops.display import Display, describe

pytestmark = pytest.mark.cpu_only

ROW = {"step": 9, "loss": 2.34567, "tokens_per_s": 12345.6, "memory_gib": 0.5, "skipped": 0}


def test_a_line_says_it_all():
    line = describe({**ROW, "validation_loss": 2.5, "skipped": 2}, num_steps=20, seconds_left=3723.0)
    assert line == "step 10/20  loss 2.346  validation 2.500  12,346 tokens/s  0.50 GiB  2 skipped  1:02:03 left"
    assert "loss not finite" in describe({**ROW, "loss": None}, num_steps=20, seconds_left=None)


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


def test_a_terminal_gets_a_live_line(monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    display = Display("my run", num_steps=20)
    display.step({**ROW, "validation_loss": 2.5})
    display.step({**ROW, "step": 10})
    display.note("a [note]")
    display.close()
    shown = terminal.getvalue()
    assert "my run" in shown
    assert "step 11/20" in shown
    assert "validation 2.500" in shown, "it stays until the next one"
    assert "a [note]" in shown
