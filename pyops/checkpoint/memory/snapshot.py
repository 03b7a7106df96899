"""Snapshot: what one rank writes of a checkpoint in memory, a folder with a header.

step-00000010.of-00001/              the state of rank 1 after step 10
    header.json                      run, attempt, step, rank, world, checksums of the files and its
                                     own
    own-00001.safetensors, ...       the files that this rank has in a checkpoint on the disk
step-00000020.of-00001.tmp/          being written, or left by a process that was killed
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.format.tensor_file import TensorFile

__all__ = [
    "HEADER",
    "Header",
    "Snapshot",
    "put_in_place",
    "rank_folder",
    "snapshot_name",
    "write_header",
]

HEADER = "header.json"
NAME = re.compile(r"step-(\d{8,})\.of-(\d{5,})")
FILE = re.compile(r"(shared|(own|shards)-\d+)\.safetensors")


@dataclass(frozen=True)
class Header:
    """Whose state a snapshot is.

    Attributes:
        run: The run's id, which another run never has.
        attempt: When rank 0 of these processes began, in ns since 1970: a run that goes on has
            another, and what it computes may be other numbers at the same step.
        step: Steps that were taken.
        rank: Whose state it is, not who keeps it.
        world: Ranks of the run.
        entry: What the manifest of a checkpoint says of this rank: its files with their checksums.
        state_tree: Rank 0's: the nested state without its tensors, as a manifest has it.
    """

    run: str
    attempt: int
    step: int
    rank: int
    world: int
    entry: dict[str, Any]
    state_tree: Any = None


def snapshot_name(step: int, rank: int) -> str:
    """The name of the folder of a rank's state after a step."""
    return f"step-{step:08}.of-{rank:05}"


def rank_folder(rank: int) -> str:
    """The name of the folder in which a rank keeps its own state and that of another."""
    return f"rank-{rank:05}"


def write_header(folder: Path, header: Header) -> None:
    """Write the header, with a checksum of its own, into the folder of the snapshot's files."""
    text = json.dumps(asdict(header))
    sealed = {"crc32": zlib.crc32(text.encode()), "header": text}
    (folder / HEADER).write_text(json.dumps(sealed))


def put_in_place(aside: Path, folder: Path) -> None:
    """Give a snapshot that is whole its name; one of the same name goes."""
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose header was read and belongs to this run.

    Attributes:
        folder: Where it lies.
        header: Whose state it is.
    """

    folder: Path
    header: Header

    @classmethod
    def read(cls, folder: Path, *, run: str) -> Snapshot:
        """The snapshot in this folder, by its header alone; `compare` looks at the files.

        Args:
            folder: Of the snapshot.
            run: The id of this run.

        Raises:
            CheckpointError: The header is damaged, or of another run, step or rank.
        """
        try:
            sealed = json.loads((folder / HEADER).read_text())
            if zlib.crc32(sealed["header"].encode()) != sealed["crc32"]:
                raise ValueError("its checksum is another")
            header = Header(**json.loads(sealed["header"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"the copy {folder} is refused: its {HEADER} can't be read ({error})"
            ) from None
        if header.run != run:
            raise CheckpointError(
                f"the copy {folder} is refused: it is of run {header.run}, this is run {run}"
            )
        if folder.name != snapshot_name(header.step, header.rank) or header.rank >= header.world:
            raise CheckpointError(
                f"the copy {folder} is refused: its {HEADER} is of step {header.step}, rank "
                f"{header.rank} of {header.world}"
            )
        return cls(folder, header)

    def compare(self) -> None:
        """Compare every file with its checksums.

        Raises:
            CheckpointError: A file is missing, cut off or damaged.
        """
        try:
            files = dict(self.header.entry["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the copy {self.folder} is refused: its {HEADER} lists no files ({error!r})"
            ) from None
        for name, expected in files.items():
            try:
                if not FILE.fullmatch(name):
                    raise ValueError("is no file of a checkpoint")
                TensorFile(self.folder / name, expected).compare(0, expected["bytes"])
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                raise CheckpointError(
                    f"the copy {self.folder} is refused: {name} {error}"
                ) from None

    @property
    def files(self) -> list[Path]:
        """The files that a checkpoint on the disk has of this rank."""
        return [self.folder / name for name in self.header.entry["files"]]
