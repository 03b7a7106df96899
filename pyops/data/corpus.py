"""Which files are the corpus: a file, a folder, or the Python standard library's own sources.

documents in the order of a hash of their names, so that any prefix and any suffix is a fair sample:

| doc | doc |   ...   | doc | doc |  ...  | doc |   beyond max_bytes: left out
`------ train -------------'`-- validation -----'
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyops.checkpoint.format.repository import how_to_fetch

__all__ = [
    "CorpusError",
    "DataConfig",
    "Document",
    "find_documents",
    "read_documents",
    "read_numbered",
]

STANDARD_LIBRARY = "stdlib"
# Other people's packages, and tests: data tables and broken-on-purpose files rather than code.
STANDARD_LIBRARY_EXCLUDES = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
)
LONG_ROWS = ("refuse", "truncate")
PACKINGS = ("none", "documents")
KINDS = ("text", "tokens", "python")
SEPARATOR = b"\n"
PIECE_BYTES = 1 << 20


class CorpusError(ValueError):
    """The corpus can't be used; the message names the path and the fix."""


@dataclass(frozen=True)
class DataConfig:
    """Which text, as which tokens.

    Attributes:
        path: A file, a folder (all its files of `suffixes`, or all files when empty), or "stdlib",
            the Python standard library's own sources.
        tokenizer: "bytes", or "bpe", trained on this corpus up to model.vocab_size entries.
        max_bytes: Read no more than this, 0 for everything.
        validation_fraction: The part of the bytes held out; of instructions, of the rows.
        long_rows: Of instructions for a Hugging Face folder: "refuse" a row of more tokens than
            model.sequence_length, or "truncate" it.
        cache: The folder for token files; they are named by a digest of the text.
        packing: How rows are cut: "none", one behind the other from the whole text; "documents",
            each row has whole documents and says where they begin (`PackedBatches`).
        kind: "text", of path; "tokens", files of tokens in paths, as pyops data, Megatron-LM or
            datatrove write them; "python", batches of the function that path names, as
            "my_data.py:make" or "my_package.data:make".
        paths: Of tokens: folders or files, which are mixed.
        weights: Of paths, one for each: the parts of the mixture, against each other; none: by
            their rows.
        prefetch: Of kinds other than "text": batches that a thread makes ahead.
    """

    path: str = STANDARD_LIBRARY
    suffixes: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    max_bytes: int = 0
    validation_fraction: float = 0.1
    cache: str = "runs/data"
    long_rows: str = "refuse"
    packing: str = "none"
    kind: str = "text"
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError('path is empty; give a file, a folder, or "stdlib"')
        if self.tokenizer not in ("bytes", "bpe"):
            raise ValueError(f"tokenizer is {self.tokenizer!r}; choose one of bytes, bpe")
        if self.max_bytes < 0:
            raise ValueError(
                f"max_bytes is {self.max_bytes}; give a number of bytes, or 0 for all of them"
            )
        if self.long_rows not in LONG_ROWS:
            raise ValueError(
                f"long_rows is {self.long_rows!r}; choose one of {', '.join(LONG_ROWS)}"
            )
        if self.packing not in PACKINGS:
            raise ValueError(f"packing is {self.packing!r}; choose one of {', '.join(PACKINGS)}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction}; give a part between "
                "0 and 1, such as 0.1"
            )
        self._check_kind()

    @property
    def reads_bytes(self) -> bool:
        """Whether each byte of a text is a token."""
        return self.kind == "text" and self.tokenizer == "bytes"

    def _check_kind(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; give a number of batches, or 0")
        if (self.kind == "tokens") != bool(self.paths):
            raise ValueError(
                f"paths is {list(self.paths)}, and kind is {self.kind!r}; name files of tokens "
                'there for the kind "tokens", and only for it'
            )
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"weights has {len(self.weights)} numbers, and paths has {len(self.paths)} names; "
                "give one for each, or none"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"weights has {weight}; give numbers above 0, or leave that path out"
                )
        if self.kind == "python" and (":" not in self.path or self.packing != "none"):
            raise ValueError(
                f"path is {self.path!r} and packing {self.packing!r}, and kind is 'python'; name a "
                'function as "my_data.py:make", and set packing to "none"'
            )


@dataclass(frozen=True)
class Document:
    """One file of the corpus; `name` is its path below the corpus' folder, the same on every
    machine.

    Attributes:
        name: Its path below the corpus' folder, the same on every machine.
        path: Where it lies on this machine.
        size: In bytes.
    """

    name: str
    path: Path
    size: int


def find_documents(config: DataConfig) -> list[Document]:
    """The files of the corpus, in the order of a hash of their names. Raises CorpusError."""
    if config.path == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = list(_walk(root, suffixes=(".py",), excludes=STANDARD_LIBRARY_EXCLUDES))
    else:
        root = Path(config.path).expanduser()
        if not root.exists():
            raise CorpusError(
                f"corpus {config.path} does not exist; set data.path to a file, a folder, or stdlib"
                f"{how_to_fetch(config.path, dataset=True)}"
            )
        paths = (
            [root] if root.is_file() else list(_walk(root, suffixes=config.suffixes, excludes=()))
        )
        root = root.parent if root.is_file() else root
    documents = [
        Document(path.relative_to(root).as_posix(), path, path.stat().st_size) for path in paths
    ]
    documents = sorted(
        documents, key=lambda d: (hashlib.blake2b(d.name.encode(), digest_size=8).digest(), d.name)
    )
    if sum(d.size for d in documents) == 0:
        of = f" of {'/'.join(config.suffixes)} files" if config.suffixes else ""
        raise CorpusError(
            f"corpus {config.path} is empty{of}: {len(documents)} files, 0 bytes; set "
            "data.path to some text"
        )
    return documents


def _walk(root: Path, *, suffixes: Sequence[str], excludes: Sequence[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise CorpusError(
            f"corpus folder {error.filename} can't be read: {error.strerror}; fix its permissions"
        ) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in excludes and not f.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if (
                not name.startswith(".")
                and path.is_file()
                and (not suffixes or path.suffix in suffixes)
            ):
                yield path


def read_documents(documents: Sequence[Document], *, max_bytes: int = 0) -> Iterator[bytes]:
    """The text of each document and a newline, in pieces of whole lines, cut after `max_bytes` in
    all (0: not cut)."""
    return (text for _, text in read_numbered(documents, max_bytes=max_bytes))


def read_numbered(
    documents: Sequence[Document], *, max_bytes: int = 0
) -> Iterator[tuple[int, bytes]]:
    """As `read_documents`, each piece with the number of its document, to which its newline
    belongs."""
    left = max_bytes or sum(d.size + len(SEPARATOR) for d in documents)
    for number, document in enumerate(documents):
        try:
            with open(document.path, "rb") as file:
                while left > 0 and (piece := file.read(PIECE_BYTES) + file.readline()):
                    yield number, piece[:left]
                    left -= len(piece)
        except OSError as error:
            raise CorpusError(
                f"corpus file {document.path} can't be read: {error.strerror}; fix its "
                "permissions, or leave it out"
            ) from None
        if left <= 0:
            return
        yield number, SEPARATOR
        left -= len(SEPARATOR)
