"""Passages: the end of each file held out, rows that know their file, masks that are drawn by
sample and epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pyops.data import DataConfig
from pyops.data.corpus import CorpusError, find_documents
from pyops.data.passages import FAMILIES, Passages, Rows, mask_rows, prepare_passages
from tests.grids import full

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A little of the library, in bytes."""
    cache = tmp_path_factory.mktemp("cache")
    return DataConfig(path="stdlib", cache=str(cache), validation_fraction=0.4, max_bytes=1 << 16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Passages:
    """All of it, in bytes."""
    data = DataConfig(cache=str(tmp_path_factory.mktemp("library")), validation_fraction=0.4)
    return prepare_passages(data, vocab_size=258, length=129)


def test_of_each_file_the_end_is_held_out(library):
    texts = [document.path.read_bytes() for document in find_documents(DataConfig(path="stdlib"))]
    files = library.held_out.files.unique().tolist()
    assert len(files) > 100
    for part in (library.train, library.held_out):
        assert len(set(part.files.tolist()) & set(files)) > 0.9 * len(files)
        for row, file in zip(
            part.tokens[::7, 1:].to(torch.uint8), part.files[::7].tolist(), strict=True
        ):
            place = texts[file].rfind(b"\n", 0, round((len(texts[file]) + 1) * 0.6)) + 1
            own = texts[file][:place] if part is library.train else texts[file][place:] + b"\n"
            assert bytes(row.tolist()) in own, file


def test_as_many_passages_of_each_family_spread_over_its_files(data):
    passages = prepare_passages(data, vocab_size=258, length=32)
    for part in (passages.train, passages.held_out):
        assert part.labels.bincount().tolist() == [len(part.labels) // len(FAMILIES)] * len(
            FAMILIES
        )
        assert bool((part.tokens[:, 0] == 256).all())
        assert int(part.tokens[:, 1:].max()) < 256
        for family in range(len(FAMILIES)):
            assert len(part.files[part.labels == family].unique()) > 1
    fewer = passages.train.fewer(9)
    assert fewer.labels.bincount().tolist() == [9] * len(FAMILIES)
    assert {tuple(row) for row in fewer.tokens.tolist()} <= {
        tuple(row) for row in passages.train.tokens.tolist()
    }
    assert len(fewer.files.unique()) > 2 * len(FAMILIES)
    assert passages.train.fewer(0) is passages.train
    again = prepare_passages(data, vocab_size=258, length=32)
    assert torch.equal(again.train.tokens, passages.train.tokens)
    assert len(passages.text) > 1000


def copies_of(rows: Rows, count: int) -> Tensor:
    """[n, count, T]."""
    return rows.copied(count).tokens.unflatten(0, (len(rows), count))


@pytest.mark.parametrize("every", [16, full(1)])
def test_copies_of_a_passage_begin_between_it_and_the_next(library, every: int):
    for whole in (library.train, library.held_out, library.text):
        part = replace(whole, places=whole.places[::every])
        copies = copies_of(part, 4)
        assert torch.equal(copies[:, 0], part.tokens)
        assert bool((copies[:, :, 0] == library.first).all())
        inside = part.places[:, 0] + 96 + 128 <= part.places[:, 1]
        assert bool(inside.any())
        for copy in range(4):  # 32 tokens further each
            assert torch.equal(
                copies[:, copy, 1 : 129 - 32 * copy][inside],
                part.tokens[:, 1 + 32 * copy :][inside],
            )


def test_no_copy_goes_beyond_its_own_part_of_the_file(library):
    texts = [document.path.read_bytes() for document in find_documents(DataConfig(path="stdlib"))]
    part = library.train
    last = part.places[:, 0] + 2 * 128 > part.places[:, 1]
    assert int(last.sum()) > 20
    for row, file in zip(copies_of(part, 8)[last], part.files[last].tolist(), strict=True):
        place = texts[file].rfind(b"\n", 0, round((len(texts[file]) + 1) * 0.6)) + 1
        assert all(
            bytes(copy) in texts[file][:place] for copy in row[:, 1:].to(torch.uint8).tolist()
        )


def test_copies_of_fewer_passages_are_those_of_these(library):
    fewer = library.train.fewer(5)
    there = {tuple(row.flatten().tolist()) for row in copies_of(library.train, 3)}
    assert {tuple(row.flatten().tolist()) for row in copies_of(fewer, 3)} <= there


@pytest.mark.parametrize("count", [0, 129])
def test_a_count_of_copies_that_there_cannot_be_is_refused(library, count):
    with pytest.raises(ValueError, match=f"copies is {count}; it must be from 1 to 128"):
        copies_of(library.train, count)


@pytest.mark.parametrize("every", [90, full(30)])
def test_the_text_to_begin_with_has_nothing_of_what_is_held_out(library, every: int):
    passages = library
    text = bytes(passages.text.tokens[:, 1:].flatten().to(torch.uint8).tolist())
    rows = [bytes(row.tolist()) for row in passages.held_out.tokens[::every, 1:].to(torch.uint8)]
    found = sum(
        row in text for row in rows
    )  # a line that many files have, such as one of a licence, may be there
    assert found < 0.02 * len(rows)
    own = [bytes(row.tolist()) for row in passages.train.tokens[::every, 1:].to(torch.uint8)]
    assert sum(row in text for row in own) > 0.95 * len(own)


@pytest.mark.parametrize("every", [600, full(300)])
def test_each_row_of_the_text_says_which_file_it_is_from(library, every: int):
    passages = library
    sources = passages.text.files
    assert int(sources.min()) == 0
    assert int(sources.max()) == 257
    texts = [
        Path(document.path).read_bytes() for document in find_documents(DataConfig(path="stdlib"))
    ]
    found: dict[int, set[int]] = {}
    for row in range(0, len(passages.text), every):
        needle = bytes(passages.text.cut(torch.tensor([row]))[0, 1:].to(torch.uint8).tolist())
        where = [number for number, text in enumerate(texts) if needle in text]
        if len(where) == 1:  # neither in several files nor across two
            found.setdefault(where[0], set()).add(int(sources[row]))
    assert len(found) > 100
    assert all(len(numbers) == 1 for numbers in found.values())
    order = [found[file].pop() for file in sorted(found)]
    assert order == sorted(order)
    assert len(set(order)) > 50


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train.stream", lambda tokens: tokens[: len(tokens) // 2], "rows beyond the text"),
        ("held_out.stream", lambda tokens: tokens + 300, "tokens of 258 and more"),
        ("train.places", lambda places: places[:, :3], r"not [n, 4]"),
        ("held_out.places", lambda places: places[:0], r"not [n, 4]"),
    ],
)
def test_a_damaged_cache_is_named(tmp_path, name, damage, message):
    data = DataConfig(
        path="stdlib", cache=str(tmp_path), validation_fraction=0.4, max_bytes=1 << 16
    )
    path = tmp_path / prepare_passages(data, vocab_size=258, length=32).digest / f"{name}.npy"
    np.save(path, damage(np.load(path)))
    with pytest.raises(
        CorpusError, match=rf"{path.parent} is damaged .*delete that folder"
    ) as caught:
        prepare_passages(data, vocab_size=258, length=32)
    assert message in str(caught.value)


def test_masks_are_those_of_the_sample_and_the_epoch(data):
    passages = prepare_passages(data, vocab_size=258, length=32)
    samples = torch.arange(400)
    tokens = passages.train.tokens[:400]
    given, masked = mask_rows(tokens, passages=passages, samples=samples, seed=3, epoch=0)
    assert masked.sum(dim=1).tolist() == [5] * 400  # 15 % of 31
    assert not bool(masked[:, 0].any())
    assert torch.equal(given[~masked], tokens[~masked])
    parts = [
        float((given[masked] == value).float().mean()) for value in (passages.mask, tokens[masked])
    ]
    assert abs(parts[0] - 0.8) < 0.03
    assert abs(parts[1] - 0.1) < 0.03
    other = mask_rows(tokens, passages=passages, samples=samples, seed=3, epoch=1)[1]
    assert not torch.equal(other, masked)
    assert torch.equal(
        mask_rows(tokens[9:10], passages=passages, samples=samples[9:10], seed=3, epoch=0)[1][0],
        masked[9],
    )
