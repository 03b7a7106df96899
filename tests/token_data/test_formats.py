"""Files of other programs, written here byte by byte as their sources do."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pyops.data import CorpusError
from pyops.token_data import open_tokens

pytestmark = pytest.mark.cpu_only

DOCUMENTS = [[[5, 6, 7]], [[1], [2, 3]], [[300, 4, 4, 4]]]  # of sentences


def megatron(path: Path, *, code: int = 8, dtype: str = "<u2") -> Path:
    """megatron/core/datasets/indexed_dataset.py, _IndexWriter."""
    sentences = [sentence for document in DOCUMENTS for sentence in document]
    lengths = np.array([len(each) for each in sentences], dtype="<i4")
    size = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * size
    documents = np.array([0, 1, 3, 4], dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    body = lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    tokens = np.array([token for each in sentences for token in each], dtype=dtype)
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    return path


def datatrove(path: Path, *, width: str = "H", name: str = "gpt2", tokens=None) -> Path:
    """datatrove/pipeline/tokens/tokenizer.py, TokenizedFile."""
    documents = tokens or [[5, 6, 7], [1, 2, 3], [300, 4, 4, 4]]
    flat = [token for each in documents for token in each]
    ends = np.cumsum([len(each) for each in documents]).tolist()
    path.write_bytes(struct.pack(f"<{len(flat)}{width}", *flat))
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{path}.metadata").write_text(f"{name}\n{len(flat)}\n10 T")
    return path


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_megatron(tmp_path, code, dtype, end):
    megatron(tmp_path / "m", code=code, dtype=dtype)
    tokens = open_tokens(tmp_path / f"m{end}")
    assert tokens[0:99].tolist() == [5, 6, 7, 1, 2, 3, 300, 4, 4, 4]
    assert tokens.starts_of(0).tolist() == [0, 3, 6, 10]
    assert tokens.num_documents == 3


def test_megatron_that_is_damaged(tmp_path):
    path = megatron(tmp_path / "m").with_suffix(".idx")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CorpusError, match=r"m\.idx is truncated"):
        open_tokens(path)
    path.write_bytes(b"NOTMAGIC" + data[8:])
    with pytest.raises(CorpusError, match="no index of Megatron"):
        open_tokens(path)
    path.write_bytes(data[:9] + struct.pack("<Q", 2) + data[17:])
    with pytest.raises(CorpusError, match="version 2"):
        open_tokens(path)
    path.write_bytes(data)
    shards = tmp_path / "m.bin"
    shards.write_bytes(shards.read_bytes()[:-2])
    with pytest.raises(CorpusError, match=r"m\.bin is truncated: it has 18 bytes.*have 20"):
        open_tokens(path)
    shards.unlink()
    with pytest.raises(CorpusError, match=r"m\.bin is not; copy both"):
        open_tokens(path)


@pytest.mark.parametrize(("width", "name"), [("H", "gpt2"), ("I", "gpt2"), ("I", "gpt2|4")])
def test_datatrove(tmp_path, width, name):
    path = datatrove(tmp_path / "a.ds", width=width, name=name)
    tokens = open_tokens(path)
    assert tokens[0:99].tolist() == [5, 6, 7, 1, 2, 3, 300, 4, 4, 4]
    assert tokens.starts_of(0).tolist() == [0, 3, 6, 10]
    datatrove(tmp_path / "b.ds", width=width, name=name, tokens=[[8, 9]])
    both = open_tokens(tmp_path)
    assert both[9:12].tolist() == [4, 8, 9]
    assert both.starts_of(1).tolist() == [10, 12]
    assert both.digest != tokens.digest


def test_datatrove_that_is_damaged(tmp_path):
    path = datatrove(tmp_path / "a.ds")
    datatrove(tmp_path / "b.ds", name="other")
    with pytest.raises(CorpusError, match="several tokenizers: gpt2, other"):
        open_tokens(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CorpusError, match=r"a\.ds has 18 bytes, and its index says 10 tokens"):
        open_tokens(path)
    index = Path(f"{path}.index")
    index.write_bytes(index.read_bytes()[:-3])
    with pytest.raises(CorpusError, match=r"a\.ds\.index is truncated"):
        open_tokens(path)


def test_numpy_and_tokens_alone(tmp_path):
    wanted = np.array([3, 1, 60_000], dtype=np.uint16)
    np.save(tmp_path / "a.npy", wanted)
    wanted.tofile(tmp_path / "a.u16")
    wanted.astype("<u4").tofile(tmp_path / "a.u32")
    for name in ("a.npy", "a.u16", "a.u32"):
        tokens = open_tokens(tmp_path / name)
        assert tokens[0:3].tolist() == wanted.tolist()
        assert not tokens.has_documents
        with pytest.raises(CorpusError, match="does not say where documents begin"):
            tokens.starts_of(0)
    np.save(tmp_path / "b.npy", np.zeros((2, 2)))
    with pytest.raises(CorpusError, match=r"array float64 of shape \(2, 2\)"):
        open_tokens(tmp_path / "b.npy")
    (tmp_path / "c.u16").write_bytes(b"abc")
    with pytest.raises(CorpusError, match=r"c\.u16 is truncated"):
        open_tokens(tmp_path / "c.u16")


def test_what_is_none(tmp_path):
    with pytest.raises(CorpusError, match="do not exist"):
        open_tokens(tmp_path / "x")
    (tmp_path / "x").touch()
    with pytest.raises(CorpusError, match="no known format"):
        open_tokens(tmp_path / "x")
    (tmp_path / "e.u16").touch()
    with pytest.raises(CorpusError, match="has no tokens"):
        open_tokens(tmp_path / "e.u16")
