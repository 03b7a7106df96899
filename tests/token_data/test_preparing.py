"""`pyops data`: what is in the sources is in the shards, for any number of processes, and what is
bad in them is named."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pyops.cli import main
from pyops.data import CorpusError, PairTokenizer
from pyops.token_data import PrepareOptions, ShardIndex, open_tokens, prepare_tokens
from tests.parallel.tiny_folder import make_tokenizer
from tests.token_data.test_shards import documents_of

pytestmark = pytest.mark.cpu_only

TEXTS = ["to be or not to be", "", "that is the question\n\n  indeed", "größer, ≥ 3", "x" * 300]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    PairTokenizer.train([text.encode() for text in TEXTS], vocab_size=280).save(path)
    return path


def jsonl(path: Path, texts: list[str], *, key: str = "text") -> str:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts))
    return str(path)


def prepared(folder: Path, sources: list[str], tokenizer: Path, **options: Any) -> list[str]:
    """The documents, as texts again."""
    prepare_tokens(sources, folder, PrepareOptions(str(tokenizer), **{"workers": 1, **options}))
    decode = tokenizers.Tokenizer.from_file(str(tokenizer)).decode
    return [decode(document) for document in documents_of(folder)]


def test_all_kinds_of_files_in_their_order(tmp_path, tokenizer, capsys):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfno mark of byte order\r\n")
    (folder / ".hidden").write_text("hidden")
    (folder / "empty.txt").touch()
    jsonl(folder / "sub" / "b.jsonl", TEXTS)
    with gzip.open(folder / "z.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "zipped"}) + "\n\n")
    words = ["data", str(folder), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*words, "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "of 6 documents in 1 shards" in shown
    assert "3 empty documents left out" in shown
    decode = tokenizers.Tokenizer.from_file(str(tokenizer)).decode
    found = [decode(document) for document in documents_of(tmp_path / "out")]
    assert found == ["no mark of byte order\r\n", *(text for text in TEXTS if text), "zipped"]
    assert main(["data", "--check", str(tmp_path / "out")]) == 0
    assert "6 documents in 1 files, vocabulary 280" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer.read_text()


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("pyops.token_data.sources.CHUNK_BYTES", 100)
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * (i % 7) for i in range(120)])
    for name, workers in (("one", 1), ("two", 2)):
        prepared(tmp_path / name, [source], tokenizer, workers=workers, shard_tokens=500)
    one, two = tmp_path / "one", tmp_path / "two"
    assert ShardIndex.load(one) == ShardIndex.load(two)
    assert len(ShardIndex.load(one).shards) > 3
    assert (one / "00001.bin").read_bytes() == (two / "00001.bin").read_bytes()


def test_a_large_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, tokenizer, monkeypatch):
    text = "".join(f"line {i}\n\n    to be {i} or\n" for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("the next one")
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    whole = prepared(tmp_path / "whole", sources, tokenizer)
    monkeypatch.setattr("pyops.token_data.sources.PIECE_BYTES", 1000)
    assert prepared(tmp_path / "pieces", sources, tokenizer) == whole == [text, "the next one"]
    assert ShardIndex.load(tmp_path / "whole") == ShardIndex.load(tmp_path / "pieces")


def test_a_tokenizer_that_marks_beginnings_gets_whole_texts(tmp_path, monkeypatch):
    words = {word: i for i, word in enumerate(["?", "▁", "▁a", "a", "\n"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a\n" * 2000)
    monkeypatch.setattr("pyops.token_data.sources.PIECE_BYTES", 1000)
    options = PrepareOptions(str(tmp_path / "t.json"), workers=1)
    prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "out", options)
    found = documents_of(tmp_path / "out")
    assert found == [inner.encode("a\n" * 2000).ids]


def test_the_end_of_documents_is_that_of_the_folder(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    source = jsonl(tmp_path / "a.jsonl", ["to", "be", "or"], key="body")
    options = PrepareOptions(str(tmp_path / "tokenizer"), key="body", workers=1)
    index = prepare_tokens([source], tmp_path / "a", options).index
    assert index.end_of_document == 1
    assert [document[-1] for document in documents_of(tmp_path / "a")] == [1, 1, 1]
    assert documents_of(tmp_path / "a")[0][0] != 0, "<s> is not put before a document"
    options = PrepareOptions(str(tmp_path / "tokenizer"), key="body", workers=1, end="none")
    assert prepare_tokens([source], tmp_path / "b", options).index.end_of_document is None
    options = PrepareOptions(str(tmp_path / "tokenizer"), key="body", workers=1, end="<no>")
    with pytest.raises(CorpusError, match="has no token '<no>'"):
        prepare_tokens([source], tmp_path / "c", options)


def test_what_was_stopped_goes_on(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("pyops.token_data.sources.CHUNK_BYTES", 100)
    texts = [f"document {i} " * 5 for i in range(60)]
    source = jsonl(tmp_path / "a.jsonl", texts)
    whole = prepared(tmp_path / "whole", [source], tokenizer, shard_tokens=300)
    lines = Path(source).read_text().splitlines(keepends=True)
    bad = [*lines[:40], "[" + lines[40][1:], *lines[41:]]  # of the same size
    Path(source).write_text("".join(bad))
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 41: no JSON"):
        prepared(tmp_path / "out", [source], tokenizer, shard_tokens=300)
    begun = sorted((tmp_path / "out").glob("*.bin"))
    assert begun
    Path(source).write_text("".join(lines))
    seen: list[int] = []
    monkeypatch.setattr(
        "pyops.token_data.preparing.Encoder.__call__",
        _counted(seen, sys.modules["pyops.token_data.preparing"].Encoder.__call__),
    )
    assert prepared(tmp_path / "out", [source], tokenizer, shard_tokens=300) == whole
    assert 0 < sum(seen) < 30, "whole shards are not tokenized again"
    assert ShardIndex.load(tmp_path / "out") == ShardIndex.load(tmp_path / "whole")


def _counted(seen: list[int], encode: Any) -> Any:
    def call(self: Any, chunk: Any) -> Any:
        seen.append(len(chunk.items))
        return encode(self, chunk)

    return call


BAD = b'{"text": "good"}\n{"text": "b\xe4d"}\n{"text": "half \\ud800 pair"}\n'


def test_bad_unicode_is_refused_replaced_or_skipped(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    source = [str(tmp_path / "a.jsonl")]
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 2: the text is no UTF-8.*--bad-unicode"):
        prepared(tmp_path / "out", source, tokenizer)
    (tmp_path / "b.jsonl").write_bytes(BAD.splitlines(keepends=True)[2])
    with pytest.raises(CorpusError, match=r"b\.jsonl, line 1: the text is no UTF-8"):
        prepared(tmp_path / "b", [str(tmp_path / "b.jsonl")], tokenizer)
    found = prepared(tmp_path / "c", source, tokenizer, bad_unicode="replace")
    assert found == ["good", "b\ufffdd", "half \ufffd pair"]
    assert prepared(tmp_path / "d", source, tokenizer, bad_unicode="skip") == ["good"]
    (tmp_path / "a.txt").write_bytes(b"good\xff")
    with pytest.raises(CorpusError, match=r"a\.txt: the text is no UTF-8.*position 4"):
        prepared(tmp_path / "e", [str(tmp_path / "a.txt")], tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "no text under 'text', no object"),
        ('{"body": "a"}', "no text under 'text', only body; name another by --key"),
        ('{"text": 3}', "'text' is int, not a text"),
    ],
)
def test_lines_that_are_no_documents(tmp_path, tokenizer, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' + line)
    with pytest.raises(CorpusError, match=rf"a\.jsonl, line 2: {message}"):
        prepared(tmp_path / "out", [str(tmp_path / "a.jsonl")], tokenizer)


def test_what_a_command_refuses_in_one_line(tmp_path, tokenizer, capsys):
    source = jsonl(tmp_path / "a.jsonl", ["a"])
    own = ["--tokenizer", str(tokenizer)]
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    jsonl(tmp_path / "nothing.jsonl", [""])
    for words, message in (
        ([source, *out], "--tokenizer is missing"),
        ([source, *own], "--out is missing"),
        ([*own, *out], "there is no source"),
        (["none.txt", *own, *out], "source none.txt does not exist"),
        ([str(tmp_path / "empty"), *own, *out], "has no file"),
        ([str(tmp_path / "z.jsonl.gz"), *own, *out], "z.jsonl.gz can't be read"),
        ([source, "--tokenizer", str(tmp_path / "bad.json"), *out], "can't be read"),
        ([source, "--tokenizer", str(tmp_path / "no.json"), *out], "does not exist"),
        ([source, *own, *out, "--workers", "-1"], "workers is -1"),
        ([source, *own, *out, "--shard-tokens", "0"], "shard_tokens is 0"),
        (["--check", str(tmp_path / "empty")], "has no index.json"),
        (["--workers", "1", str(tmp_path / "nothing.jsonl"), *own, "--out", "x"], "was no text"),
    ):
        os.chdir(tmp_path)
        assert main(["data", *words]) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
        for left in (tmp_path / "out").glob("*"):
            left.unlink()


def test_parquet_and_datasets_by_their_packages(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.parquet").touch()
    for name, source in (("pyarrow", str(tmp_path / "a.parquet")), ("datasets", "hf:user/name")):
        for key in [key for key in sys.modules if key.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, key)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(CorpusError, match=f"needs the package {name}: pip install {name}"):
                prepared(tmp_path / name, [source], tokenizer)
    asked: list[Any] = []

    def load_dataset(*words: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((words, options))
        return [{"text": "one"}, {"text": None}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert prepared(tmp_path / "out", ["hf:user/name@small:test"], tokenizer) == ["one", "two"]
    assert asked == [(("user/name", "small"), {"split": "test", "streaming": True})]
    with pytest.raises(CorpusError, match="has no column 'body', only text; name one by --key"):
        prepared(tmp_path / "o", ["hf:user/name"], tokenizer, key="body")


def test_parquet_of_pyarrow(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = [str(tmp_path / "a.parquet")]
    assert prepared(tmp_path / "out", source, tokenizer) == [text for text in TEXTS if text]
    with pytest.raises(CorpusError, match="has no column 'body', only text, n"):
        prepared(tmp_path / "o", source, tokenizer, key="body")
    with pytest.raises(CorpusError, match=r"a\.parquet, row 1: 'n' is int"):
        prepared(tmp_path / "p", source, tokenizer, key="n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorpusError, match="is no Parquet"):
        prepared(tmp_path / "q", [str(tmp_path / "b.parquet")], tokenizer)


def test_shards_know_their_tokenizer(tmp_path, tokenizer):
    prepared(tmp_path / "out", [jsonl(tmp_path / "a.jsonl", ["a b"])], tokenizer)
    assert len(open_tokens(tmp_path / "out").tokenizer) == 32
