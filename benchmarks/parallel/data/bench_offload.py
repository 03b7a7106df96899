"""Steps with states in files and in host memory, beside a plain O_DIRECT copy of as many bytes and
the step without offload.

A step over a file reads every state once and writes it once, so a copy of the states' bytes from
one file of the same disk to another is what the disk allows: one after the other, as `dd` does it,
and reading and writing at once from two threads. All files have their space beforehand. Before
anything is timed, parameters are compared with an ordinary step's, bit for bit. On a GPU only what
is there for one is timed: `offload_device`.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, format_row, run_cases
from benchmarks.parallel.data import offload_device
from pyops.offload import Offloaded
from pyops.optim import AdamW

__all__ = ["cases", "limited_memory", "run", "trained_in_limited_memory"]

MI = 1 << 20
STATES = 12  # bytes per bf16 parameter of AdamW with a master
COPIED = 16 * MI  # bytes that the copy moves at a time
LIMIT, BEYOND = 2048, 4096  # MiB: what a process may have, and what its states take


def build(nbytes: int, *, pieces: int = 16) -> tuple[list[nn.Parameter], AdamW]:
    """bf16 parameters whose AdamW states with masters take about nbytes, with one gradient for
    all."""
    return offload_device.with_masters([nbytes // STATES // pieces] * pieces, torch.device("cpu"))


def same_bits(where: str) -> Callable[[], float]:
    """A check that three offloaded steps of a small model leave the parameters of three ordinary
    ones."""

    def check() -> float:
        (ours, mine), (theirs, plain) = build(8 * MI), build(8 * MI)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = q.grad
        offloaded = Offloaded(mine, where, tile_bytes=1 << 18)
        for _ in range(3):
            offloaded.step()
            plain.step()
        if not all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True)) or bool(
            (ours[0] == 1).all()
        ):
            raise AssertionError("offloaded steps differ from ordinary ones")
        offloaded.close()
        return 0.0

    return check


class PlainCopy:
    """A file copied to another with O_DIRECT, through page-aligned memory, nothing else."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.nbytes = nbytes // COPIED * COPIED
        self.files = []
        for _ in range(2):
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
            os.posix_fallocate(file, 0, self.nbytes)
            for offset in range(0, self.nbytes, COPIED):
                os.pwrite(file, mmap.mmap(-1, COPIED), offset)
            self.files.append(file)
        self.memory = [mmap.mmap(-1, COPIED) for _ in range(2)]

    def one_after_the_other(self) -> None:
        for offset in range(0, self.nbytes, COPIED):
            assert os.preadv(self.files[0], [self.memory[0]], offset) == COPIED
            assert os.pwritev(self.files[1], [self.memory[0]], offset) == COPIED

    def at_once(self) -> None:
        def write() -> None:
            for offset in range(0, self.nbytes, COPIED):
                assert os.pwritev(self.files[1], [self.memory[1]], offset) == COPIED

        thread = threading.Thread(target=write)
        thread.start()
        for offset in range(0, self.nbytes, COPIED):
            assert os.preadv(self.files[0], [self.memory[0]], offset) == COPIED
        thread.join()

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def disk(folder: str, mib: int) -> tuple[Case, Callable[[], None]]:
    """A step over files, and what ends the case."""
    _, optimizer = build(mib * MI)
    offloaded = Offloaded(optimizer, folder)
    plain = PlainCopy(folder, offloaded.nbytes)
    assert hasattr(offloaded._store, "file")
    file: Any = offloaded._store.file
    case = Case(
        "offload",
        f"step over files, AdamW bf16 + master, {mib} MiB of states",
        {
            "pyops": offloaded.step,
            "O_DIRECT copy": plain.one_after_the_other,
            "O_DIRECT copy, two threads": plain.at_once,
        },
        check=same_bits(folder),
        targets={"O_DIRECT copy": 0.8},
        facts={
            "state_bytes": offloaded.nbytes,
            "resident_bytes": offloaded.resident_bytes,
            "engine": file.engine,
            "direct": file.direct,
        },
    )

    def end() -> None:
        offloaded.close()
        plain.close()

    return case, end


def host(mib: int, device: torch.device) -> Case:
    """A step with states in host memory beside one without offload."""
    (_, optimizer), (_, plain) = build(mib * MI), build(mib * MI)
    offloaded = Offloaded(optimizer, "cpu")
    return Case(
        "offload",
        f"step in host memory, AdamW bf16 + master, {mib} MiB of states",
        {"pyops": offloaded.step, "without offload": plain.step},
        check=same_bits("cpu"),
        device=device,
        targets={"without offload": round(1 / 1.1, 3)},
        facts={"state_bytes": offloaded.nbytes},
    )


CHILD = """
import json, resource, sys, time
limit = int(sys.argv[1]) << 20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from benchmarks.parallel.data.bench_offload import build
from pyops.offload import Offloaded
params, optimizer = build(int(sys.argv[2]) << 20, pieces=64)
offloaded = Offloaded(optimizer, sys.argv[3])
seconds = []
for _ in range(4):
    start = time.perf_counter()
    offloaded.step()
    seconds.append(time.perf_counter() - start)
moved = all(bool((p.detach() != 1).any()) for p in params)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
figures = {"seconds": seconds, "moved": moved, "peak": peak, "state_bytes": offloaded.nbytes}
print(json.dumps(figures))
"""


