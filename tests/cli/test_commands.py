"""The command: one line and exit code 2 for what the user can put right, a checkpoint when it is
stopped, on ranks as alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pyops
from pyops.cli.commands import main
from pyops.train.report.metrics import read_rows
from tests.workers import fork_server

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]


def settings(tmp_path: Path, **train: object) -> list[str]:
    """A tiny run as arguments."""
    text = tmp_path / "text"
    if not text.exists():
        text.write_text("hello world, " * 500)
        (tmp_path / "c.toml").write_text(
            "[model]\nsequence_length = 16\nnum_layers = 1\nnum_heads = 2\ndim = 16\n"
        )
    keys = {
        "data.path": text,
        "data.cache": tmp_path / "cache",
        "train.folder": tmp_path / "runs",
        "train.batch": 8,
        "train.num_steps": 4,
        "train.num_sample_tokens": 4,
        "train.plot": "false",
        "train.tensorboard": "false",
        "train.device": "cpu",
        "optimizer.warmup_steps": 2,
    }
    keys |= {f"train.{key}": value for key, value in train.items()}
    return [
        "train",
        str(tmp_path / "c.toml"),
        *(item for k, v in keys.items() for item in ("--set", f"{k}={v}")),
    ]


def test_train(tmp_path, capsys):
    assert main(settings(tmp_path)) == 0
    assert len(read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")) == 4
    assert "validation loss" in capsys.readouterr().out
    assert main([*settings(tmp_path, num_steps=6), "--resume"]) == 0
    assert len(read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")) == 6


def test_a_run_that_has_all_its_steps_says_so(tmp_path, capsys):
    assert main(settings(tmp_path)) == 0
    rows = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*settings(tmp_path), "--resume"]) == 0
    shown = capsys.readouterr().out
    assert (
        f"already finished: {tmp_path / 'runs' / 'run'} has all 4 steps; "
        "set train.num_steps to more" in shown
    )
    assert "a sample" not in shown
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == rows


def test_lr_range_test(tmp_path, capsys):
    assert main([*settings(tmp_path), "--lr-range-test", "1e-5:100:40"]) == 0
    folder = tmp_path / "runs" / "run-lr-range"
    found = re.search(
        r"the loss falls fastest at a learning rate of (\S+): set optimizer.lr",
        capsys.readouterr().out,
    )
    assert found
    assert 1e-4 < float(found[1]) < 10
    rows = read_rows(folder / "metrics.jsonl")
    rates = [row["lr"] for row in rows]
    assert rates == pytest.approx([1e-5 * 1e7 ** (k / 39) for k in range(len(rates))])
    assert (folder / "lr_range.png").stat().st_size > 5000
    assert not (folder / "checkpoints").exists()
    for sweep in "1e-3", "1:1e-3:50", "0:1:50", "1e-3:1:2", "1e-3:1:x":
        assert main([*settings(tmp_path), "--lr-range-test", sweep]) == 2
        assert f"--lr-range-test {sweep}" in capsys.readouterr().err
    assert main([*settings(tmp_path), "--lr-range-test", "--resume"]) == 2
    assert "--resume has no meaning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=4", r"unknown key train.stpes = 4; did you mean train.num_steps\?"),
        ("data.path=/nowhere", r"corpus /nowhere does not exist; set data.path"),
        ("model.sequence_length=100000", r"is shorter than one sequence"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, override, message):
    assert main([*settings(tmp_path), "--set", override]) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(rf"pyops: .*{message}.*\n", shown.err)
    assert shown.out == ""


def test_a_damaged_checkpoint_is_one_line(tmp_path, capsys):
    main(settings(tmp_path))
    file = tmp_path / "runs" / "run" / "checkpoints" / "step-00000004" / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert main([*settings(tmp_path), "--resume"]) == 2
    assert re.fullmatch(
        rf"pyops: {file} has .*; delete {file.parent} and use an earlier checkpoint\n",
        capsys.readouterr().err,
    )


def test_other_ranks_say_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == ""


def test_no_command():
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_env_says_what_a_bug_report_needs(capsys):
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    for word in (
        pyops.__version__,
        "python",
        "torch",
        "backends",
        "gloo",
        "cpu isa",
        "kernels",
        "adam_",
        "accumulate_",
    ):
        assert word in shown, word


def test_env_fits_80_columns_that_stay_apart(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    kernels = lines[lines.index(next(line for line in lines if line.startswith("kernels"))) :]
    cpu, cuda = kernels[0].index("cpu"), kernels[0].index("cuda")
    for line in kernels[1:]:
        assert line[2:].split()[0] == line[:cpu].strip(), (
            f"the name runs into the next column: {line}"
        )
        present = [
            {"yes": True, "-": False}[cell.strip()] for cell in (line[cpu:cuda], line[cuda:])
        ]
        assert present == [
            pyops.has_kernel(line[:cpu].strip(), device) for device in ("cpu", "cuda")
        ], line
    assert not [
        line for line in lines if len(line.split("  ")) == 1 and not line.startswith(" ")
    ], "a key without a value"


def test_bench_without_a_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pyops, "__file__", str(tmp_path / "pyops" / "__init__.py"))
    assert main(["bench"]) == 2
    assert "the benches are part of a source checkout" in capsys.readouterr().err


@pytest.mark.full  # what is handed on is held below, without a process
def test_bench_hands_its_arguments_on():
    done = subprocess.run(
        [sys.executable, "-m", "pyops", "bench", "nonsense"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "no bench called nonsense" in done.stderr


def test_bench_hands_on_every_argument_and_the_exit_code(monkeypatch):
    called: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        called.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    for words in (["optim", "norms", "--rounds", "3"], ["--rounds", "3", "optim"], ["--help"], []):
        assert main(["bench", *words]) == 7
        assert called[-1] == [sys.executable, "-m", "benchmarks", *words]


@pytest.mark.full  # imports every bench
def test_bench_says_what_it_takes(capfd):
    assert main(["bench", "--help"]) == 0
    shown = capfd.readouterr().out
    assert "--rounds" in shown
    assert "optim" in shown


def wait_for_steps(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(read_rows(path)) < count:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)


ENDLESS = {"num_steps": 100_000, "validate_every": 0, "checkpoint_every": 0}


@pytest.mark.full  # below in a process of the fork server, which need not import torch
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_a_checkpoint(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "pyops", *settings(tmp_path, **ENDLESS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    rows = tmp_path / "runs" / "run" / "metrics.jsonl"
    wait_for_steps(rows, 3, process)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    check_stopped(tmp_path, shown, process.returncode, number)


def _main(arguments: list[str], said: Path) -> None:
    """The command as a process of its own would run it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    raise SystemExit(main(arguments))


