"""`pyops convert` between checkpoints and Hugging Face folders, whatever ranks wrote them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pyops import hub
from pyops.checkpoint import load, save
from pyops.cli.commands import main
from pyops.flat import Placement
from pyops.models import GPT
from tests.hub.test_folders import GPT2, LLAMA, MODELS, same, tell

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("kind", "config"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
def test_to_a_checkpoint_and_back(tmp_path, capsys, kind, config):
    hub.save(kind(config, seed=3), tmp_path / "hub")
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "c")]) == 0
    state, _ = load(tmp_path / "c")
    model = kind(type(config)(**state["model_config"]), seed=9)
    model.load_state_dict(state["model"])
    assert same(model, kind(config, seed=3))
    assert (
        main(
            [
                "convert",
                str(tmp_path / "c"),
                str(tmp_path / "again"),
                "--like",
                str(tmp_path / "hub"),
            ]
        )
        == 0
    )
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hub" / file).read_bytes()
    assert "tensors, " in capsys.readouterr().out


def save_parts(rank: int, group: Any, folder: str) -> None:
    model = GPT(LLAMA, seed=3, group=group)
    places = Placement.of(model)
    parts = {
        n: places[n].shards(p.detach().flatten())
        if n in places and places[n].dim is not None
        else p.detach()
        for n, p in model.named_parameters()
    }
    save(folder, {"model": parts, "model_config": asdict(LLAMA)}, group=group)


def test_of_two_ranks(world, tmp_path):
    world(2).run(save_parts, str(tmp_path / "c"))
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "hub"), "--dtype", "bfloat16"]) == 0
    assert same(hub.load(tmp_path / "hub"), GPT(LLAMA, seed=3).to(torch.bfloat16))
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) == 0
    assert "blocks.0.attention.q.weight" in load_file(tmp_path / "m.safetensors"), (
        "a file has our names"
    )


def test_what_can_be_put_right_is_one_line(tmp_path, capsys):
    def error(*arguments: str) -> str:
        assert (
            main(
                [
                    "convert",
                    *(str(tmp_path / a) if not a.startswith("--") else a for a in arguments),
                ]
            )
            == 2
        )
        return capsys.readouterr().err

    hub.save(GPT(GPT2), tmp_path / "hub")
    save(tmp_path / "c", {"model": GPT(GPT2).state_dict(), "model_config": asdict(GPT2)})
    save(tmp_path / "other", {"weights": torch.ones(2)})
    save(
        tmp_path / "cnn", {"model": {"w": torch.ones(2)}, "model_config": {}, "model_class": "CNN"}
    )
    save(tmp_path / "old", {"model": {"w": torch.ones(2)}, "model_config": asdict(GPT2)})
    assert (
        'has no "model" and "model_config", as those of pyops train have; name one, or a '
        "file.safetensors" in error("other", "x")
    )
    assert (
        "holds a 'CNN', which is no model that can be written; these are GPT, BERT, T5, ViT"
        in error("cnn", "x")
    )
    assert "lacks ['embedding.token.weight'" in error("old", "x")
    assert "hub is there already" in error("c", "hub")
    assert "c is there already" in error("hub", "c")
    assert "--like" in error("hub", "y", "--like", "hub")
    tell(tmp_path / "hub", model_type="mamba")
    assert "not known; known are" in error("hub", "y")
    assert not (tmp_path / "x").exists()
