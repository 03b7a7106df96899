"""A Llama of transformers shared out by pyops.parallel.parallelize, beside what else does so: time
of a step, peak memory of a rank, generation, and the time until the first step is done.

    step           ZeRO 0 to 3, tp = 2 and pp = 2 on 2 gloo ranks of one thread, beside torch's DDP,
                   tensor parallelism and pipelines, Accelerate + FSDP2 and DeepSpeed: 4 rows of 128
                   tokens in all, 8 layers of width 512
    composition    trainer.step beside a loop by hand over the same model and optimizer
    generate       64 tokens at tp = 2 beside one process
    first step     of a tiny Llama, from the start of the processes

Every library's ranks are processes of their own, of which one team works at a time. A library that
is not installed is left out, and it is said; where it is installed for another interpreter only,
PYOPS_RIVALS_PYTHON names that:

    python -m venv --system-site-packages rivals && rivals/bin/pip install deepspeed
    PYOPS_RIVALS_PYTHON=rivals/bin/python python -m benchmarks parallelize

Losses of three steps must be those of plain transformers on one process before anything is timed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.instruments.harness import Case, FailedCases, Row, run_cases
from benchmarks.instruments.rank_teams import Team

__all__ = ["cases", "run"]

RANKS = 2
ONE_PROCESS = "transformers, one process"
CLOSE = 2e-4  # losses of three steps; other sums of float32
OVERHEAD = 1.02  # of trainer.step over a loop by hand, at most
GENERATION = 1.3  # of generation at tp = 2 over one process, at most
FIRST_STEP_MS = 5000.0
STARTS = 5  # rounds of what starts processes anew
STEPS: dict[str, tuple[str, ...]] = {
    "pyops, ZeRO stage 0": ("torch DDP",),
    "pyops, ZeRO stage 1": ("DeepSpeed ZeRO 1", "torch DDP"),
    "pyops, ZeRO stage 2": ("DeepSpeed ZeRO 2", "torch DDP"),
    "pyops, ZeRO stage 3": ("DeepSpeed ZeRO 3", "Accelerate + FSDP2", "torch DDP"),
    "pyops, tp = 2": ("torch parallelize_module",),
    "pyops, pp = 2": ("torch pipelining",),
}
COMPOSED = ("pyops, ZeRO stage 0", "pyops, ZeRO stage 1", "pyops, tp = 2", "pyops, pp = 2")
NEEDS = {"DeepSpeed": "deepspeed", "Accelerate": "accelerate"}  # first word of a name -> package


@functools.cache
def interpreter_for(package: str) -> str | None:
    """The interpreter that has a package: this one, or the one that PYOPS_RIVALS_PYTHON names."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    other = os.environ.get("PYOPS_RIVALS_PYTHON")
    asks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if other and subprocess.run([other, "-c", asks], check=False).returncode == 0:
        return other
    return None


def is_there(name: str) -> bool:
    """Whether a rival can run here; says so where it can't."""
    package = NEEDS.get(name.split()[0])
    if package is None or interpreter_for(package) is not None:
        return True
    print(
        f"{name} is left out: {package} is not installed; pip install {package}, or name a Python "
        "that has it in PYOPS_RIVALS_PYTHON",
        flush=True,
    )
    return False


@functools.cache
def version_of(package: str) -> str | None:
    """Of a package, for the interpreter that has it."""
    python = interpreter_for(package)
    if python is None:
        return None
    if python == sys.executable:
        return importlib.metadata.version(package)
    asks = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", asks], capture_output=True, text=True).stdout.strip()


class Teams:
    """The teams of one case, each started when it is first asked.

    Args:
        stack: Ends them.
        size: Of the model.
    """

    def __init__(self, stack: ExitStack, size: str) -> None:
        self._stack, self._size = stack, size
        self._teams: dict[str, Team] = {}

    def call(self, name: str, what: str) -> list[Any]:
        """As `Team.call`."""
        if name not in self._teams:
            self._teams[name] = self._stack.enter_context(start(name, self._size))
        return self._teams[name].call(what)

    def memory(self, names: Sequence[str]) -> dict[str, list[float]]:
        """By name: MiB of a rank with its libraries imported, and at most; of the largest rank."""
        found = {}
        for name in names:
            if name in self._teams:
                imported, peak = max(self.call(name, "memory"), key=lambda pair: pair[1])
                found[name] = [round(imported / 2**20, 1), round(peak / 2**20, 1)]
        return found


def start(name: str, size: str) -> Team:
    """The ranks of one library."""
    package = NEEDS.get(name.split()[0])
    python = None if package is None else interpreter_for(package)
    ranks = 1 if name.endswith("one process") else RANKS
    return Team(name, ranks=ranks, size=size, python=python)


def losses_of(checked: Sequence[Sequence[float | None]]) -> list[float]:
    """Of each step, the mean over the ranks that have a loss."""
    found = []
    for step in zip(*checked, strict=True):
        losses = [loss for loss in step if loss is not None]
        found.append(sum(losses) / len(losses))
    return found


@functools.cache
def expected(size: str) -> tuple[float, ...]:
    """The losses of plain transformers on one process."""
    with start(ONE_PROCESS, size) as team:
        return tuple(losses_of(team.call("check")))


