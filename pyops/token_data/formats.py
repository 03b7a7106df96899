"""open_tokens: token files of several programs as `Tokens`.

folder with index.json         pyops data
name.idx and name.bin          Megatron-LM (IndexedDataset)
name.ds, name.ds.index         datatrove, nanotron; one file, or a folder of them
name.npy                       numpy, one dimension
name.u16, name.u32             tokens alone
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from pyops.data import CorpusError
from pyops.token_data.shard_index import INDEX, ShardIndex
from pyops.token_data.tokens import Part, Tokens

__all__ = ["open_tokens"]

MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
RAW = {".u16": "<u2", ".u32": "<u4"}


def open_tokens(path: Path | str, *, verify: bool = False) -> Tokens:
    """The tokens of a file or folder, whichever program wrote it.

    Args:
        path: As above; of Megatron's and datatrove's pairs either file, or the name without its
            end.
        verify: Compare each byte with the index, where the format has digests, in place of the
            sizes alone.

    Returns:
        The tokens; nothing of them is read yet.

    Raises:
        CorpusError: There is no such file, it is of no known format, truncated or damaged.
    """
    path = Path(path).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path, verify=verify)
        for end, opened in OPENED.items():
            if path.suffix == end and path.exists():
                return opened(path)
        for end in (".idx", ".ds"):
            if (beside := path.with_name(path.name.removesuffix(".bin") + end)).exists():
                return OPENED[end](beside)
    except OSError as error:
        raise CorpusError(
            f"tokens {path} can't be opened: {error.strerror or error}; fix its permissions"
        ) from None
    if not path.exists():
        raise CorpusError(
            f"tokens {path} do not exist; name a folder that pyops data wrote, Megatron's "
            ".bin/.idx, datatrove's .ds, .npy, .u16 or .u32"
        )
    raise CorpusError(
        f"tokens {path} are of no known format; write them with pyops data, or give the file the "
        "end .npy, .u16 or .u32"
    )


def _open_folder(folder: Path, *, verify: bool) -> Tokens:
    if not (folder / INDEX).exists() and (files := sorted(folder.glob("*.ds"))):
        return _datatrove(folder, files)
    index = ShardIndex.load(folder)
    index.check_sizes(folder)
    if verify:
        index.verify(folder)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    parts = [
        Part(
            folder / f"{shard.name}.bin",
            dtype,
            shard.num_tokens,
            partial(np.memmap, folder / f"{shard.name}.starts", dtype="<i8", mode="r"),
            shard.num_documents,
        )
        for shard in index.shards
    ]
    return Tokens(
        folder,
        parts,
        digest=index.digest,
        vocab_size=index.vocab_size,
        tokenizer=index.tokenizer,
    )


def _open_megatron(path: Path) -> Tokens:
    """Megatron-LM, megatron/core/datasets/indexed_dataset.py: the magic bytes, u64 version 1, u8
    dtype, u64 sequences, u64 documents + 1; int32 lengths, int64 offsets in bytes, int64 the
    sequence with which each document begins."""
    data, head = path.with_suffix(".bin"), struct.calcsize("<9sQBQQ")
    if not data.exists():
        raise CorpusError(f"{path} is there, but {data} is not; copy both")
    with open(path, "rb") as file:
        begin = file.read(head)
    if len(begin) < head or not begin.startswith(MEGATRON):
        raise CorpusError(f"{path} is no index of Megatron-LM: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = struct.unpack("<9sQBQQ", begin)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise CorpusError(
            f"{path} is of version {version} and dtype {code}; version 1 of whole numbers, dtype "
            f"{', '.join(map(str, MEGATRON_DTYPES))}, is read"
        )
    wanted = head + 12 * sequences + 8 * documents
    if (size := path.stat().st_size) < wanted:
        raise CorpusError(
            f"{path} is truncated: it has {size} bytes, and should have {wanted}; copy it again"
        )
    lengths = np.memmap(path, "<i4", "r", head, (sequences,)) if sequences else np.zeros(0, "<i4")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    count = int(lengths.sum(dtype=np.int64))
    if sequences:
        offsets = np.memmap(path, "<i8", "r", head + 4 * sequences, (sequences,))
        last = int(offsets[0]) + (count - int(lengths[-1])) * dtype.itemsize
        if int(offsets[0]) or int(offsets[-1]) != last:
            raise CorpusError(
                f"the sequences of {path} do not lie one behind the other; merge the files anew"
            )

    def starts() -> np.ndarray:
        begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        first = np.memmap(path, "<i8", "r", head + 12 * sequences, (documents,))
        found: np.ndarray = begins[first]
        return found

    part = Part(data, dtype, count, starts, max(0, documents - 1))
    return Tokens(path, [part], digest=_digest_of([path, data]))


def _open_datatrove(path: Path) -> Tokens:
    return _datatrove(path, [path])


def _datatrove(path: Path, files: list[Path]) -> Tokens:
    """datatrove, pipeline/tokens/tokenizer.py: tokens of 2 or 4 bytes; uint64 where each document
    ends; the tokenizer's name, a number of tokens and the same for a reader."""
    parts, beside, names = [], [], set()
    for file in files:
        ends, width, name = _ends_of(file)
        names.add(name)
        size = file.stat().st_size
        dtype = np.dtype(f"<u{width}")
        starts: Callable[[], np.ndarray] | None = None
        if ends is not None:
            starts = partial(_with_zero, ends)
        count = size // width if ends is None else int(ends[-1]) if ends.size else 0
        parts.append(Part(file, dtype, count, starts, 0 if ends is None else ends.size))
        beside.append(file)
    if len(names - {""}) > 1:
        raise CorpusError(
            f"{path} has tokens of several tokenizers: {', '.join(sorted(names - {''}))}; keep "
            "each in a folder of its own"
        )
    return Tokens(path, parts, digest=_digest_of(beside))