def test_a_stopped_process_leaves_a_checkpoint(tmp_path):
    arguments, said = settings(tmp_path, **ENDLESS), tmp_path / "said"
    process = fork_server().Process(target=_main, args=(arguments, said))
    process.start()
    rows = tmp_path / "runs" / "run" / "metrics.jsonl"
    while len(read_rows(rows)) < 3:
        assert process.is_alive(), said.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    check_stopped(tmp_path, said.read_text(), process.exitcode, signal.SIGINT)


def check_stopped(tmp_path: Path, shown: str, code: int | None, number: signal.Signals) -> None:
    rows = tmp_path / "runs" / "run" / "metrics.jsonl"
    assert code == 128 + number, shown
    steps = len(read_rows(rows))
    assert f"stopped by {number.name} after step {steps}; continue with --resume" in shown
    assert [p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir()] == [
        f"step-{steps:08}"
    ]


TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "pyops"),
]


@pytest.mark.full  # ranks that its agent starts: tests/train/faults
@pytest.mark.slow
def test_under_torchrun_as_alone(tmp_path):
    """Two ranks started by torchrun, stopped and resumed: the losses of one process, to 1e-5."""
    assert main(settings(tmp_path, num_steps=20)) == 0
    alone = [row["loss"] for row in read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")]
    command = [*TORCHRUN, *settings(tmp_path, num_steps=20), "--set", "name=ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ranks = [row["loss"] for row in read_rows(tmp_path / "runs" / "ranks" / "metrics.jsonl")]
    assert len(ranks) == 20
    assert max(abs(a - b) for a, b in zip(alone, ranks, strict=True)) < 1e-5
    assert alone[0] - alone[-1] > 0.1
    assert done.stdout.count("validation loss") == 1, "rank 0 alone speaks"


@pytest.mark.full  # the words are held by test_all_ranks_are_told_alike
def test_under_torchrun_a_mistake_is_said_once(tmp_path):
    mistake = [*TORCHRUN, *settings(tmp_path, batch=9)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        mistake, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode != 0
    assert done.stderr.count("pyops: train.batch is 9 sequences, which 2 ranks can't share") == 1
