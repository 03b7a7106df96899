"""A run leaves a folder with the model that its table is of, and nothing where it fails."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyops.cli import main
from pyops.compress import CompressReport, FinetuneStep, compress, run
from pyops.compress.methods.apply import METHODS
from pyops.config import ConfigError
from pyops.data.folder_text import RowOptions
from pyops.models import score
from pyops.train.pretrained.folder_use import UseOptions, evaluated
from tests.compress.tiny_folder import LENGTH, make_folder, model_of, run_of

pytestmark = pytest.mark.cpu_only

DISTILL = {
    "method": "distill",
    "keep": [0, 3],
    "hard": 0.0,
    "num_steps": 30,
    "lr": 1e-3,
    "warmup_steps": 3,
}
FINETUNE = {"method": "finetune", "num_steps": 30, "lr": 5e-3, "warmup_steps": 3}
PRUNE = {"method": "prune", "sparsity": 0.5}
QUANTIZE = {"method": "quantize"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("compress") / "gpt")


def loss_of(folder: Path | str) -> float:
    """Nats per token of the text held out, by another way."""
    place = Path(folder).parent
    ids = run.FolderModel.read(str(folder)).tokenizer.encode((place / "held_out.txt").read_text())
    rows = torch.from_numpy(ids).long()
    if rows[-1] != 0:
        rows = torch.cat([rows, torch.tensor([0])])
    nats, count = 0.0, 0
    for row in rows.split(LENGTH):
        if len(row) > 1:
            nats -= float(score(model_of(folder), row[None]))
            count += len(row) - 1
    return nats / count


@pytest.fixture(scope="module")
def small(folder: Path) -> tuple[CompressReport, dict[str, torch.Tensor]]:
    """A run of two steps with all that is measured, and the model's logits when it was written."""
    told: dict[str, torch.Tensor] = {}
    tokens = torch.arange(LENGTH)[None] % 40

    def write(model: Any, place: Path, **options: Any) -> None:
        told["logits"] = model(tokens).detach()
        genuine(model, place, **options)

    genuine = run.write_model
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "write_model", write)
        config = run_of(
            folder, "small", DISTILL, FINETUNE, measure={"rounds": 3, "batch": 2, "picture": True}
        )
        report = compress(config, device="cpu", say=lines.append)
    assert lines == ["step 1 of 2: distill 2 layers", "step 2 of 2: finetune", "measuring"]
    told["again"] = model_of(report.output)(tokens).detach()
    return report, told


def test_each_row_of_the_table_is_of_the_model_after_its_step(folder, small):
    report, _ = small
    before, distilled, tuned = report.stages
    assert math.isclose(before.loss, loss_of(folder), rel_tol=1e-5)
    assert math.isclose(tuned.loss, loss_of(report.output), rel_tol=1e-5)
    assert tuned.loss < 0.97 * distilled.loss, "the last step shows"
    kept = model_of(report.output)
    assert before.num_parameters == sum(p.numel() for p in model_of(folder).parameters())
    assert tuned.num_parameters == sum(p.numel() for p in kept.parameters())
    assert distilled.num_parameters == tuned.num_parameters < before.num_parameters
    files = list(Path(report.output).glob("*.safetensors"))
    assert tuned.file_bytes == sum(path.stat().st_size for path in files)
    assert before.file_bytes == (folder / "model.safetensors").stat().st_size
    assert tuned.tensor_bytes == 4 * tuned.num_parameters < before.tensor_bytes
    assert before.num_parameters - tuned.num_parameters == sum(
        p.numel() for block in kept.blocks for p in block.parameters()
    ), "two layers of four are gone"


def test_the_folder_out_has_the_logits_of_the_model_that_was_written(small):
    _, told = small
    assert torch.equal(told["logits"], told["again"])


def test_the_student_learns_from_the_teacher(small):
    report, _ = small
    facts = report.stages[1].facts
    assert facts["last_loss"] < 0.5 * facts["first_loss"]


