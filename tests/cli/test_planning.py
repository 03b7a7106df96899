"""`pyops plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyops.cli import main
from pyops.config import load_config
from pyops.plan import Machine, Plan
from pyops.plan.machine import WIDTHS

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


def test_this_machine_is_planned_for(capsys, file: Path, monkeypatch):
    wide = dict.fromkeys(WIDTHS, 20e9)
    made = Machine("a machine", {"fp32": wide, "bf16": wide}, 10e9, 8.0, 1, 5e-5, 2e9)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: made))
    out = run(capsys, file, "--measured", "--devices", "4")
    assert "on 4 x a machine" in out


def test_without_a_cluster_it_is_the_layout_of_a_file(capsys, file: Path):
    out = run(capsys, file, "--ranks", "3")
    assert [line.split()[0] for line in out.splitlines()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "h1000"], "cluster is 'h1000'; known are a100"),
        (["--cluster", "h100", "--devices", "12"], "devices is 12, but a node has 8"),
        (["--cluster", "h100", "--fix", "tp"], "--fix tp is no assignment; write --fix tp=2"),
        (["--cluster", "h100", "--fix", "tp=two"], "--fix tp=two: 'two' is no whole number"),
        (["--cluster", "h100", "--fix", "sequence_parallel=1"], "sequence_parallel=true, or false"),
        (["--cluster", "h100", "--fix", "cp=2"], "fixed has 'cp', which a layout has not"),
        (["--cluster", "h100", "--memory-part", "2"], "memory_part is 2.0; give a number above 0"),
        (["--cluster", "b200", "--batch", "16"], "precision is 'fp32', for which the file of"),
        (["--cluster", "a100", "--sequence", "64"], "sequence_length is 64, but the table of"),
        (["--cluster", "a100", "--write", "no/where.toml"], "--write no/where.toml: No such file"),
        (["--cluster", "a100", "--batch", "-3"], "batch is -3; give a whole number of rows"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, file: Path, words: list[str], message: str):
    error = refused(capsys, file, *words)
    assert message in error
    assert error.count("\n") == 1


def test_models_that_are_not_known_are_refused(capsys, folder: Path, tmp_path: Path):
    assert "can't be read" in refused(capsys, tmp_path / "none", "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mixtral"}))
    assert "costs are not known" in refused(capsys, folder, "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "4096"}))
    assert "hidden_size = '4096'; it must be" in refused(capsys, folder, "--cluster", "h100")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    lone = refused(capsys, folder / "config.json", "--cluster", "h100", "--write", "x.toml",
                   "--sequence", "8192", "--batch", "8")  # fmt: skip
    assert "a config.json alone can't be trained" in lone
