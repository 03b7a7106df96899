"""The longest row of tokens that ranks can train on with 2 GiB of memory each, found by bisection;
drawn by context_memory_picture.

A length fits where a step of a GPT (loss and gradients, no recomputation) ends well in as many
processes as there are ranks, each with a limit on its writable memory (RLIMIT_DATA), the libraries'
among it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.instruments import machine
from benchmarks.instruments.harness import RESULTS, Row
from benchmarks.parallel.context.context_memory_rank import MODEL

__all__ = ["longest", "row_of", "run"]

LIMIT = 2 << 30
METHOD = "ring"
RANKS = (1, 2, 4)
UNIT = 128  # tokens: lengths are multiples of it, which zigzag shares out over up to 64 ranks
GUESS = 10 * 1024  # of one rank
NEAR = 0.03  # of a length: how near the shortest that does not fit comes
TIMEOUT = 900
MEMORY_ERRORS = ("can't allocate memory", "bad_alloc", "MemoryError", "Cannot allocate memory")


def _seconds(ranks: int, length: int) -> float | None:
    """Of a step over a row of so many tokens; None: it does not fit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = json.dumps({"length": length, "limit_bytes": LIMIT, "method": METHOD})
    command = [sys.executable, "-m", "benchmarks.parallel.context.context_memory_rank", options]
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
    started = [
        subprocess.Popen(
            command,
            cwd=RESULTS.parent.parent,
            env={**os.environ, **told, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return _outcome(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _outcome(started: list[subprocess.Popen[str]]) -> float | None:
    """Of the slowest rank, or None where one had no memory."""
    deadline = time.monotonic() + TIMEOUT
    while any(process.poll() is None for process in started):
        failed = [process for process in started if process.poll()]
        if failed:
            time.sleep(1)  # that others of the first to fail say so as well
            texts = [p.communicate()[1] for p in started if p.poll()]
            if any(words in text for text in texts for words in MEMORY_ERRORS):
                return None
            raise RuntimeError("a rank failed for another reason than memory:\n" + texts[0])
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step within {TIMEOUT} s")
        time.sleep(0.05)
    outputs = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        text = "\n".join(error for _, error in outputs)
        if any(words in text for words in MEMORY_ERRORS):
            return None
        raise RuntimeError("a rank failed for another reason than memory:\n" + text)
    return max(float(output.split()[-1]) for output, _ in outputs)


def longest(ranks: int, *, guess: int) -> tuple[int, float]:
    """The longest row that fits, and the seconds of a step over it.

    Args:
        ranks: How many share it.
        guess: A length near it.
    """
    low, best, high = 0, 0.0, None
    length = guess
    while high is None or high - low > max(UNIT, NEAR * high):
        seconds = _seconds(ranks, length)
        print(
            f"  {ranks} ranks, {length} tokens: "
            + ("too long" if seconds is None else f"{seconds:.1f} s"),
            flush=True,
        )
        if seconds is None:
            high = length
        else:
            low, best = length, seconds
        length = low + UNIT * (low // (4 * UNIT) + 1) if high is None else (low + high) // 2
        length = length // UNIT * UNIT
        if high is not None and high <= UNIT:
            raise RuntimeError(f"not even {UNIT} tokens fit in {LIMIT} bytes")
        length = max(length, UNIT)
    return low, best


def _case(ranks: int) -> str:
    return f"longest row in 2 GiB a process, cp = {ranks}"


def row_of(ranks: int, length: int) -> Row:
    """The row of what was found; without a time, for steps differ in length.

    Args:
        ranks: That share a row.
        length: The longest that fits.
    """
    return {
        "bench": "context_memory",
        "case": _case(ranks),
        "device": "cpu",
        "us": {},
        "speedup": {},
        "max_error": None,
        "rounds": 1,
        "ranks": ranks,
        "tokens": length,
        "limit_bytes": LIMIT,
        "method": METHOD,
        "model": MODEL,
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    rows, one = [], GUESS
    for ranks in RANKS:
        case = _case(ranks)
        if options.only is not None and options.only not in case:
            continue
        length, seconds = longest(ranks, guess=ranks * one)
        one = max(length // ranks // UNIT * UNIT, UNIT)
        rows.append(row_of(ranks, length))
        print(f"{case}: {length} tokens, {seconds:.1f} s a step", flush=True)
    return rows
