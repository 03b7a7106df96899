"""Preparing and reading tokens.

    preparing   `prepare_tokens` on all processors, files and processes and all, beside the package
                tokenizers alone: one call for all documents, on all processors, nothing written
    reading     the next batch of a mixture of two data sets with 10^9 tokens in all, beside numpy
                that copies rows of as many tokens at random places of one file
    order       1,024 places of a permutation of 10^12 numbers

`anonymous_mib`: how much a process that reads 2,000 such batches grows, pages of the files left
out. `percent_of_step`: of a step of a GPT of 4 layers and width 192, what it waits for a batch that
a thread makes ahead.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.data import DataConfig, PairTokenizer
from pyops.data.corpus import find_documents
from pyops.models import GPT, GPTConfig
from pyops.token_data import (
    Permutation,
    Prefetched,
    PrepareOptions,
    SequenceRows,
    ShardIndex,
    TokenBatches,
    TokenSource,
    open_tokens,
    prepare_tokens,
)

__all__ = ["cases", "preparing", "reading", "run"]

ROWS, LENGTH = 64, 4096


def _texts(size: int) -> list[str]:
    """The standard library's sources, over again until there are `size` bytes."""
    once = [each.path.read_text(errors="replace") for each in find_documents(DataConfig())]
    found, total = [], 0
    while total < size:
        for text in once:
            found.append(text)
            total += len(text)
            if total >= size:
                break
    return found


def preparing(folder: Path, size: int) -> Case:
    """size: bytes of text."""
    import tokenizers

    texts = _texts(size)
    path, source, out = (folder / name for name in ("tokenizer.json", "texts.jsonl", "out"))
    learnt = (text.encode() for text in texts[:200])
    PairTokenizer.train(learnt, vocab_size=8192).save(path)
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    inner = tokenizers.Tokenizer.from_file(str(path))

    def ours() -> ShardIndex:
        shutil.rmtree(out, ignore_errors=True)
        return prepare_tokens([str(source)], out, PrepareOptions(str(path))).index

    def check() -> float:
        ours()
        wanted = [token for found in inner.encode_batch_fast(texts) for token in found.ids]
        if not np.array_equal(open_tokens(out, verify=True).read(0, len(wanted)), wanted):
            raise AssertionError("the tokens in the shards are others")
        return 0.0

    calls = {
        "pyops": ours,
        "tokenizers": lambda: [found.ids for found in inner.encode_batch_fast(texts)],
    }
    name = f"preparing {size / 1e6:.0f} MB"
    return Case("data", name, calls, check=check, targets={"tokenizers": 0.8})


def _large(path: Path, count: int) -> Path:
    """A file of `count` tokens, most of which are a hole in it."""
    with open(path, "wb") as file:
        file.truncate(2 * count)
    return path


def _batches(paths: list[Path], *, rows: int, length: int) -> TokenBatches:
    sources = []
    for path in paths:
        tokens = open_tokens(path)
        own = SequenceRows(tokens, sequence_length=length)
        sources.append(TokenSource(own, digest=tokens.digest))
    return TokenBatches(sources, global_batch=rows, seed=0)


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _percent_of_step(paths: list[Path]) -> float:
    """What a step of a small GPT waits for its batch."""
    config = GPTConfig(sequence_length=256, num_layers=4, num_heads=4, dim=192)
    model = GPT(config, seed=0)
    batches = Prefetched(_batches(paths, rows=16, length=256), depth=2)
    batches.next()
    begin, waited = time.perf_counter(), batches.waited_s
    for _ in range(5):
        batch = batches.next()
        model.loss(batch["tokens_BT"], batch["targets_BT"]).backward()
    seconds, waited = time.perf_counter() - begin, batches.waited_s - waited
    batches.close()
    return round(100 * waited / seconds, 3)


def reading(folder: Path, count: int) -> Case:
    """count: tokens of each of two data sets."""
    paths = [_large(folder / f"{name}.u16", count) for name in "ab"]
    batches = _batches(paths, rows=ROWS, length=LENGTH)
    plain = np.memmap(paths[0], dtype=np.uint16, mode="r")
    draw = np.random.default_rng(0)

    def copied() -> torch.Tensor:
        found = np.empty((ROWS, LENGTH + 1), dtype=np.int64)
        for row, start in zip(found, draw.integers(0, count - LENGTH - 1, ROWS), strict=True):
            row[:] = plain[start : start + LENGTH + 1]
        return torch.from_numpy(found)

    batches.next()
    before = _anonymous_kib()
    for _ in range(2000 if count > 10**8 else 20):
        batches.next()
    facts = {
        "anonymous_mib": round((_anonymous_kib() - before) / 1024, 1),
        "percent_of_step": _percent_of_step(paths),
        "tokens": ROWS * LENGTH,
    }
    calls = {"pyops": batches.next, "numpy": copied}
    name = f"reading {ROWS} rows of {LENGTH} of {2 * count:.0e} tokens"
    most = {"anonymous_mib": 200, "percent_of_step": 1}
    return Case("data", name, calls, check=lambda: None, facts=facts, most=most)


def order() -> Case:
    """1,024 places of 10^12."""
    permutation, places = Permutation(10**12, seed=0, name="bench"), np.arange(1024)

    def check() -> float:
        if not np.array_equal(permutation.positions_of(permutation(places)), places):
            raise AssertionError("it is no permutation")
        return 0.0

    calls = {"pyops": lambda: permutation(places)}
    return Case("data", "order of 10^12, 1,024 places", calls, check=check)


def cases(folder: Path) -> Iterator[tuple[str, partial[Case]]]:
    """(name, what makes it)"""
    yield "preparing", partial(preparing, folder, 100_000_000)
    yield "reading", partial(reading, folder, 500_000_000)
    yield "order", partial(order)


def run(options: Options) -> list[Row]:
    if options.device.type != "cpu":
        print("the data bench runs on CPU only")
        return []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        made = (
            make
            for name, make in cases(Path(folder))
            if options.only is None or options.only in name
        )
        return run_cases(made, rounds=min(options.rounds, 5))
