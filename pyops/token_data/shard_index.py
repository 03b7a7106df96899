"""ShardIndex: what a folder of token shards says of itself, and whether its files are still so.

    folder/  index.json         this
             tokenizer.json     what made the tokens, where it is known
             00000.bin          tokens of the first shard, little-endian
             00000.starts       where its documents begin, and its end: int64 [documents + 1]
             00001.bin  ...     a document lies in one shard

index.json has the digest of its own fields, and of each shard the size and a digest of its bytes.
The sizes are compared whenever a folder is opened, the bytes by `verify`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyops.data import CorpusError

__all__ = ["INDEX", "TOKENIZER", "Shard", "ShardIndex", "token_dtype", "tokenizer_digest"]

FORMAT, VERSION = "pyops token shards", 1
INDEX, TOKENIZER = "index.json", "tokenizer.json"
DTYPES = ("uint8", "uint16", "uint32")
REBUILD = "copy it again, or write the folder anew with pyops data"
BLOCK = 1 << 22  # bytes that are read at a time


@dataclass(frozen=True)
class Shard:
    """One pair of files: tokens, and the starts of their documents."""

    name: str
    """The stem of both files."""
    num_tokens: int
    """In the file of tokens."""
    num_documents: int
    """That begin and end there."""
    digest: str
    """BLAKE2b, 128 bits, of the tokens' bytes and then those of the starts."""


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a folder, in order."""

    dtype: str
    """Of a token: "uint8", "uint16" or "uint32"."""
    vocab_size: int
    """Tokens are below it."""
    shards: tuple[Shard, ...]
    """In the order of their tokens."""
    tokenizer: str = ""
    """`tokenizer_digest` of what made the tokens; "" where that is not known."""
    end_of_document: int | None = None
    """The token that was written behind each document; None: none was."""

    @property
    def num_tokens(self) -> int:
        """Of all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Of all that decides on the tokens; equal digests mean equal tokens."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write index.json as a whole or not at all."""
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        text = json.dumps({**head, **dataclasses.asdict(self)}, indent=1)
        aside = folder / f"{INDEX}.tmp"
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, folder / INDEX)

    @classmethod
    def load(cls, folder: Path) -> ShardIndex:
        """The index of a folder.

        Args:
            folder: With index.json.

        Raises:
            CorpusError: There is none, it is damaged, or of a later version.
        """
        path = folder / INDEX
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CorpusError(
                f"{folder} has no {INDEX}; name a folder that pyops data has finished, or finish "
                "it by the same command"
            ) from None
        except (OSError, ValueError) as error:
            raise CorpusError(f"{path} can't be read ({error}); {REBUILD}") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise CorpusError(f"{path} is no index of token shards; {REBUILD}")
        if (version := fields.pop("version", None)) != VERSION:
            raise CorpusError(
                f"{path} is of version {version}, and this pyops reads version {VERSION}; take "
                "the pyops that wrote it"
            )
        digest = fields.pop("digest", None)
        try:
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            index = cls(shards=shards, **fields)
            same = index.digest == digest and index.dtype in DTYPES
        except (KeyError, TypeError, ValueError) as error:
            raise CorpusError(f"{path} is damaged ({error}); {REBUILD}") from None
        if not same:
            raise CorpusError(
                f"{path} was changed: its fields have not the digest {digest} that it names; "
                f"{REBUILD}"
            )
        return index

    def files(self, folder: Path, shard: Shard) -> dict[Path, int]:
        """The files of a shard, and how many bytes each has."""
        return {
            folder / f"{shard.name}.bin": shard.num_tokens * np.dtype(self.dtype).itemsize,
            folder / f"{shard.name}.starts": 8 * (shard.num_documents + 1),
        }

    def check_sizes(self, folder: Path) -> None:
        """Compare the size of each file with the index.

        Args:
            folder: Of the shards.

        Raises:
            CorpusError: By the name of the file that is not there, too short or too long.
        """
        for shard in self.shards:
            for path, wanted in self.files(folder, shard).items():
                try:
                    size = path.stat().st_size
                except OSError as error:
                    raise CorpusError(
                        f"shard {path} can't be opened ({error.strerror}); {REBUILD}"
                    ) from None
                if size != wanted:
                    state = "truncated" if size < wanted else "longer than it was written"
                    raise CorpusError(
                        f"shard {path} is {state}: it has {size} bytes, and {INDEX} says {wanted}; "
                        f"{REBUILD}"
                    )

    def verify(self, folder: Path) -> None:
        """Compare each byte with the index.

        Args:
            folder: Of the shards.

        Raises:
            CorpusError: By the name of the shard that differs.
        """
        self.check_sizes(folder)
        for shard in self.shards:
            digest = hashlib.blake2b(digest_size=16)
            for path in self.files(folder, shard):
                with open(path, "rb") as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
            if digest.hexdigest() != shard.digest:
                raise CorpusError(
                    f"shard {folder / shard.name}.bin or .starts has other bytes than were "
                    f"written (digest {digest.hexdigest()}, and {INDEX} says {shard.digest}); "
                    f"{REBUILD}"
                )


def token_dtype(vocab_size: int) -> str:
    """The narrowest dtype of tokens below `vocab_size`."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def tokenizer_digest(text: str) -> str:
    """The digest of a tokenizer.json, the same however it is laid out; how it cuts and pads texts
    does not count.

    Args:
        text: Of the file.

    Raises:
        ValueError: It is no JSON.
    """
    fields: dict[str, Any] = json.loads(text)
    kept = {key: value for key, value in fields.items() if key not in ("truncation", "padding")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()