def test_others_use_the_folder_out(small):
    report, _ = small
    place = Path(report.output).parent
    found = evaluated(
        report.output,
        place / "held_out.txt",
        UseOptions(device="cpu"),
        rows=RowOptions(LENGTH, keeps_rest=True),
        cache=str(place / "cache"),
    )
    assert math.isclose(found.loss, report.stages[-1].loss, rel_tol=1e-5)
    assert found.num_tokens == report.num_tokens


def test_table_json_and_picture_say_the_same(small):
    report, _ = small
    place = Path(report.output)
    told = json.loads((place / "compression.json").read_text())
    assert [stage["loss"] for stage in told["stages"]] == [s.loss for s in report.stages]
    assert told["stages"][1]["options"]["keep"] == [0, 3]
    table = report.table()
    picture = (place / "compression.svg").read_text()
    for number, stage in enumerate(report.stages):
        assert f"{stage.loss:.4f}" in table
        assert (f"{number} {stage.name}" if number else stage.name) in table
        assert f"<!-- {stage.name} -->" in picture
        assert stage.token_ms is not None
        assert 0 < stage.token_ms.low <= stage.token_ms.median <= stage.token_ms.high
    assert not place.with_name("small.tmp").exists()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.glob("never*"))


def test_a_step_that_does_nothing_is_seen(folder, monkeypatch):
    monkeypatch.setitem(METHODS, FinetuneStep, lambda work, step: {})
    with pytest.raises(ConfigError, match="step 1: finetune has left every weight as it was"):
        compress(run_of(folder, "never", FINETUNE), device="cpu")
    assert left(folder) == []


def test_a_folder_with_another_model_is_seen(folder, monkeypatch):
    """What is written is read again, and compared with what is in memory."""
    genuine = run.write_model

    def write(model: Any, place: Path, **options: Any) -> None:
        genuine(model_of(folder), place, **options)

    monkeypatch.setattr(run, "write_model", write)
    with pytest.raises(RuntimeError, match=r"has a loss of .* when it is read again"):
        compress(run_of(folder, "never", {**FINETUNE, "num_steps": 5}), device="cpu")
    assert left(folder) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"folder": "none"}, "none/config.json does not exist; name a folder"),
        ({"output": "train.txt"}, "train.txt is there already; name another"),
        ({"keep": [1, 4]}, "step 1 (distill): keep is [1, 4], but the model has 4 layers then"),
        ({"keep": [0, 1], "again": [2]}, "step 2 (distill): keep is [2], but the model has 2"),
        ({"data": {"train": "none.txt"}}, "none.txt does not exist"),
        ({"data": {"sequence_length": 65}}, "data.sequence_length is 65, but the model of"),
        ({"measure": {"new_tokens": 99}}, "new_tokens are 107 together, but the model of"),
        ({"batch": 999}, "fewer than a batch of 999"),
        ({"then": {**PRUNE, "only": ["blocks.2.*"]}}, "(prune): only: 'blocks.2.*' matches none"),
        ({"then": {"method": "prune", "pattern": "3:5"}}, "no multiple of 5"),
        ({"then": {**QUANTIZE, "only": ["*.upp"]}}, "step 2 (quantize): only: '*.upp' matches"),
        ({"then": {**QUANTIZE, "weights": "int4", "group": 24}}, "has 32 inputs on a rank; give"),
        ({"then": {**FINETUNE, "rank": 33}}, "step 2 (finetune): rank is 33, but blocks.0"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_step(folder, monkeypatch, changes, said):
    monkeypatch.setattr(run, "apply_step", lambda *_: pytest.fail("a step ran"))
    distill = {**DISTILL, "batch": changes.get("batch", 4), "keep": changes.get("keep", [0, 1])}
    steps = [distill] + ([{**DISTILL, "keep": changes["again"]}] if "again" in changes else [])
    steps += [changes["then"]] if "then" in changes else []
    place = folder.parent / changes["folder"] if "folder" in changes else folder
    sections = {name: changes[name] for name in ("data", "measure") if name in changes}
    with pytest.raises(ValueError) as refused:
        compress(run_of(place, changes.get("output", "never"), *steps, **sections), device="cpu")
    assert said in str(refused.value)
    assert left(folder) == []


def test_a_place_where_nothing_can_be_written_is_refused_before_a_step(folder, monkeypatch):
    """Beneath a file no folder can be made, as where a process may not write."""
    monkeypatch.setattr(run, "apply_step", lambda *_: pytest.fail("a step ran"))
    with pytest.raises(ConfigError, match=r"train.txt/out can't be written: .*train.txt is no fol"):
        compress(run_of(folder, "train.txt/out", QUANTIZE), device="cpu")
    assert left(folder) == []


def test_weights_that_are_not_finite_are_refused_before_a_step(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "apply_step", lambda *_: pytest.fail("a step ran"))
    shutil.copytree(folder, tmp_path / "gpt")
    for name in ("train.txt", "held_out.txt"):
        shutil.copy(folder.parent / name, tmp_path)
    path = tmp_path / "gpt" / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"blocks.1.mlp.up.bias has a number that is not finite"):
        compress(run_of(tmp_path / "gpt", "out", QUANTIZE), device="cpu")
    assert sorted(found.name for found in tmp_path.iterdir() if found.name != "cache") == [
        "gpt",
        "held_out.txt",
        "train.txt",
    ]


