"""Runs a grid of odd tensors in a process of its own, and another behind each case that kills
it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers import fork_server

__all__ = ["folder_of_all", "go_through", "wrong_in"]

ROOT = Path(__file__).resolve().parents[2]
MOST_DEATHS = 200


@contextlib.contextmanager
def folder_of_all() -> Iterator[str]:
    """A temporary folder, the same one on every rank where there are ranks."""
    if not dist.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    assert made[0] is not None
    try:
        yield made[0]
    finally:
        dist.barrier()
        shutil.rmtree(made[0], ignore_errors=True)


def go_through(cases: Sequence[Any], problem: Callable[..., str | None], first: int) -> None:
    """In the process of its own: a line when a case begins, one when it fails, one at the end."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    torch.set_num_threads(1)
    for number, case in enumerate(cases):
        if number < first:
            continue
        print(f"case {number} {case}", flush=True)
        if (wrong := problem(*case)) is not None:
            print(f"wrong: {' '.join(wrong.split())}", flush=True)
    print("end", flush=True)


def _run(module: str, which: str, first: int, folder: str) -> None:
    """As `python -m module which first`, with what it prints in files of `folder`."""
    os.chdir(ROOT)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(folder, name), "w") as file:
            os.dup2(file.fileno(), number)
    sys.argv[1:] = [which, str(first)]
    runpy.run_module(module, run_name="__main__")


def wrong_in(module: str, which: str) -> list[str]:
    """What is wrong, by case. `module` is run with `which` and the number of the first case, in
    processes of the fork server, which need not import torch."""
    wrong, first = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(MOST_DEATHS):
            process = fork_server().Process(target=_run, args=(module, which, first, folder))
            process.start()
            process.join()
            said, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
            case = ""
            for line in said.splitlines():
                if line.startswith("case "):
                    case = line
                elif line.startswith("wrong: "):
                    wrong.append(f"{case}: {line[7:]}")
            if said.endswith("end\n"):
                return wrong
            assert case, errors
            wrong.append(f"{case}: the process died with {process.exitcode}: {errors[-300:]}")
            first = int(case.split()[1]) + 1
    return wrong
