"""`pyops data`: texts become a folder of token shards, which `pyops train` reads.

$ pyops data web.jsonl notes/ --tokenizer tokenizer.json --out tokens/web
1,203,441 tokens of 2,310 documents in 1 shard: tokens/web (4.9 MB at 3.2 MB/s)
$ pyops data --check tokens/web
"""

from __future__ import annotations

import argparse

__all__ = ["add_data", "tokens_made"]


def add_data(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops data`."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="texts, .jsonl, .parquet, folders of them, or hf:NAME@CONFIG:SPLIT",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json, or a folder that has one"
    )
    parser.add_argument("--out", metavar="FOLDER", help="a new folder, or one to go on with")
    parser.add_argument(
        "--key", default="text", help="of the text in JSON, or the name of its column (text)"
    )
    parser.add_argument(
        "--end",
        default="",
        metavar="TOKEN",
        help="behind each document; none: none (of a folder, what ends a text there)",
    )
    parser.add_argument(
        "--bad-unicode",
        choices=["refuse", "replace", "skip"],
        default="refuse",
        help="documents that are no UTF-8 (refuse)",
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes; 0: all processors (0)"
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1 << 28,
        metavar="N",
        help="a file is closed when it has as many (268435456)",
    )
    parser.add_argument(
        "--check", metavar="FOLDER", help="read token files through and say what they are"
    )


def tokens_made(given: argparse.Namespace) -> str:
    """What `pyops data` prints.

    Args:
        given: The arguments.

    Raises:
        CorpusError: For what the user can put right.
    """
    from pyops.data import CorpusError
    from pyops.token_data import PrepareOptions, open_tokens, prepare_tokens

    if given.check is not None:
        tokens = open_tokens(given.check, verify=True)
        documents = f" of {tokens.num_documents:,} documents" if tokens.num_documents else ""
        vocabulary = f", vocabulary {tokens.vocab_size:,}" if tokens.vocab_size else ""
        return (
            f"{tokens.num_tokens:,} tokens{documents} in {len(tokens.parts):,} files"
            f"{vocabulary}: {given.check} is whole"
        )
    for name in ("tokenizer", "out"):
        if getattr(given, name) is None:
            raise CorpusError(f"--{name} is missing; write pyops data SOURCE... --{name} ...")
    options = PrepareOptions(
        given.tokenizer,
        key=given.key,
        end=given.end,
        bad_unicode=given.bad_unicode,
        workers=given.workers,
        shard_tokens=given.shard_tokens,
    )
    made = prepare_tokens(given.sources, given.out, options)
    index, counts = made.index, made.counts
    left = f"; {counts.num_empty:,} empty documents left out" if counts.num_empty else ""
    verb = "replaced in" if given.bad_unicode == "replace" else "skipped:"
    bad = f"; bad Unicode {verb} {counts.num_bad:,} documents" if counts.num_bad else ""
    return (
        f"{index.num_tokens:,} tokens of {index.num_documents:,} documents in "
        f"{len(index.shards):,} shards: {given.out} ({counts.num_bytes / 1e6:,.1f} MB at "
        f"{counts.num_bytes / 1e6 / made.seconds:,.1f} MB/s){left}{bad}"
    )
