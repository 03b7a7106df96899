"""Token files on disk, named by a digest of the text, and the corpus opened from them by memory
map.

    <cache>/<digest>/   train.bin  validation.bin  tokenizer.json (BPE only)  meta.json
                        train.starts.bin  validation.starts.bin (packing only)

The folder is written under another name and renamed when whole, so two runs that start at once
can't see, or spoil,
each other's half-written files: the second to finish finds the first one's folder and drops its
own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from pyops.comm.agreement import agree, on_first_rank
from pyops.data.bigram import bigram_loss, count_pairs
from pyops.data.corpus import CorpusError, DataConfig, find_documents, read_numbered
from pyops.data.tokenizer import ByteTokenizer, PairTokenizer, Tokenizer

__all__ = ["Corpus", "build_aside", "prepare"]

FORMAT = 1
PARTS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """A tokenized text. `train` and `validation` are memory-mapped arrays [n] of token ids.

    Attributes:
        bigram_loss: Nats per byte, on the validation text, of a byte-bigram model fitted to the
            train text.
        digest: Of the text, the tokenizer's settings and the split; equal digests mean equal
            tokens.
        train_starts: Where the documents of `train` begin, and where the last one ends: int64
            [n + 1]; None unless they are packed.
        validation_starts: Likewise; the document on the border is in both parts, a piece in each.
    """

    path: str
    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    bigram_loss: float
    digest: str
    train_starts: np.ndarray | None = None
    validation_starts: np.ndarray | None = None


def prepare(
    config: DataConfig,
    *,
    vocab_size: int = 256,
    sequence_length: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Corpus:
    """Tokenize the corpus, unless the cache has it, and open it. Rank 0 of the group builds, the
    others wait.

    Args:
        config: The text, its tokenizer and the folder of the cache.
        vocab_size: Of the tokenizer: 256 or more.
        sequence_length: The tokens of a sequence, of which each part must have at least one.
        group: The ranks that open it; None: all.

    Raises:
        CorpusError: On every rank alike, when the corpus is missing, empty, unreadable, or has
            fewer tokens than one sequence of `sequence_length` and its next token, in either part.
    """
    if config.tokenizer == "bytes" and vocab_size < 256:
        raise CorpusError(
            f"there are 256 bytes, but model.vocab_size is {vocab_size}; set it to 256 or more"
        )
    folder = on_first_rank(lambda: _build_once(config, vocab_size), group=group)
    corpus, error = None, None
    try:
        corpus = _open(config, folder)
        _check_length(corpus, sequence_length)
    except CorpusError as caught:
        error = caught
    agree(error, group=group)
    assert corpus is not None
    return corpus


def _check_length(corpus: Corpus, sequence_length: int) -> None:
    for part in PARTS:
        if (found := getattr(corpus, part).size) < sequence_length + 1:
            raise CorpusError(
                f"corpus {corpus.path} is shorter than one sequence: its {part} part has "
                f"{found} tokens, and a "
                f"sequence needs {sequence_length + 1} (model.sequence_length + 1); give "
                "more text, lower "
                "model.sequence_length, or change data.validation_fraction"
            )


def _build_once(config: DataConfig, vocab_size: int) -> Path:
    documents = find_documents(config)

    def texts() -> Iterator[tuple[int, bytes]]:
        return read_numbered(documents, max_bytes=config.max_bytes)

    settings = {
        k: v for k, v in asdict(config).items() if k in ("tokenizer", "validation_fraction")
    }
    settings |= {"format": FORMAT, "vocab_size": vocab_size if config.tokenizer == "bpe" else 256}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    size, ends = 0, {}
    for number, text in texts():
        digest.update(text)
        size += len(text)
        ends[number] = size
    if config.packing != "none":  # the same text in other documents is packed otherwise
        digest.update(json.dumps([config.packing, *ends.values()]).encode())
    folder = Path(config.cache).expanduser() / digest.hexdigest()
    if (folder / "meta.json").exists():
        return folder
    train_bytes = round(size * (1 - config.validation_fraction))
    return build_aside(
        folder,
        lambda aside: _build(config, texts, aside, train_bytes=train_bytes, vocab_size=vocab_size),
    )


def build_aside(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, which has what `build` wrote into one beside it, or another process at the same
    time; `build` writes meta.json last.

    Raises:
        CorpusError: Where the cache can't be written.
    """
    aside: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".tmp", dir=folder.parent))
        build(aside)
        _publish(aside, folder)
    except OSError as error:
        raise CorpusError(
            f"the token cache {folder.parent} can't be written: "
            f"{error.strerror or error}; make room there, or set "
            "data.cache to another folder"
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _build(
    config: DataConfig,
    texts: Callable[[], Iterator[tuple[int, bytes]]],
    folder: Path,
    *,
    train_bytes: int,
    vocab_size: int,
) -> None:
    """Write the cache files of `texts` into `folder`: the first `train_bytes` bytes for training,
    the rest held out."""
    tokenizer: Tokenizer = ByteTokenizer()
    if config.tokenizer == "bpe":
        train_texts = (text for part, _, text in _split(texts(), train_bytes) if part == "train")
        tokenizer = trained = PairTokenizer.train(train_texts, vocab_size=vocab_size)
        trained.save(folder / "tokenizer.json")
    dtype = np.dtype(
        np.uint8
        if tokenizer.vocab_size <= 256
        else np.uint16
        if tokenizer.vocab_size <= 65536
        else np.uint32
    )
    pairs = {part: np.zeros((256, 256), dtype=np.int64) for part in PARTS}
    before: dict[str, int | None] = dict.fromkeys(PARTS)
    tokens = dict.fromkeys(PARTS, 0)
    starts: dict[str, dict[int, int]] = {part: {} for part in PARTS}
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "validation.bin", "wb") as validation,
    ):
        files = {"train": train, "validation": validation}
        for part, number, text in _split(texts(), train_bytes):
            starts[part].setdefault(number, tokens[part])
            encoded = tokenizer.encode(text)
            files[part].write(encoded.astype(dtype).tobytes())
            tokens[part] += int(encoded.size)
            pairs[part] += count_pairs(text, before=before[part])
            before[part] = text[-1]
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if config.packing != "none":
        for part in PARTS:
            every = np.array([*starts[part].values(), tokens[part]], dtype=np.int64)
            every.tofile(folder / f"{part}.starts.bin")
    meta = {
        "format": FORMAT,
        "dtype": dtype.name,
        "tokens": tokens,
        "bigram_loss": bigram_loss(pairs["train"], pairs["validation"]),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def _split(
    texts: Iterator[tuple[int, bytes]], train_bytes: int
) -> Iterator[tuple[str, int, bytes]]:
    """The numbered texts, each with the part it belongs to; the one on the border is cut in two."""
    for number, text in texts:
        if text[:train_bytes]:
            yield "train", number, text[:train_bytes]
        if text[train_bytes:]:
            yield "validation", number, text[train_bytes:]
        train_bytes = max(0, train_bytes - len(text))


def _publish(aside: Path, folder: Path) -> None:
    try:
        os.rename(aside, folder)
    except OSError:
        if not (folder / "meta.json").exists():  # not that another run was first
            raise


def _open(config: DataConfig, folder: Path) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {}
        for part in PARTS:
            path, count = folder / f"{part}.bin", meta["tokens"][part]
            if path.stat().st_size != count * np.dtype(meta["dtype"]).itemsize:
                raise ValueError(f"{path} has {path.stat().st_size} bytes")
            arrays[part] = (
                np.memmap(path, dtype=meta["dtype"], mode="r")
                if count
                else np.zeros(0, dtype=meta["dtype"])
            )
        tokenizer = (
            PairTokenizer.load(folder / "tokenizer.json")
            if config.tokenizer == "bpe"
            else ByteTokenizer()
        )
        return Corpus(
            config.path,
            arrays["train"],
            arrays["validation"],
            tokenizer,
            meta["bigram_loss"],
            folder.name,
            *(_open_starts(config, folder, part, arrays[part].size) for part in PARTS),
        )
    except FileNotFoundError as error:
        raise CorpusError(
            f"the token cache {error.filename} is not there on this rank; set data.cache "
            "to a folder that all ranks share"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"the token cache {folder} is damaged ({error}); delete that folder, it is built anew"
        ) from None


def _open_starts(config: DataConfig, folder: Path, part: str, size: int) -> np.ndarray | None:
    if config.packing == "none":
        return None
    path = folder / f"{part}.starts.bin"
    starts = np.fromfile(path, dtype=np.int64)
    if not starts.size or starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
        raise ValueError(f"{path} has no starts of {size} tokens")
    return starts
