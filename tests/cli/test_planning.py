"""`pyops plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from pyops.cli import main
from pyops.config import load_config
from pyops.plan import Machine, Plan
from pyops.plan.measuring.machine import WIDTHS

pytestmark = pytest.mark.cpu_only

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
TOML = """
name = "tiny"
[model]
vocab_size = 256
sequence_length = 32
num_layers = 4
num_heads = 4
dim = 32
[train]
batch = 16
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama-8b"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "tiny.toml"
    made.write_text(TOML)
    return made


def run(capsys, *words: object) -> str:
    assert main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words: object) -> str:
    assert main(["plan", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_a_folder_on_a_cluster(capsys, folder: Path, tmp_path: Path):
    target = tmp_path / "plan.toml"
    words = [folder, "--cluster", "h100", "--devices", "16", "--batch", "32"]
    words += ["--sequence", "8192", "--fix", "zero=3", "--write", target]
    out = run(capsys, *words)
    assert out.startswith("llama-8b, 8.03 billion parameters, on 16 x NVIDIA H100 SXM (2 nodes)")
    assert "zero=ZeroConfig(stage=3)" in out
    assert "--nnodes 2 " in out
    config = load_config(target)
    assert config.model_folder.folder == str(folder)
    assert config.model_folder.sequence_length == 8192
    assert (config.zero.stage, config.train.batch) == (3, 32)


def test_blocks_of_a_folder_have_their_names(capsys, folder: Path):
    words = [folder, "--cluster", "h100", "--sequence", "8192", "--batch", "8"]
    out = run(capsys, *words, "--fix", "recompute=block")
    assert "recompute=('model.layers.*',)" in out
    assert 'modules = ["model.layers.*"]' in out


def test_a_model_of_images_has_a_name(capsys):
    words = ["coatnet-0", "--cluster", "h100", "--devices", "8", "--batch", "512"]
    out = run(capsys, *words, "--image-size", "96", "--explain")
    assert out.startswith("coatnet-0, 25 million parameters, on 8 x NVIDIA H100 SXM (1 node)")
    assert "512 images of 96 x 96 pixels a step" in out
    assert "ParallelPlan(dp=8" in out
    assert "pyops train" not in out
    for wrong, message in (
        (["--sequence", "64"], "--sequence 64: coatnet-0 has images; give --image-size"),
        (["--write", "plan.toml"], "--write plan.toml: pyops train has no task for images"),
        (["--image-size", "100"], "image_size is 100, which is no multiple of 32"),
        (["--codec", "int8"], "not counted for models of images"),
    ):
        assert message in refused(capsys, *words, *wrong)
    assert "there is no CoAtNet '11'" in refused(capsys, "coatnet-11", "--cluster", "h100")


def test_a_file_on_a_laptop(capsys, file: Path, tmp_path: Path):
    target = tmp_path / "plan.toml"
    out = run(capsys, file, "--cluster", "laptop", "--explain", "--write", target)
    assert "16 rows of 32 tokens a step" in out  # of [train] batch
    for part in ("why not simpler", "copies: T_sync", "figures of the cluster", "torchrun"):
        assert part in out
    ours, theirs = load_config(target).model, load_config(file).model
    assert ours == theirs


def test_json_is_read_again(capsys, file: Path):
    text = run(capsys, file, "--cluster", "a100", "--json", "--batch", "64")
    plan = Plan.from_json(text)
    assert plan.layout.batch == 64
    assert plan.cluster.name.startswith("A100")


def quick(*, ranks: int) -> classmethod:
    """A machine that takes no time to measure."""
    rates = dict.fromkeys(WIDTHS, 20e9)
    made = Machine("a machine", {"fp32": rates, "bf16": rates}, 10e9, 8.0, ranks, 5e-5, 2e9)
    return classmethod(lambda cls: made)


def test_this_machine_is_planned_for_and_the_best_are_tried(capsys, file: Path, monkeypatch):
    monkeypatch.setattr(Machine, "here", quick(ranks=1))
    out = run(capsys, file, "--measured", "--rows", "4")
    assert "on 1 x a machine" in out
    rows = [line for line in out.splitlines() if line.endswith("measured")]
    assert len(rows) == 3
    assert rows[0].startswith("* ")


def _planned(rank: int, group: Any, file: str, target: str) -> str:
    """The last line that the command prints."""
    here, Machine.here = Machine.__dict__["here"], quick(ranks=2)  # type: ignore[method-assign,assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["plan", file, "--measured", "--write", target]) == 0
    finally:
        Machine.here = here
    return printed.getvalue().splitlines()[-1]


def _started(rank: int, group: Any, words: list[str]) -> int:
    return main(words)


@pytest.mark.full
def test_the_command_of_a_measured_plan_starts(world, file: Path, tmp_path: Path):
    """torchrun reads what it is given, and two ranks train by the rest of it."""
    target = tmp_path / "plan.toml"
    first, second = world(2).run(_planned, str(file), str(target))
    assert first == second
    assert load_config(target).train.batch == 16
    given = get_args_parser().parse_args(shlex.split(first)[1:])
    assert (given.nproc_per_node, given.training_script) == ("2", "pyops")
    assert given.module
    data = tmp_path / "text.txt"
    data.write_bytes(b"one two three four five six seven\n" * 400)
    settings = {
        "data.path": data,
        "data.cache": tmp_path / "cache",
        "train.folder": tmp_path / "runs",
        "train.num_steps": 1,
        "train.num_validation_sequences": 4,
        "train.num_sample_tokens": 0,
        "train.plot": "false",
        "train.tensorboard": "false",
    }
    extra = [f"--set={key}={value}" for key, value in settings.items()]
    assert world(2).run(_started, [*given.training_script_args, *extra]) == [0, 0]


def test_several_devices_are_started_by_torchrun(capsys, file: Path, monkeypatch):
    seen: list[list[str]] = []

    def started(command: list[str], env: dict[str, str]) -> Any:
        seen.append(command)
        assert env["OMP_NUM_THREADS"] == "1"
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(subprocess, "run", started)
    assert main(["plan", str(file), "--measured", "--devices", "2"]) == 3
    (command,) = seen
    given = get_args_parser().parse_args(command[3:])
    assert (given.nproc_per_node, given.training_script) == ("2", "pyops")
    assert given.training_script_args == ["plan", str(file), "--measured", "--devices", "2"]


@pytest.mark.full
def test_a_plan_is_drawn(capsys, file: Path, tmp_path: Path):
    target = tmp_path / "plan.svg"
    run(capsys, file, "--cluster", "laptop", "--draw", target)
    text = target.read_text()
    for part in ("memory of a rank", "a step, seconds", "Amdahl", "Gustafson", "synchronous SGD"):
        assert part in text
    for name, message in (
        ("plan.gif", "give it one of .svg"),
        ("no/plan.svg", "is in a folder that is not there"),
    ):
        assert message in refused(capsys, file, "--measured", "--draw", tmp_path / name)


def test_without_a_cluster_it_is_the_layout_of_a_file(capsys, file: Path):
    out = run(capsys, file, "--ranks", "3")
    assert [line.split()[0] for line in out.splitlines()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "h1000"], "cluster is 'h1000'; known are a100"),
        (["--cluster", "h100", "--devices", "12"], "devices is 12, but a node has 8"),
        (["--cluster", "h100", "--devices", "0"], "devices is 0; give a whole number, 1 or more"),
        (["--cluster", "h100", "--fix", "tp"], "--fix tp is no assignment; write --fix tp=2"),
        (["--cluster", "h100", "--fix", "tp=two"], "--fix tp=two: 'two' is no whole number"),
        (["--cluster", "h100", "--fix", "sequence_parallel=1"], "sequence_parallel=true, or false"),
        (["--cluster", "h100", "--fix", "ep=2"], "fixed has ep='2': pyops has no layer of experts"),
        (["--cluster", "h100", "--memory-part", "2"], "memory_part is 2.0; give a number above 0"),
        (["--cluster", "b200", "--batch", "16"], "precision is 'fp32', for which the file of"),
        (["--cluster", "a100", "--sequence", "64"], "sequence_length is 64, but the table of"),
        (["--cluster", "a100", "--write", "no/where.toml"], "--write no/where.toml: No such file"),
        (["--cluster", "a100", "--batch", "-3"], "batch is -3; give a whole number of rows"),
        (["--cluster", "a100", "--codec", "zip"], "codecs has 'zip'; choose among none, bf16"),
        (["--cluster", "a100", "--image-size", "64"], "--image-size 64: "),
        (["--measured", "--batch", "-3"], "batch is -3; give a whole number of rows"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, file: Path, words: list[str], message: str):
    error = refused(capsys, file, *words)
    assert message in error
    assert error.count("\n") == 1


def test_models_that_are_not_known_are_refused(capsys, folder: Path, tmp_path: Path):
    assert "can't be read" in refused(capsys, tmp_path / "none", "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    assert "costs are not known" in refused(capsys, folder, "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "4096"}))
    assert "hidden_size = '4096'; it must be" in refused(capsys, folder, "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    lone = refused(
        capsys,
        folder / "config.json",
        "--cluster",
        "h100",
        "--write",
        "x.toml",
        "--sequence",
        "8192",
        "--batch",
        "8",
    )
    assert "a config.json alone can't be trained" in lone
