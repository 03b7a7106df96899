"""An error of all ranks is printed by rank 0, before torchrun can end it for the sake of
another."""

from __future__ import annotations

import contextlib
import io
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from pyops.cli import first_rank

pytestmark = pytest.mark.cpu_only


def _print(rank: int, group: Any, port: int, mark: Path, both: bool) -> tuple[str, bool]:
    """What this rank prints, and whether rank 0 was about to print when this rank left."""
    variables = {
        "RANK": str(rank),
        "TORCHELASTIC_RUN_ID": str(both),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    before, limit = dict(os.environ), first_rank.LIMIT
    os.environ.update(variables)
    try:
        if rank == 0:
            time.sleep(0.5)
            mark.touch()
        first_rank.LIMIT = timedelta(seconds=20 if both else 0.2)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            if both or rank == 1:
                first_rank.print_error("batch is 9")
        return printed.getvalue(), mark.exists()
    finally:
        first_rank.LIMIT = limit
        os.environ.clear()
        os.environ.update(before)


def test_the_other_ranks_wait_until_rank_0_has_printed(world, tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = world(2).run(_print, store.port, tmp_path / "mark", True)
    assert found == [("pyops: batch is 9\n", True), ("", True)]


def test_a_rank_whose_error_rank_0_does_not_have_prints_it(world, tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = world(2).run(_print, store.port, tmp_path / "mark", False)
    assert [text for text, _ in found] == ["", "pyops: rank 1: batch is 9\n"]


def test_a_process_without_torchrun_prints_at_once(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first_rank.print_error("batch is 9")
    assert capsys.readouterr().err == "pyops: batch is 9\n"
