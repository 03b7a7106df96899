"""Weights go to one safetensors file and back, whatever ranks wrote them; what would lead astray is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pyops.checkpoint import CheckpointError, load, save
from pyops.checkpoint.convert import export_weights, import_weights
from pyops.cli.commands import main
from pyops.flat import Shard
from pyops.models import GPT, GPTConfig
from tests.checkpoint.test_folder import equal, flip

pytestmark = pytest.mark.cpu_only

W = torch.arange(35.0).view(5, 7)


def save_parts(rank: int, group: Any, path: str) -> None:
    part = (
        Shard((5, 7), (0,), W.flatten()[:11])
        if rank == 0
        else Shard((5, 7), (11,), W.flatten()[11:])
    )
    weights = {"w": part, "n": torch.arange(3), "h": torch.ones(2).half()}
    save(
        path,
        {"model": weights, "step": 3, "optimizer": {"w": {"exp_avg": torch.zeros(5, 7)}}},
        group=group,
    )


def test_of_several_ranks_into_one_file_and_back(world, tmp_path, capsys):
    world(2).run(save_parts, str(tmp_path / "c"))
    file = tmp_path / "model.safetensors"
    assert main(["convert", str(tmp_path / "c"), str(file)]) == 0
    assert f"3 tensors, 40 numbers: {file}" in capsys.readouterr().out
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "without which transformers refuses a file"
    assert equal(load_file(file), {"w": W, "n": torch.arange(3), "h": torch.ones(2).half()})
    assert main(["convert", str(file), str(tmp_path / "d")]) == 0
    assert equal(load(tmp_path / "d")[0], {"model": load_file(file)})
    half = tmp_path / "half.safetensors"
    assert (
        main(["convert", str(tmp_path / "c"), str(half), "--dtype", "bfloat16", "--key", "model"])
        == 0
    )
    assert equal(
        load_file(half), {"w": W.bfloat16(), "n": torch.arange(3), "h": torch.ones(2).bfloat16()}
    )
    assert export_weights(tmp_path / "c", tmp_path / "o.safetensors", key="optimizer.w") == {
        "exp_avg": (5, 7)
    }
    assert not list(tmp_path.glob("*.tmp"))


def test_a_model_starts_from_the_file(tmp_path):
    config = GPTConfig(sequence_length=8, num_layers=1, num_heads=2, dim=8)
    model = GPT(config, seed=1)
    save(tmp_path / "c", {"model": model.state_dict()})
    export_weights(tmp_path / "c", tmp_path / "m.safetensors")
    other = GPT(config, seed=2)
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def hub_folder(folder: Path, **weight_map: str) -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file(
        {"b": torch.zeros(3), "c": torch.ones(1)}, folder / "model-00002-of-00002.safetensors"
    )
    given = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        **weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": given})
    )
    return folder


def test_files_with_an_index(tmp_path):
    assert import_weights(hub_folder(tmp_path / "hub"), tmp_path / "c", key="weights") == {
        "a": (2,),
        "b": (3,),
    }
    assert equal(load(tmp_path / "c")[0], {"weights": {"a": torch.ones(2), "b": torch.zeros(3)}})


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/x.safetensors", "x.bin", "sub/x.safetensors", 5]
)
def test_an_index_that_leads_astray(tmp_path, file):
    with pytest.raises(CheckpointError, match=r"index.json (names the file|is damaged)"):
        import_weights(hub_folder(tmp_path / "hub", c=file), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_index_that_promises_too_much(tmp_path):
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors lacks \['c'\]"):
        import_weights(
            hub_folder(tmp_path / "hub", c="model-00001-of-00002.safetensors"), tmp_path / "c"
        )
    (tmp_path / "hub" / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        import_weights(tmp_path / "hub", tmp_path / "c")


def test_what_can_be_put_right_is_one_line(tmp_path, capsys):
    save(tmp_path / "c", {"model": {"w": W}, "step": 3})
    (tmp_path / "there.safetensors").write_text("mine")
    for arguments, message in [
        (
            [tmp_path / "none", tmp_path / "o"],
            "none is no safetensors file, and no folder with model.safetensors or",
        ),
        (
            [tmp_path / "c", tmp_path / "o"],
            "as those of pyops train have; name one, or a file.safetensors to write",
        ),
        ([tmp_path / "c", tmp_path / "there.safetensors"], "there.safetensors is there already"),
        (
            [tmp_path / "c", tmp_path / "o.safetensors", "--key", "modle"],
            "at 'modle' there is ['model', 'step']; name one",
        ),
        ([tmp_path / "c", tmp_path / "o.safetensors", "--key", "step"], "state['step'] of"),
        ([tmp_path / "there.safetensors", tmp_path / "d"], "there.safetensors can't be read"),
        ([tmp_path / "there.safetensors", tmp_path / "c"], "c is there already"),
    ]:
        assert main(["convert", *map(str, arguments)]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.err.count("\n") == 1
    flip(tmp_path / "c" / "shared.safetensors")
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "o.safetensors")]) == 2
    assert "shared.safetensors is damaged" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "there.safetensors"]
