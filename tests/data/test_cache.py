"""The token cache: built once, by one rank, whole or not there; what is wrong with it is said on
every rank."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from pyops.data import CorpusError, DataConfig, bigram_loss, cache, count_pairs, prepare

pytestmark = pytest.mark.cpu_only

TEXT = "".join(f"line {i} of the text: {i * i}\n" for i in range(400))


def config_of(tmp_path: Path, text: str = TEXT, **more: object) -> DataConfig:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "text").write_text(text)
    return DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"), **more)  # type: ignore[arg-type]


def test_the_text_is_split_in_order(tmp_path):
    corpus = prepare(config_of(tmp_path, validation_fraction=0.25))
    whole = TEXT.encode() + b"\n"
    assert bytes(corpus.train) + bytes(corpus.validation) == whole
    assert corpus.train.size == round(len(whole) * 0.75)
    train, held_out = whole[: corpus.train.size], whole[corpus.train.size :]
    assert corpus.bigram_loss == pytest.approx(
        bigram_loss(count_pairs(train), count_pairs(held_out))
    )
    assert isinstance(corpus.train, np.memmap)


def test_pieces_do_not_change_what_comes_out(tmp_path, monkeypatch):
    whole = prepare(config_of(tmp_path / "a"))
    monkeypatch.setattr("pyops.data.corpus.PIECE_BYTES", 100)
    pieces = prepare(config_of(tmp_path / "b"))
    assert whole.digest == pieces.digest
    assert bytes(whole.train) == bytes(pieces.train)
    assert whole.bigram_loss == pieces.bigram_loss


def test_the_cache_is_used_until_text_or_settings_change(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    digests = [prepare(config).digest]

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_build", refuse)
        assert prepare(config).digest == digests[0]
        with pytest.raises(AssertionError, match="built again"):
            prepare(config_of(tmp_path, validation_fraction=0.2))
    digests.append(prepare(config_of(tmp_path, validation_fraction=0.2)).digest)
    digests.append(prepare(config_of(tmp_path, max_bytes=5000)).digest)
    digests.append(prepare(config_of(tmp_path, TEXT + "x")).digest)
    assert len(set(digests)) == 4
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted(digests)


def test_pairs(tmp_path):
    corpus = prepare(config_of(tmp_path, tokenizer="bpe"), vocab_size=300)
    assert corpus.train.dtype == np.uint16
    assert corpus.tokenizer.vocab_size <= 300
    assert (
        corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.validation)
        == TEXT + "\n"
    )
    by_bytes = prepare(config_of(tmp_path))
    assert corpus.bigram_loss == by_bytes.bigram_loss
    assert corpus.train.size < by_bytes.train.size


@pytest.mark.parametrize(("text", "part"), [("tiny", "train"), ("x" * 200, "validation")])
def test_shorter_than_one_sequence(tmp_path, text, part):
    with pytest.raises(
        CorpusError, match=rf"text is shorter than one sequence: its {part} part has .* lower model"
    ):
        prepare(config_of(tmp_path, text), sequence_length=64)


def test_a_vocabulary_without_room_for_bytes(tmp_path):
    with pytest.raises(CorpusError, match=r"model.vocab_size is 100; set it to 256"):
        prepare(config_of(tmp_path), vocab_size=100)


def test_a_damaged_cache_is_named(tmp_path):
    config = config_of(tmp_path)
    folder = tmp_path / "cache" / prepare(config).digest
    (folder / "train.bin").write_bytes(b"123")
    with pytest.raises(
        CorpusError, match=rf"{folder} is damaged .*train.bin has 3 bytes.*delete that folder"
    ):
        prepare(config)


def test_a_full_disk_leaves_nothing_half_done(tmp_path, monkeypatch):
    config = config_of(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as patch,
        pytest.raises(CorpusError, match=r"No space left on device; make room there"),
    ):
        patch.setattr(cache.os, "fsync", full)
        prepare(config)
    assert list((tmp_path / "cache").iterdir()) == []
    assert prepare(config).train.size > 0


def test_a_run_that_comes_second_takes_what_the_first_built(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    inner = cache._build

    def slower(*arguments: object, **more: object) -> None:
        inner(*arguments, **more)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_build", inner)
            prepare(config)  # another run, quicker than this one

    monkeypatch.setattr(cache, "_build", slower)
    corpus = prepare(config)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [corpus.digest]


def prepare_on_ranks(rank, group, path, folder):
    """What each rank gets, or is told; and which of them built."""
    built = []
    inner = cache._build
    cache._build = lambda *a, **k: (built.append(rank), inner(*a, **k))
    try:
        corpus = prepare(DataConfig(path=path, cache=folder), sequence_length=32, group=group)
        return built, bytes(corpus.train[:50]), corpus.digest
    except CorpusError as error:
        return built, str(error)
    finally:
        cache._build = inner


def test_rank_0_builds_for_all(world, tmp_path):
    config = config_of(tmp_path)
    first, second = world(2).run(prepare_on_ranks, config.path, config.cache)
    assert first[0] == [0]
    assert second[0] == []
    assert first[1:] == second[1:]
    assert first[1] == TEXT.encode()[:50]


@pytest.mark.parametrize("text", ["", "short", None])
def test_all_ranks_are_told_alike(world, tmp_path, text):
    path = tmp_path / "text"
    if text is not None:
        path.write_text(text)
    first, second = world(2).run(prepare_on_ranks, str(path), str(tmp_path / "cache"))
    assert first[1] == second[1]
    assert str(path) in first[1]
