"""Programs of README.md and docs/*.md, and processes that run them as their readers would.

A program is a block ```python, the command that runs it, and a block ```text of what it prints,
which rank 0 prints alone:

    ```python                      whole: it imports what it uses, makes its process group and data
    ```
        torchrun --standalone --nproc-per-node 2 zero.py        or: python zero.py
    ```text
    ...                            a first line of three dots: something was printed before
    loss 0.123                     numbers with a point: within two units of their last digit
    ```

Each other Python block is a fragment. It runs too, after what a comment, which no reader of the
page sees, states before it; or the comment says why it does not:

    <!-- setup                     Python statements; with ", 2 ranks" under torchrun, where torch
    x = 3                          and dist are imported and the process group is made
    -->
    <!-- not run: a reason -->

Each rank is one process, which runs one program after another with torchrun's variables: only the
imports are shared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers import ROOT, collect_garbage, fork_server, presume_costs

__all__ = [
    "Blocks",
    "Fragment",
    "Program",
    "Ranks",
    "blocks",
    "differs",
    "fragments_of",
    "pages",
    "program_of",
    "programs_of",
]

TIMEOUT = 120.0  # seconds that a program may take for each of its ranks: they share the cores
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^    (?:python|torchrun --standalone --nproc-per-node (\d+)) (\w+\.py)$", re.MULTILINE
)
COMMENT = re.compile(
    r"<!-- (?:setup(?:, (?P<ranks>\d+) ranks)?\n(?P<setup>(?:(?!-->).)*)|not run: "
    r"(?P<reason>[^\n]+) )-->\n\Z",
    re.DOTALL,
)
PRELUDE = """\
import torch
import torch.distributed as dist
dist.init_process_group()
"""
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
Blocks = list[tuple[int, str, str]]


@dataclass(frozen=True)
class Program:
    """A page's program: its source, on how many ranks it runs (0: without torchrun), what it
    prints."""

    page: str
    source: str
    ranks: int
    prints: str


TABLES = {
    "index.md",
    "tensor_parallel_models.md",
    "results.md",
}  # pages without a program of their own


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> Blocks:
    """(where it ends, language, contents) of each fenced block."""
    return [(found.end(), found[1], found[2]) for found in BLOCK.finditer(text)]


def program_of(page: str, text: str) -> Program:
    """The page's first Python program; ValueError where there is none, or it is not said how to run
    it or what it prints."""
    fenced = blocks(text)
    number = next((n for n, (_, language, _) in enumerate(fenced) if language == "python"), None)
    if number is None:
        raise ValueError(f"{page} has no Python program")
    end, _, source = fenced[number]
    command = COMMAND.search(text, end)
    if (
        number + 1 == len(fenced)
        or fenced[number + 1][1] != "text"
        or command is None
        or command.end() > fenced[number + 1][0]
    ):
        raise ValueError(
            f"{page}: after its first program say how to run it (    python x.py), and "
            "what it prints (```text)"
        )
    if command[1] is None and "init_process_group" in source:
        raise ValueError(f"{page}: its first program needs torchrun, and says python")
    return Program(page, source, int(command[1] or 0), fenced[number + 1][2])


def programs_of(page: str, text: str) -> list[Program]:
    """All of the page's Python blocks which are followed by a command and by what they print; the
    first one must be."""
    found = [program_of(page, text)]
    fenced = blocks(text)
    first = next(n for n, (_, language, _) in enumerate(fenced) if language == "python")
    for number, (end, language, source) in enumerate(fenced[first + 1 :], first + 1):
        following = fenced[number + 1] if number + 1 < len(fenced) else None
        if language != "python" or following is None or following[1] != "text":
            continue
        start = following[0] - len(f"```text\n{following[2]}```")
        if (command := COMMAND.search(text, end, start)) is not None:
            found.append(Program(page, source, int(command[1] or 0), following[2]))
    return found


@dataclass(frozen=True)
class Fragment:
    """A Python block that is no whole program, with the statements that it needs before it."""

    page: str
    line: int
    program: Program | None
    not_run: str | None


def fragments_of(page: str, text: str) -> list[Fragment]:
    """All of the page's Python blocks that `programs_of` leaves."""
    programs = {program.source for program in programs_of(page, text)}
    found = []
    for block in BLOCK.finditer(text):
        if block[1] != "python" or block[2] in programs:
            continue
        line = text.count("\n", 0, block.start()) + 1
        comment = COMMENT.search(text[: block.start()])
        if comment is not None and comment["reason"] is not None:
            found.append(Fragment(page, line, None, comment["reason"]))
            continue
        ranks = 0 if comment is None else int(comment["ranks"] or 0)
        source = (PRELUDE if ranks else "") + (comment["setup"] if comment else "") + block[2]
        found.append(Fragment(page, line, Program(page, source, ranks, ""), None))
    return found


def differs(printed: str, stated: str) -> bool:
    """Whether a program printed another thing than its page says."""
    stated_lines, lines = stated.rstrip("\n").split("\n"), printed.rstrip("\n").split("\n")
    if stated_lines[0] == "...":
        stated_lines = stated_lines[1:]
        lines = lines[-len(stated_lines) :]
    a, b = "\n".join(lines), "\n".join(stated_lines)
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return True
    for mine, wanted in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
        mantissa, _, exponent = wanted.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if abs(float(mine) - float(wanted)) > 2.01 * unit:
            return True
    return False


def _serve(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    presume_costs()
    sys.stdin = io.StringIO()
    while True:
        try:
            path, variables = pipe.recv()
        except EOFError:
            os._exit(0)
        printed, error = io.StringIO(), None
        os.environ.update(variables)
        os.chdir(Path(path).parent)
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(path, run_name="__main__")
        except BaseException:  # a program's, whatever it is: it belongs to the test
            error = traceback.format_exc()
        if "accelerate" in sys.modules:  # its notes about the processes of a program outlive that
            sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in variables:
            del os.environ[name]
        collect_garbage()
        pipe.send((printed.getvalue(), error))


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Ranks:
    """Processes that run programs, one after another: as the ranks of one torchrun, or the first of
    them alone. A program for more ranks than there are starts the others."""

    def __init__(self, size: int) -> None:
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._start(size)

    def _start(self, size: int) -> None:
        """More processes, until there are `size`."""
        context = fork_server()
        for rank in range(len(self._pipes), size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, program: Program, folder: Path) -> list[tuple[str, str | None]]:
        """(what it printed, its traceback) of each rank that `program` runs on."""
        path = folder / "program.py"
        path.write_text(program.source)
        self._start(program.ranks)
        used = self._pipes[: program.ranks or 1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(program.ranks),
        }
        shared |= {"LOCAL_WORLD_SIZE": str(program.ranks), "GROUP_RANK": "0"}
        for rank, pipe in enumerate(used):
            alone = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
            pipe.send((str(path), alone if program.ranks else {}))
        limit = TIMEOUT * max(2, program.ranks)
        told = [pipe.recv() if pipe.poll(limit) else None for pipe in used]
        if None in told:  # a late answer would be taken for that of the next program
            size = len(self._pipes)
            for process in self._processes:
                process.kill()
            self.close()
            self._pipes, self._processes = [], []
            self._start(size)
        return [each or ("", f"it did not end within {limit:g} s") for each in told]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