def refused_on_rank(rank: int, group: object, folder: Path) -> list[str]:
    """What is said where one rank has a step that does not fit, and where all have."""
    said = []
    for step in ({**DISTILL, "keep": [0, 9 if rank else 1]}, {**PERMUTED, "num_steps": 0}):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as refused:
            patch.setattr(run, "apply_step", lambda *_: pytest.fail("a step ran"))
            compress(run_of(folder, "never", FINETUNE, step), device="cpu")
        said.append(str(refused.value))
    return said


PERMUTED = {"method": "prune", "pattern": "2:4", "permute": True}


def test_every_rank_refuses_what_does_not_fit(folder, world):
    first, second = world(2).run(refused_on_rank, folder)
    assert first == second
    assert "step 2 (distill): keep is [0, 9], but the model has 4 layers" in first[0]
    assert "step 2 (prune): permute wants the whole model on a rank, and 2 share" in first[1]
    assert left(folder) == []


def losses_on_rank(rank: int, group: object, folder: Path) -> list[float]:
    steps = {**DISTILL, "num_steps": 6, "keep": [0, 1, 2]}, {**FINETUNE, "num_steps": 6, "rank": 2}
    report = compress(run_of(folder, "shared", *steps, measure={"rounds": 1}), device="cpu")
    torch.distributed.barrier()
    assert report.num_ranks == 2
    return [stage.loss for stage in report.stages]


@pytest.mark.full  # ranks of single steps stand in the suite
def test_two_ranks_that_share_the_layers_find_what_one_does(folder, world):
    found = world(2).run(losses_on_rank, folder)
    assert found[0] == found[1]
    steps = {**DISTILL, "num_steps": 6, "keep": [0, 1, 2]}, {**FINETUNE, "num_steps": 6, "rank": 2}
    alone = compress(run_of(folder, "alone", *steps), device="cpu")
    for ours, theirs in zip(found[0], alone.stages, strict=True):
        assert math.isclose(ours, theirs.loss, rel_tol=2e-4)
    shared = model_of(folder.parent / "shared").state_dict()
    for name, tensor in model_of(alone.output).state_dict().items():
        assert torch.allclose(shared[name], tensor, atol=2e-3), name


def test_the_command_prints_the_table(folder, capsys):
    config = folder.parent / "run.toml"
    config.write_text(
        f"""
        [model]
        folder = "{folder}"
        output = "{folder.parent / "by_command"}"
        [data]
        train = "{folder.parent / "train.txt"}"
        sequence_length = {LENGTH}
        cache = "{folder.parent / "cache"}"
        [measure]
        rounds = 0
        picture = false
        [[step]]
        method = "finetune"
        num_steps = 3
        """
    )
    assert main(["compress", str(config), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "step 1 of 1: finetune" in shown
    assert "1 finetune" in shown
    assert shown.rstrip().endswith(f"folder out: {folder.parent / 'by_command'}")
    assert main(["compress", str(config), "--set", "data.train=none.txt"]) == 2
    shown = capsys.readouterr().err
    assert "by_command is there already" in shown
    assert len(shown.splitlines()) == 1