def _ends_of(file: Path) -> tuple[np.ndarray | None, int, str]:
    """Where documents end, None without an index; bytes of a token; the tokenizer's name."""
    index, size = Path(f"{file}.index"), file.stat().st_size
    metadata = Path(f"{file}.metadata")
    name, width = "", 0
    if metadata.exists():
        first = (metadata.read_text(encoding="utf-8").splitlines() or [""])[0]
        name, bar, last = first.rpartition("|")
        if bar and last in ("2", "4"):
            width = int(last)
        else:
            name = first
    if not index.exists():
        return None, width or 2, name
    if index.stat().st_size % 8:
        raise CorpusError(f"{index} is truncated: it has no multiple of 8 bytes; copy it again")
    ends = np.fromfile(index, dtype="<u8").astype(np.int64)
    count = int(ends[-1]) if ends.size else 0
    width = width or (4 if count and size == 4 * count else 2)
    if size != width * count:
        raise CorpusError(
            f"shard {file} has {size} bytes, and its index says {count} tokens of {width}: it is "
            "truncated, or the index is of another file; copy both again"
        )
    return ends, width, name


def _with_zero(ends: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])


def _open_numpy(path: Path) -> Tokens:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CorpusError(f"{path} is no array of numpy ({error}); copy it again") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise CorpusError(
            f"{path} has an array {found.dtype} of shape {found.shape}; tokens are whole numbers "
            "of one dimension"
        )
    part = Part(path, found.dtype, found.size, None, 0, getattr(found, "offset", 0))
    return Tokens(path, [part], digest=_digest_of([path]))


def _open_raw(path: Path) -> Tokens:
    dtype, size = np.dtype(RAW[path.suffix]), path.stat().st_size
    if size % dtype.itemsize:
        raise CorpusError(
            f"shard {path} is truncated: {size} bytes are no multiple of {dtype.itemsize}; copy it "
            "again"
        )
    return Tokens(
        path, [Part(path, dtype, size // dtype.itemsize, None)], digest=_digest_of([path])
    )


def _digest_of(files: list[Path]) -> str:
    """Of names, sizes, and the first and last bytes: formats without digests are not read through
    when they are opened."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(json.dumps([path.name, size]).encode() + file.read(4096))
            file.seek(max(0, size - 4096))
            digest.update(file.read(4096))
    return digest.hexdigest()


OPENED: dict[str, Callable[[Path], Tokens]] = {
    ".idx": _open_megatron,
    ".ds": _open_datatrove,
    ".npy": _open_numpy,
    **dict.fromkeys(RAW, _open_raw),
}
