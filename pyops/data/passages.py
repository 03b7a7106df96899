"""Passages of code from families of modules of the Python standard library: which family is each
from?

    asyncio  --files-->  streams.py  .................... | ......   of every file the end is held
                                                                     out
                         transports.py  ................. | .....
                         train                            | held out
             --passages-->  [first] 63 tokens, one after the other; as many of each family; copies
                            of them begin between
    the rest of the library, and what is trained on -> text, in the same lengths, to begin with:
    each row's label is its file

Tokens are those of `DataConfig.tokenizer`, and two more: one that stands first, and one in place of
those that are masked.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from pyops import random
from pyops.comm.agreement import agree, on_first_rank
from pyops.data.cache import build_aside
from pyops.data.corpus import (
    STANDARD_LIBRARY,
    CorpusError,
    DataConfig,
    Document,
    find_documents,
    read_documents,
)
from pyops.data.tokenizer import ByteTokenizer, PairTokenizer, Tokenizer

__all__ = ["FAMILIES", "Passages", "Rows", "mask_rows", "prepare_passages"]

FORMAT = 4
SPECIAL = 2  # the token that stands first, and that of masked places: the vocabulary's last two

# name: files and folders below the library's folder, of every Python from 3.10 on
FAMILIES: dict[str, tuple[str, ...]] = {
    "asyncio": ("asyncio/",), "email": ("email/",),
    "importlib": ("importlib/", "zipimport.py", "pkgutil.py", "runpy.py"),
    "multiprocessing": ("multiprocessing/", "concurrent/", "subprocess.py"),
    "text": ("json/", "re.py", "re/", "csv.py", "configparser.py", "textwrap.py", "string.py",
             "difflib.py", "shlex.py", "tokenize.py", "gettext.py", "argparse.py", "optparse.py"),
    "unittest": ("unittest/", "doctest.py"),
    "web": ("http/", "urllib/", "html/", "wsgiref/", "xmlrpc/"), "xml": ("xml/",),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows, numbered from 0, and the text that they are cut from.

    Attributes:
        stream: int64 [N], the tokens of one part of all files.
        places: int64 [m, 4], of each row where it begins in the stream, where what is there of its
            file ends, the number of its family, and that of its file.
        first: The token that stands first.
        length: T.
        copies: Of each row there are so many, one after the other, of which number i begins i /
            copies of a row's text behind the row itself, as far as its file goes; ValueError for
            fewer than 1, or more than the T - 1 tokens of a row.
    """

    stream: Tensor
    places: Tensor
    first: int
    length: int
    copies: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.copies < self.length:
            raise ValueError(
                f"copies is {self.copies}; it must be from 1 to {self.length - 1}, the "
                "tokens of a row"
            )

    def __len__(self) -> int:
        return len(self.places) * self.copies

    @property
    def labels(self) -> Tensor:
        """int64 [n], the number of the family."""
        return self.places[:, 2].repeat_interleave(self.copies)

    @property
    def files(self) -> Tensor:
        """int64 [n], the number of the file."""
        return self.places[:, 3].repeat_interleave(self.copies)

    @property
    def tokens(self) -> Tensor:
        """int64 [n, T]."""
        return self.cut(torch.arange(len(self), device="cpu"))

    def cut(self, rows: Tensor) -> Tensor:
        """int64 [k, T] of the rows int64 [k]."""
        text = self.length - 1
        starts, ends = self.places[rows // self.copies, :2].unbind(1)
        begin = torch.minimum(starts + rows % self.copies * text // self.copies, ends - text)
        return functional.pad(
            self.stream[begin[:, None] + torch.arange(text, device="cpu")], (1, 0), value=self.first
        )

    def copied(self, copies: int) -> Rows:
        """These, each with so many copies."""
        return replace(self, copies=copies)

    def fewer(self, each: int) -> Rows:
        """So many of each family, spread over them; all, where there are no more, or `each` is
        0."""
        families = len(FAMILIES)
        there = len(self.places) // families
        if not 0 < each < there:
            return self
        chosen = (
            torch.arange(families, device="cpu")[:, None] * there
            + torch.arange(each, device="cpu") * there // each
        ).flatten()
        return replace(self, places=self.places[chosen])


@dataclass(frozen=True)
class Passages:
    """text: of all the library but what is held out, labels are 0; its files' numbers are below the
    vocabulary's, and neighbouring files share one where they are more. first, mask: the two tokens
    that are no text.

    Attributes:
        digest: Of the text and the settings; equal digests mean equal tokens.
    """

    train: Rows
    held_out: Rows
    text: Rows
    first: int
    mask: int
    digest: str


def prepare_passages(
    config: DataConfig, *, vocab_size: int, length: int, group: dist.ProcessGroup | None = None
) -> Passages:
    """Cut the library into passages of `length` tokens, unless the cache has them. Rank 0 of the
    group does it, others wait.

    config.path must be "stdlib"; validation_fraction: about that part of each file's bytes, its
    end, is held out; max_bytes: of the text without labels.

    Args:
        vocab_size: With the two special tokens.

    Raises:
        CorpusError: On every rank alike, for what can't be done.
    """
    if config.path != STANDARD_LIBRARY:
        raise CorpusError(
            f"data.path is {config.path!r}, but passages are of the Python standard "
            'library: set it to "stdlib"'
        )
    if vocab_size < 256 + SPECIAL:
        raise CorpusError(
            f"bert.vocab_size is {vocab_size}; there are 256 bytes and {SPECIAL} special "
            f"tokens: set {256 + SPECIAL} or more"
        )
    if length < 2:
        raise CorpusError(
            f"bert.sequence_length is {length}; a passage needs 2 tokens or more, such as 64"
        )
    folder = on_first_rank(lambda: _build_once(config, vocab_size, length), group=group)
    passages, error = None, None
    try:
        passages = _open(folder, vocab_size)
    except CorpusError as caught:
        error = caught
    agree(error, group=group)
    assert passages is not None
    return passages


def mask_rows(
    tokens_BT: Tensor, *, passages: Passages, samples: Tensor, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """(tokens with some masked, which places): of each row the same number, 15 % of T - 1, at least
    one; never the first.

    Of these 80 % become the mask, 10 % another token, 10 % stay (Devlin et al., 2019). Drawn by
    (seed, epoch, sample) alone.
    """
    rows, length = tokens_BT.shape
    count, texts = max(1, round(0.15 * (length - 1))), passages.first
    drawn = [
        random.uniform(seed, f"masks.{epoch}", (3 * length,), offset=int(n) * 3 * length)
        for n in samples
    ]
    place, kind, other = (
        (torch.stack(drawn) if rows else torch.zeros(0, 3 * length, device="cpu"))
        .view(rows, 3, length)
        .unbind(1)
    )
    place = place.clone()
    place[:, 0] = 2.0  # behind all others
    masked = torch.zeros(rows, length, dtype=torch.bool, device="cpu").scatter_(
        1, place.argsort(dim=1, stable=True)[:, :count], True
    )
    changed = torch.where(
        kind < 0.8, torch.tensor(passages.mask, device="cpu"), (other * texts).long()
    )
    return torch.where(masked & (kind < 0.9), changed, tokens_BT), masked


def _belongs(document: Document, parts: Sequence[str]) -> bool:
    return any(
        document.name.startswith(part) if part.endswith("/") else document.name == part
        for part in parts
    )


def _cut_end(document: Document, fraction: float) -> tuple[bytes, bytes]:
    """A file's text without its end, and the end: whole lines, about that part of the bytes."""
    text = b"".join(read_documents([document]))
    place = text.rfind(b"\n", 0, round(len(text) * (1.0 - fraction))) + 1
    return text[:place], text[place:]


def _texts(
    documents: Sequence[Document], cut: Collection[str], config: DataConfig
) -> Iterator[bytes]:
    """The text of each file, of those whose names are in `cut` without the end; together no more
    than config.max_bytes."""
    left = config.max_bytes or sys.maxsize
    for document in documents:
        fraction = config.validation_fraction if document.name in cut else 0.0
        text = _cut_end(document, fraction)[0][:left]
        left -= len(text)
        yield text
        if not left:
            return


def _build_once(config: DataConfig, vocab_size: int, length: int) -> Path:
    documents = find_documents(DataConfig(path=STANDARD_LIBRARY))
    settings = [
        FORMAT,
        config.tokenizer,
        config.validation_fraction,
        config.max_bytes,
        vocab_size,
        length,
        FAMILIES,
    ]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
    for document in documents:
        digest.update(f"{document.name}\0{document.size}\0".encode())
    for text in read_documents(documents):
        digest.update(text)
    folder = Path(config.cache).expanduser() / f"passages-{digest.hexdigest()}"
    if (folder / "meta.json").exists():
        return folder
    return build_aside(
        folder, lambda aside: _build(aside, config, documents, vocab_size=vocab_size, length=length)
    )


def _build(
    folder: Path, config: DataConfig, documents: Sequence[Document], *, vocab_size: int, length: int
) -> None:
    families = [[d for d in documents if _belongs(d, members)] for members in FAMILIES.values()]
    cut = {d.name for own in families for d in own}
    tokenizer: Tokenizer = ByteTokenizer()
    if config.tokenizer == "bpe":
        tokenizer = trained = PairTokenizer.train(
            _texts(documents, cut, config), vocab_size=vocab_size - SPECIAL
        )
        trained.save(folder / "tokenizer.json")
    numbers = {d.name: i for i, d in enumerate(documents)}
    text = [
        (i * vocab_size // max(vocab_size, len(documents)), tokenizer.encode(t))
        for i, t in enumerate(_texts(documents, cut, config))
    ]
    if all(len(tokens) < length - 1 for _, tokens in text):
        raise CorpusError(
            f"data.max_bytes is {config.max_bytes}, too little text for a row of "
            f"{length} tokens; set it to more"
        )
    _write_rows(folder / "text", [text], length)
    both = [
        [(numbers[d.name], _cut_end(d, config.validation_fraction)) for d in own]
        for own in families
    ]
    for i, part in enumerate(("train", "held_out")):
        _write_rows(
            folder / part,
            [[(number, tokenizer.encode(ends[i])) for number, ends in own] for own in both],
            length,
        )
    (folder / "meta.json").write_text(
        json.dumps(
            {"format": FORMAT, "length": length, "first": vocab_size - 2, "mask": vocab_size - 1}
        )
    )


def _write_rows(
    stem: Path, families: Sequence[Sequence[tuple[int, np.ndarray]]], length: int
) -> None:
    """What Rows has: of every family as many rows, spread over its files, one after the other; what
    fills none is left out."""
    counts = [sum(len(tokens) // (length - 1) for _, tokens in files) for files in families]
    each = min(counts)
    if not each:
        raise CorpusError(
            f"{list(FAMILIES)[counts.index(0)]} has no passage in the {stem.name} part; "
            "set data.validation_fraction to "
            "another part, such as 0.25, or bert.sequence_length to fewer tokens"
        )
    stream, places, behind = [], [], 0
    for label, files in enumerate(families):
        own = []
        for number, tokens in files:
            starts = behind + np.arange(len(tokens) // (length - 1)) * (length - 1)
            behind += len(tokens)
            own.append(
                np.stack(
                    [starts, *(np.full_like(starts, same) for same in (behind, label, number))],
                    axis=1,
                )
            )
            stream.append(tokens.astype(np.int32))
        every = np.concatenate(own)
        places.append(every[np.arange(each) * len(every) // each])
    np.save(f"{stem}.stream.npy", np.concatenate(stream))
    np.save(f"{stem}.places.npy", np.concatenate(places))


def _open(folder: Path, vocab_size: int) -> Passages:
    def read(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy", allow_pickle=False)).long()

    try:
        meta = json.loads((folder / "meta.json").read_text())
        length = meta["length"]
        train, held_out, text = (
            Rows(read(f"{part}.stream"), read(f"{part}.places"), meta["first"], length)
            for part in ("train", "held_out", "text")
        )
        for rows in (train, held_out, text):
            if rows.places.shape[1:] != (4,) or not len(rows.places):
                raise ValueError(f"its rows are of shape {list(rows.places.shape)}, not [n, 4]")
            if int(rows.places[:, 1].max()) > len(rows.stream):
                raise ValueError("it has rows beyond the text")
            if int(rows.stream.max()) >= vocab_size:
                raise ValueError(f"it has tokens of {vocab_size} and more")
        return Passages(train, held_out, text, meta["first"], meta["mask"], folder.name)
    except FileNotFoundError as error:
        raise CorpusError(
            f"the token cache {error.filename} is not there on this rank; set data.cache "
            "to a folder that all ranks share"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"the token cache {folder} is damaged ({error}); delete that folder, it is built anew"
        ) from None