def agrees(teams: Teams, name: str, size: str) -> float:
    """The largest difference of a library's losses to the plain ones; raises when it is more than
    the order of sums explains, or nothing is learned."""
    found, wanted = losses_of(teams.call(name, "check")), expected(size)
    if not found[-1] < found[0]:
        raise AssertionError(f"{name}: the loss does not fall: {found}")
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    if not worst < CLOSE:
        raise AssertionError(f"{name}: losses {found}, plain transformers' are {wanted}")
    return worst


def facts(names: Sequence[str]) -> dict[str, Any]:
    """What a row records of the ranks and of the libraries."""
    packages = {"transformers", *(NEEDS[name.split()[0]] for name in names if is_known(name))}
    return {
        "ranks": RANKS,
        "libraries": {package: version_of(package) for package in sorted(packages)},
    }


def is_known(name: str) -> bool:
    return name.split()[0] in NEEDS


def step_case(stack: ExitStack, ours: str, size: str) -> Case:
    """Ours beside its rivals."""
    teams = Teams(stack, size)
    names = [ours, *filter(is_there, STEPS[ours])]
    return Case(
        bench="parallelize",
        name=f"Llama step, {RANKS} ranks, {ours.removeprefix('pyops, ')}",
        implementations={name: partial(teams.call, name, "step") for name in names},
        check=partial(agrees, teams, ours, size),
        vet={name: partial(agrees, teams, name, size) for name in names[1:]},
        targets={name: 1.0 for name in names[1:]},
        facts=facts(names),
        observe=lambda row: {"rank_mib": teams.memory(list(row["us"]))},
    )


def composition_case(stack: ExitStack, ours: str, size: str) -> Case:
    """The trainer's step beside a loop by hand, over one model and optimizer."""
    teams = Teams(stack, size)
    return Case(
        bench="parallelize",
        name=f"composition, {RANKS} ranks, {ours.removeprefix('pyops, ')}",
        implementations={
            "trainer.step": partial(teams.call, ours, "step"),
            "a loop by hand": partial(teams.call, ours, "by hand"),
        },
        check=partial(agrees, teams, ours, size),
        targets={"a loop by hand": round(1 / OVERHEAD, 3)},
        facts=facts([ours]),
    )


def generation_case(stack: ExitStack, size: str) -> Case:
    """The same tokens by two ranks and by one."""
    teams = Teams(stack, size)
    names = ("pyops, tp = 2", "pyops, one process", ONE_PROCESS)

    def same_tokens() -> None:
        first, *others = (tokens for name in names for tokens in teams.call(name, "generate"))
        if any(other != first for other in others):
            raise AssertionError(f"other tokens: {first}, {others}")

    return Case(
        bench="parallelize",
        name="generate 64 tokens, tp = 2",
        implementations={name: partial(teams.call, name, "generate") for name in names},
        check=same_tokens,
        targets={names[1]: round(1 / GENERATION, 3)},
        facts=facts([names[0]]),
    )


def start_case(stack: ExitStack, ours: str, rival: str) -> Case:
    """From the start of the processes to the end of the first step."""
    last = ExitStack()
    stack.push(last)

    def first_step(name: str) -> None:
        last.enter_context(start(name, "tiny")).call("step")

    def check() -> float:
        with ExitStack() as own:
            return agrees(Teams(own, "tiny"), ours, "tiny")

    return Case(
        bench="parallelize",
        name=f"first step of a tiny Llama, {ours.removeprefix('pyops, ')}",
        implementations={name: partial(first_step, name) for name in (ours, rival)},
        check=check,
        prepare={name: last.close for name in (ours, rival)},
        most={"ms": FIRST_STEP_MS},
        facts=facts([ours]),
    )


def cases(options: Any, *, size: str = "small") -> Iterator[tuple[Callable[[], Case], bool]]:
    """(makes a case, whether it starts processes anew) of those that --only leaves. The processes
    of a case end when the next one is asked for."""
    kinds: list[tuple[str, Callable[[ExitStack], Case], bool]] = []
    for ours in STEPS:
        kinds.append((f"step {ours}", partial(step_case, ours=ours, size=size), False))
    for ours in COMPOSED:
        kinds.append(
            (f"composition {ours}", partial(composition_case, ours=ours, size=size), False)
        )
    kinds.append(("generate", partial(generation_case, size=size), False))
    for ours, rival in (
        ("pyops, one process", ONE_PROCESS),
        ("pyops, ZeRO stage 1", "torch DDP"),
        ("pyops, tp = 2", "torch parallelize_module"),
    ):
        kinds.append((f"first step {ours}", partial(start_case, ours=ours, rival=rival), True))
    for name, make, anew in kinds:
        if options.only is None or options.only in name:
            with ExitStack() as stack:
                yield partial(make, stack), anew


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    if options.device.type != "cpu":
        print("the ranks of this bench are processes of a CPU: nothing to time on another device")
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have, for what the rows say
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for make, anew in cases(options):
            rounds = min(STARTS, options.rounds) if anew else options.rounds
            try:
                rows += run_cases([make], rounds=rounds)
            except FailedCases as error:
                rows += error.rows
                failed += error.failed
    finally:
        torch.set_num_threads(threads)
    if failed:
        raise FailedCases(rows, failed)
    return rows