def limited_memory(folder: str, *, limit: int = LIMIT, mib: int = BEYOND) -> Row:
    """The row of steps over `mib` MiB of states in a process that may have `limit` MiB
    (RLIMIT_DATA)."""
    from benchmarks.instruments import harness, machine

    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(limit), str(mib), folder],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    if done.returncode:
        raise AssertionError(f"steps within {limit} MiB ended with\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["moved"]:
        raise AssertionError("a parameter was not stepped")
    device = torch.device("cpu")
    return {
        "bench": "offload",
        "case": f"step over files, {mib} MiB of states, process limited to {limit} MiB",
        "device": "cpu",
        "us": {"pyops": harness.quantiles(found["seconds"][1:])},
        "speedup": {},
        "max_error": None,
        "rounds": len(found["seconds"]) - 1,
        "state_bytes": found["state_bytes"],
        "peak_bytes": found["peak"],
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": harness.datetime.now(harness.timezone.utc).strftime("%Y-%m-%d"),
    }


TRAINED = """
[model]
num_layers = 7
dim = 2048
num_heads = 16
hidden = 8448
sequence_length = 64
bias = false
[optimizer]
warmup_steps = 2
lr = 1e-4
[precision]
dtype = "bf16"
[zero]
stage = 2
tile_bytes = 8388608
[recompute]
modules = ["blocks.*"]
[train]
num_steps = 3
batch = 1
num_validation_sequences = 1
num_sample_tokens = 0
num_checkpoints = 1
"""
TRAIN = """
import resource, sys
limit = int(sys.argv[1]) << 20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from pyops.cli import main
code = main(sys.argv[2:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
sys.exit(code)
"""


def trained_in_limited_memory(folder: str, *, limit: int = LIMIT, config: str = TRAINED) -> Row:
    """The row of `pyops train` of a GPT whose states take more than the process may have, saved,
    resumed for two more steps."""
    from benchmarks.instruments import harness, machine
    from pyops.train.report.metrics import read_rows

    root = Path(__file__).resolve().parents[3]
    file = Path(folder, "config.toml")
    file.write_text(config)
    given = [
        "train",
        str(file),
        "--set",
        "name=limited",
        "--set",
        f"train.folder={folder}",
        "--set",
        f"zero.offload={folder}",
        "--set",
        f"data.cache={folder}",
        "--set",
        "data.max_bytes=200000",
    ]
    peaks = []
    for more in ([], ["--resume", "--set", "train.num_steps=5"]):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, str(limit), *given, *more],
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        if done.returncode:
            raise AssertionError(f"training within {limit} MiB ended with\n{done.stderr[-2000:]}")
        peaks.append(int(done.stdout.split()[-1]))
    rows = read_rows(Path(folder, "limited", "metrics.jsonl"))
    if (
        len(rows) != 5
        or any(row["grad_norm"] is None for row in rows)
        or rows[0]["loss"] == rows[-1]["loss"]
    ):
        raise AssertionError(f"expected five steps, the last two after a checkpoint: {rows}")
    tokens = 64
    saved = json.loads(
        next(Path(folder, "limited", "checkpoints").glob("step-*/manifest.json")).read_text()
    )
    device = torch.device("cpu")
    return {
        "bench": "offload",
        "case": f"pyops train with states in a folder, process limited to {limit} MiB",
        "device": "cpu",
        "us": {"pyops": harness.quantiles([tokens / row["tokens_per_s"] for row in rows[1:]])},
        "speedup": {},
        "max_error": None,
        "rounds": len(rows) - 1,
        "peak_bytes": max(peaks),
        "checkpoint_bytes": sum(each["bytes"] for each in saved["files"].values()),
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": harness.datetime.now(harness.timezone.utc).strftime("%Y-%m-%d"),
    }


def cases(
    folder: str, device: torch.device
) -> list[tuple[str, Callable[[], tuple[Case, Callable[[], None]]]]]:
    """(name, maker of a case and of what ends it)."""
    return [
        ("files", lambda: disk(folder, 1024)),
        ("host", lambda: (host(96, device), lambda: None)),
    ]


def run(options: Options) -> list[Row]:
    """Files are made in the folder for temporary files: TMPDIR chooses the disk."""
    if options.device.type != "cpu":
        return offload_device.run(options)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases(folder, options.device):
            if options.only is None or options.only in name:
                case, end = make()
                rounds = min(options.rounds, 7) if name == "files" else options.rounds
                rows += run_cases([case], rounds=rounds, sample_seconds=0.05)
                end()
        if options.only is None or options.only in "limited":
            for make_row in (limited_memory, trained_in_limited_memory):
                rows.append(make_row(folder))
                print(format_row(rows[-1]), flush=True)
    return rows
