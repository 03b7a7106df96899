"""Shards hold what was written, and a folder that was changed says which file and how."""

from __future__ import annotations

import errno
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.data import CorpusError
from pyops.token_data import ShardIndex, ShardWriter, TokenKind, open_tokens, tokenizer_digest
from tests.token_data.tiny_tokens import numbered, write

pytestmark = pytest.mark.cpu_only

DOCUMENTS = [[1, 2, 3], list(range(40)), [], [7], list(range(100, 160)), [999]]


def documents_of(folder: Path) -> list[list[int]]:
    tokens = open_tokens(folder)
    found = []
    for part in range(len(tokens.parts)):
        starts = tokens.starts_of(part)
        found += [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
    return found


def test_documents_come_back_and_lie_in_one_shard_each(tmp_path):
    folder = write(tmp_path / "t", DOCUMENTS)
    tokens = open_tokens(folder, verify=True)
    assert documents_of(folder) == DOCUMENTS
    assert [part.num_tokens for part in tokens.parts] == [104, 1]
    assert (tokens.num_documents, tokens.num_tokens, len(tokens)) == (6, 105, 105)
    assert tokens.parts[0].dtype == np.uint16
    assert tokens[0:105].tolist() == [t for each in DOCUMENTS for t in each]
    assert tokens.read(100, 5).tolist() == [156, 157, 158, 159, 999], "across two shards"
    assert tokens.place_of(104).endswith("00001.bin, token 0, document 0")


def test_the_end_of_a_document_is_written_behind_each(tmp_path):
    folder = write(tmp_path / "t", DOCUMENTS, end=5)
    assert documents_of(folder) == [[*each, 5] for each in DOCUMENTS]
    assert ShardIndex.load(folder).end_of_document == 5


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=20),
    st.integers(1, 30),
    st.sampled_from([None, 3]),
)
def test_several_at_once_and_in_pieces_are_the_same_bytes(
    tmp_path_factory, documents, shard_tokens, end
):
    """One by one, each in two pieces: the same index, which has the digests of the bytes."""
    folders = [tmp_path_factory.mktemp("t") / name for name in "ab"]
    kind = TokenKind(256, end_of_document=end)
    with ShardWriter(folders[0], kind, shard_tokens=shard_tokens) as writer:
        for each in documents:
            writer.add(np.array(each, dtype=np.int64))
    with ShardWriter(folders[1], kind, shard_tokens=shard_tokens) as writer:
        for each in documents:
            tokens, half = np.array(each, dtype=np.int64), len(each) // 2
            writer.extend(tokens[:half], np.array([half]), goes_on=True)
            writer.extend(tokens[half:], np.array([len(each) - half]))
    indices = [ShardIndex.load(folder) for folder in folders]
    assert indices[0] == indices[1]
    wanted = [each + ([] if end is None else [end]) for each in documents]
    assert documents_of(folders[1]) == wanted


@pytest.mark.parametrize("file", ["00000.bin", "00000.starts", "00001.bin"])
def test_a_truncated_or_longer_shard_is_named(tmp_path, file):
    folder = write(tmp_path / "t", DOCUMENTS)
    path = folder / file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CorpusError, match=rf"{file} is truncated: it has {len(data) - 1} bytes"):
        open_tokens(folder)
    path.write_bytes(data + b"x")
    with pytest.raises(CorpusError, match=rf"{file} is longer than it was written"):
        open_tokens(folder)
    path.unlink()
    with pytest.raises(CorpusError, match=rf"{file} can't be opened"):
        open_tokens(folder)


