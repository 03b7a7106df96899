"""Which files are read, in which order, and what is said when there is nothing to read."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from pyops.data import CorpusError, DataConfig, find_documents
from pyops.data.corpus import read_documents

pytestmark = pytest.mark.cpu_only


def folder_of(tmp_path: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = tmp_path / "corpus" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "corpus"


def test_the_default_is_the_standard_library():
    documents = find_documents(DataConfig())
    names = {d.name for d in documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in n or n.startswith("test/") for n in names)
    assert sum(d.size for d in documents) > 5_000_000
    assert documents[0].path.is_relative_to(sysconfig.get_paths()["stdlib"])


def test_the_order_is_of_the_names_and_not_the_place(tmp_path):
    names = {f"sub__{i}" if i % 2 else f"{i}": "x" for i in range(20)}
    first = [
        d.name for d in find_documents(DataConfig(path=str(folder_of(tmp_path / "a", **names))))
    ]
    second = [
        d.name for d in find_documents(DataConfig(path=str(folder_of(tmp_path / "b", **names))))
    ]
    assert first == second
    assert first != sorted(first)
    assert sorted(first) == sorted(n.replace("__", "/") for n in names)


def test_one_file_or_suffixes(tmp_path):
    root = folder_of(tmp_path, a="1", b="22")
    (root / "c.md").write_text("333")
    (root / ".hidden").write_text("4444")
    assert [d.name for d in find_documents(DataConfig(path=str(root / "b")))] == ["b"]
    assert [d.name for d in find_documents(DataConfig(path=str(root), suffixes=(".md",)))] == [
        "c.md"
    ]
    assert {d.name for d in find_documents(DataConfig(path=str(root)))} == {"a", "b", "c.md"}


def test_texts_are_joined_by_newlines_and_cut(tmp_path):
    documents = find_documents(DataConfig(path=str(folder_of(tmp_path, a="1234\n567", b="x"))))
    whole = b"".join(read_documents(documents))
    assert whole in (b"1234\n567\nx\n", b"x\n1234\n567\n")
    for cut in (1, 2, 5, 9, 11, 100):
        assert b"".join(read_documents(documents, max_bytes=cut)) == whole[:cut]


def test_a_long_text_comes_in_whole_lines(tmp_path):
    text = "".join(f"line {i} ä\n" for i in range(200_000))
    pieces = list(read_documents(find_documents(DataConfig(path=str(folder_of(tmp_path, a=text))))))
    assert len(pieces) > 2
    assert b"".join(pieces) == text.encode() + b"\n"
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_nothing_there(tmp_path):
    with pytest.raises(CorpusError, match=r"nowhere does not exist; set data.path"):
        find_documents(DataConfig(path=str(tmp_path / "nowhere")))


def test_nothing_in_it(tmp_path):
    root = folder_of(tmp_path, empty="")
    with pytest.raises(
        CorpusError, match=r"corpus .*corpus is empty: 1 files, 0 bytes; set data.path"
    ):
        find_documents(DataConfig(path=str(root)))
    with pytest.raises(CorpusError, match=r"is empty of .md files: 0 files"):
        find_documents(DataConfig(path=str(root), suffixes=(".md",)))


def test_a_file_that_cannot_be_read(tmp_path):
    documents = find_documents(DataConfig(path=str(folder_of(tmp_path, secret="text"))))
    os.unlink(documents[0].path)
    documents[0].path.mkdir()  # reading fails, for root too, whom permissions don't stop
    with pytest.raises(
        CorpusError, match=r"corpus file .*secret can't be read: .*; fix its permissions"
    ):
        list(read_documents(documents))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "path is empty"),
        ({"tokenizer": "words"}, "tokenizer is 'words'; choose one of bytes, bpe"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"max_bytes": -1}, "max_bytes is -1"),
    ],
)
def test_a_bad_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)
