"""Which rows a run learns from, calibrates on and is scored on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.compress import FinetuneStep
from pyops.compress.text import Texts
from pyops.train.pretrained.folder_model import FolderModel
from tests.compress.tiny_folder import LENGTH, make_folder, run_of

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("texts") / "gpt", num_layers=1)


def texts_of(folder: Path, **data: Any) -> Texts:
    config = run_of(folder, "none", {"method": "finetune"}, data=data)
    tokenizer = FolderModel.read(str(folder)).tokenizer
    return Texts.prepare(config, tokenizer, torch.device("cpu"))


def encoded(folder: Path, name: str) -> Tensor:
    tokenizer = FolderModel.read(str(folder)).tokenizer
    return torch.from_numpy(tokenizer.encode((folder.parent / name).read_text())).long()


def test_the_first_rows_to_learn_from_calibrate(folder):
    """Never a row that models are scored on."""
    found = texts_of(folder, num_calibration_rows=5).to_calibrate(batch=2)
    assert [len(each) for each in found] == [2, 2, 1]
    assert torch.equal(torch.cat(found).flatten(), encoded(folder, "train.txt")[: 5 * LENGTH])
    split = texts_of(folder, held_out="", validation_fraction=0.25, num_calibration_rows=99)
    assert sum(map(len, split.to_calibrate())) == len(split.train) > len(split.held_out)


def test_without_a_file_the_end_of_the_text_is_held_out(folder):
    texts = texts_of(folder, held_out="", validation_fraction=0.25, num_held_out_rows=3)
    train = encoded(folder, "train.txt")
    num_rows = len(train) // LENGTH
    first = num_rows - round(0.25 * num_rows)
    assert list(texts.train) == list(range(first))
    assert list(texts.held_out) == [first, first + 1, first + 2]
    scored = torch.cat([following for _, following in texts.to_score(2)])
    expected = train[first * LENGTH :][: 3 * LENGTH].view(3, LENGTH)
    assert torch.equal(scored, expected[:, 1:])
    assert texts.prompt(5) == expected[0, :5].tolist()
    learnt = torch.cat([a for a, _ in islice(texts.to_learn(FinetuneStep(batch=4)), first // 4)])
    assert len(learnt) == first // 4 * 4
    own = {tuple(row) for row in train[: first * LENGTH].view(-1, LENGTH)[:, :-1].tolist()}
    assert {tuple(row) for row in learnt.tolist()} <= own


def test_the_seed_of_a_step_is_the_order_of_its_rows(folder):
    texts = texts_of(folder)

    def first(seed: int) -> Tensor:
        return next(texts.to_learn(FinetuneStep(batch=6, seed=seed)))[0]

    assert first(0).shape == (6, LENGTH - 1)
    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