def test_other_bytes_of_the_same_size_are_found_by_verify(tmp_path):
    folder = write(tmp_path / "t", DOCUMENTS)
    data = bytearray((folder / "00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "00001.bin").write_bytes(data)
    open_tokens(folder)
    with pytest.raises(CorpusError, match=r"00001\.bin or \.starts has other bytes"):
        open_tokens(folder, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 2000}, "was changed"),
        ({"version": 2}, "of version 2, and this pyops reads version 1"),
        ({"format": "other"}, "no index of token shards"),
        ({"shards": 3}, "is damaged"),
        ({"extra": 3}, "is damaged"),
    ],
)
def test_a_changed_index_is_refused(tmp_path, change, message):
    folder = write(tmp_path / "t", DOCUMENTS)
    fields = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(fields | change))
    with pytest.raises(CorpusError, match=message):
        open_tokens(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(CorpusError, match="can't be read"):
        open_tokens(folder)


def test_a_writer_that_was_stopped_goes_on_behind_its_whole_shards(tmp_path):
    whole, kind = numbered(tmp_path / "whole", 500), TokenKind(60_000)
    folder, documents = tmp_path / "t", [np.arange(i, min(500, i + 7)) for i in range(0, 500, 7)]
    for stop in (20, 45, len(documents)):
        writer = ShardWriter(folder, kind, shard_tokens=50)
        for i in range(writer.consumed, stop):
            writer.add(documents[i], consumed=i + 1)
        if stop < len(documents):
            assert 0 < writer.consumed < stop + 1
            writer.abandon()
            with pytest.raises(CorpusError, match=r"has no index\.json"):
                open_tokens(folder)
        else:
            writer.close()
    assert ShardIndex.load(folder) == ShardIndex.load(whole)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in whole.iterdir())


def test_a_writer_of_other_settings_does_not_go_on(tmp_path):
    ShardWriter(tmp_path / "t", TokenKind(300), settings={"sources": ["a"]}).abandon()
    with pytest.raises(CorpusError, match="begun with other sources, vocab_size; give them"):
        ShardWriter(tmp_path / "t", TokenKind(301), settings={"sources": ["b"]})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(CorpusError, match="is not empty"):
        ShardWriter(tmp_path / "other", TokenKind(300))
    numbered(tmp_path / "done", 10)
    with pytest.raises(CorpusError, match="complete index"):
        ShardWriter(tmp_path / "done", TokenKind(300))


class FullDisk:
    """A file of which the disk has no room for more than a few bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        self._room[0] -= len(data)
        if self._room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def test_a_full_disk_leaves_what_can_be_continued(tmp_path, monkeypatch):
    whole, room = numbered(tmp_path / "whole", 200), [250]
    folder, documents = tmp_path / "t", [np.arange(i, min(200, i + 7)) for i in range(0, 200, 7)]

    def opened(path, mode, **options):
        return FullDisk(open(path, mode, **options), room)

    with monkeypatch.context() as patch:
        patch.setattr("pyops.token_data.shard_writing.open", opened, raising=False)
        writer = ShardWriter(folder, TokenKind(60_000), shard_tokens=50)
        with pytest.raises(CorpusError, match=r"No space left.*behind the 1 shards that are whole"):
            for i, document in enumerate(documents):
                writer.add(document, consumed=i + 1)
    assert not list(folder.glob("*.tmp"))
    with ShardWriter(folder, TokenKind(60_000), shard_tokens=50) as writer:
        for i in range(writer.consumed, len(documents)):
            writer.add(documents[i], consumed=i + 1)
    assert ShardIndex.load(folder) == ShardIndex.load(whole)


def test_tokens_outside_the_vocabulary_and_no_text(tmp_path):
    writer = ShardWriter(tmp_path / "t", TokenKind(10))
    with pytest.raises(CorpusError, match="token 10 is not in a vocabulary of 10"):
        writer.add(np.array([1, 10]))
    with pytest.raises(CorpusError, match="there was no text"):
        writer.close()


def test_the_digest_of_a_tokenizer_is_that_of_its_meaning():
    one = {"model": {"vocab": {"a": 0, "b": 1}}, "truncation": None}
    other = {"truncation": {"max_length": 3}, "model": {"vocab": {"b": 1, "a": 0}}}
    assert tokenizer_digest(json.dumps(one)) == tokenizer_digest(json.dumps(other, indent=2))
    other["model"]["vocab"]["a"] = 2
    assert tokenizer_digest(json.dumps(one)) != tokenizer_digest(json.dumps(other))


def test_only_a_few_of_many_shards_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("pyops.token_data.tokens.MOST_OPEN", 3)
    tokens = open_tokens(numbered(tmp_path / "t", 1000))
    assert len(tokens.parts) == 18
    assert tokens[0:1000].tolist() == list(range(1000))
    assert len(tokens._maps) == 3
