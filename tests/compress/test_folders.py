"""Folders of models: what goes with the weights, in which numbers they are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pyops import hub, pruning, quantized
from pyops.compress import load_model
from pyops.compress.folders import file_bytes, form_of, write_model
from pyops.hub import HubError
from pyops.mesh import ALONE
from pyops.models import BERT, GPT, BERTConfig
from pyops.tensor_parallel import Ranks
from tests.compress.tiny_folder import make_folder, model_of

pytestmark = pytest.mark.cpu_only

RANKS = Ranks.of(ALONE)
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_folder(tmp_path_factory.mktemp("folders") / "gpt", num_layers=1)
    (found / "generation_config.json").write_text('{"eos_token_id": 0}')
    return found


def written(
    folder: Path, output: Path, form: str, *, dtype: torch.dtype = torch.float32
) -> tuple[GPT, Any]:
    """The model that was written, and its masks where it is pruned."""
    model, masks = model_of(folder), None
    if form == "quantized":
        quantized.convert(model, quantized.Scheme(quantized.Int8()))
    elif form != "dense":
        model, masks = model.to(dtype), None
        masks = pruning.nm_masks(model, pruning.NM(2, 4))
    write_model(model, output, source=folder, ranks=RANKS, form=form, dtype=dtype)
    return model, masks


@pytest.mark.parametrize("form", ["dense", "packed", "2:4", "quantized"])
def test_what_lies_beside_the_weights_goes_with_them(folder, tmp_path, form):
    model, _ = written(folder, tmp_path / "out", form)
    assert form_of(tmp_path / "out") == form
    for name in BESIDE:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    again = load_model(tmp_path / "out", ranks=RANKS)
    assert not again.training
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens), model.eval()(tokens))


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_numbers_are_of_the_dtype_asked_for(folder, tmp_path, form):
    """And the model in memory stays as it is."""
    model, _ = written(folder, tmp_path / "out", form, dtype=torch.bfloat16)
    if form == "dense":
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        kinds = {w.dtype for w in load_file(tmp_path / "out" / "model.safetensors").values()}
        assert kinds == {torch.bfloat16}
    assert file_bytes(tmp_path / "out") < 0.6 * file_bytes(folder)
    for dtype in (None, torch.float32):
        again = load_model(tmp_path / "out", ranks=RANKS, dtype=dtype)
        assert {p.dtype for p in again.parameters()} == {dtype or torch.bfloat16}
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs.bfloat16().to(ours.dtype))


GOOD = {"version": 1, "form": "quantized", "model": {}}


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("[", r"damaged \(Expecting"),
        ("[]", "damaged"),
        (json.dumps({**GOOD, "version": 2}), r"damaged \(version 2, form 'quantized'\)"),
        (json.dumps({**GOOD, "form": "dense"}), r"damaged \(version 1, form 'dense'\)"),
        (json.dumps({**GOOD, "model": 3}), r"damaged \(model is no object\)"),
        (json.dumps({**GOOD, "model": {"layers": 3}}), "damaged .*layers"),
    ],
)
def test_a_damaged_note_is_named(tmp_path, note, said):
    (tmp_path / "compressed.json").write_text(note)
    with pytest.raises(HubError, match=rf"compressed\.json is {said}.*; compress the model anew"):
        load_model(tmp_path, ranks=RANKS)


def test_weights_that_are_missing_are_named(folder, tmp_path):
    written(folder, tmp_path / "out", "quantized")
    (tmp_path / "out" / "quantized.safetensors").unlink()
    with pytest.raises(HubError, match=r"out is damaged .*; compress the model anew"):
        load_model(tmp_path / "out", ranks=RANKS)


def test_a_model_that_does_not_continue_a_text_is_refused(tmp_path):
    sizes = BERTConfig(vocab_size=16, sequence_length=8, num_layers=1, num_heads=2, dim=8)
    hub.save(BERT(sizes), tmp_path / "bert")
    with pytest.raises(HubError, match="of type 'bert', which does not predict the token"):
        load_model(tmp_path / "bert", ranks=RANKS)
