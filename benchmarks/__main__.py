"""`python -m benchmarks [NAME...]`: run benches, append their rows under results/, write the tables
anew.

Each `bench_NAME.py` in the folders beside this file has `run(options) -> list of rows`; it prints
as it goes. NAME is unique among all folders, so that a bench is called without its folder.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Options", "main", "module_of", "names"]

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Options:
    """What a bench is told. `only`: cases whose name contains this; None: all."""

    device: torch.device
    rounds: int = 15
    only: str | None = None


def names() -> list[str]:
    """The benches there are."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.rglob("bench_*.py"))


def module_of(name: str) -> str:
    """The module of the bench called `name`, with the folder it lies in."""
    (path,) = FOLDER.rglob(f"bench_{name}.py")
    return ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benches named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Check, then time, pyops and its rivals."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(names())}; all when none is given",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument("--rounds", type=int, default=15, help="samples of each implementation")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument(
        "--no-save", action="store_true", help="print only: append no rows, write no tables"
    )
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(names()))
    if unknown:
        parser.error(f"no bench called {', '.join(unknown)}; there are {', '.join(names())}")
    options = Options(device=torch.device(given.device), rounds=given.rounds, only=given.only)
    from benchmarks.instruments import harness, machine, report

    if options.device.type == "cuda":  # now, while there is memory for it
        copy, product = (
            machine.copy_bandwidth(options.device) / 1e9,
            machine.matmul_flops(options.device) / 1e12,
        )
        print(
            f"roofs of this process: a copy {copy:.0f} GB/s, "
            f"a matrix product {product:.0f} TFLOP/s",
            flush=True,
        )
        torch.cuda.empty_cache()
    status = 0
    for name in given.names or names():
        print(f"{name} on {options.device}, {torch.get_num_threads()} threads", flush=True)
        try:
            rows = importlib.import_module(module_of(name)).run(options)
        except harness.FailedCases as error:
            print(f"{name}: {error}", flush=True)
            rows, status = error.rows, 1
        if not given.no_save and (path := harness.append_rows(rows)) is not None:
            print(f"{len(rows)} rows appended to {path.relative_to(FOLDER.parent)}")
    if not given.no_save:
        for path in report.write_tables():
            print(f"tables written in {path.relative_to(FOLDER.parent)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
