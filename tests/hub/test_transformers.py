"""What transformers computes from a folder, pyops computes at any number of ranks, and writes back
bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pyops import hub
from tests.grids import full
from tests.hub.bodies import load_and_run, outputs_of
from tests.hub.families import FAMILIES, Family, write_folder

pytestmark = pytest.mark.cpu_only

# (ranks, whether tokens are shared out). What is cut is the same with and without; four ranks and
# shared tokens are met one by one.
LAYOUTS = [full(2, False), (2, True), (4, False), full(4, True)]
Made = tuple[Path, list[Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("folders") / request.param
    outputs, given = write_folder(FAMILIES[request.param], folder)
    return folder, outputs, given


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted, strict=True):
        assert w.std() > 0.1, "outputs this small show nothing"
        assert (f - w).abs().max() <= 1e-5, (f - w).abs().max()


def test_outputs_are_those_of_transformers(made):
    folder, outputs, given = made
    assert_same(outputs_of(hub.load(folder), given), outputs)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), LAYOUTS)
def test_outputs_on_several_ranks(world, made, ranks, sequence_parallel):
    folder, outputs, given = made
    for found, _ in world(ranks).run(load_and_run, str(folder), given, sequence_parallel, None):
        assert_same(found, outputs)


def assert_same_folder(written: Path, folder: Path) -> None:
    found, wanted = (
        load_file(written / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    wanted.pop(
        "roformer.encoder.embed_positions.weight", None
    )  # sines and cosines, which no model has to learn
    assert list(sorted(found)) == list(sorted(wanted))
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ranks", [1, full(2), 4])
def test_what_is_written_back_has_the_same_bits(world, made, ranks, tmp_path):
    folder, _, given = made
    if ranks == 1:
        hub.save(hub.load(folder), tmp_path / "w")
    else:
        world(ranks).run(load_and_run, str(folder), given, True, str(tmp_path / "w"))
    assert_same_folder(tmp_path / "w", folder)


def test_transformers_reads_what_is_written(made, tmp_path):
    folder, outputs, given = made
    hub.save(hub.load(folder), tmp_path / "w", like=folder)
    family: Family = FAMILIES[folder.name]
    again = family.model.from_pretrained(tmp_path / "w").eval()
    with torch.no_grad():
        found: Any = again(**given)
    assert torch.equal(
        found.prediction_logits if folder.name == "bert" else found.logits, outputs[0]
    )
    before, after = family.model.from_pretrained(folder).config.to_dict(), again.config.to_dict()
    differing = {key for key in before | after if before.get(key) != after.get(key)}
    assert differing <= {"_name_or_path", "n_inner"}, "n_inner of None is 4 n_embd"


def test_losses_are_those_of_transformers(made):
    folder, _, given = made
    family, model = FAMILIES[folder.name], hub.load(folder)
    theirs = family.model.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    if folder.name == "vit":
        labels = torch.tensor([0, 4, 2])
        found = model.loss(given["pixel_values"], labels)
        wanted: Any = theirs(**given, labels=labels).loss
    else:
        shape = given.get("decoder_input_ids", given["input_ids"]).shape
        labels = torch.randint(53, shape, generator=generator).masked_fill(
            torch.rand(shape, generator=generator) < 0.3, -100
        )
        mask = given["attention_mask"].bool() if "attention_mask" in given else None
        more = {"next_sentence_label": torch.tensor([0, 1, 1])} if folder.name == "bert" else {}
        wanted = theirs(
            **{k: v for k, v in given.items() if k != "decoder_input_ids"}, labels=labels, **more
        ).loss
        if folder.name.startswith("t5"):
            found = model.loss(given["input_ids"], labels, mask=mask)
        elif folder.name.startswith("bert"):
            next_B = more.get("next_sentence_label")
            found = model.loss(
                given["input_ids"], labels, types=given["token_type_ids"], mask=mask, next_B=next_B
            )
        else:  # they shift labels by one themselves
            found = model.loss(
                given["input_ids"], torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
            )
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)
