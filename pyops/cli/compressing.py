"""`pyops compress`: a folder's model becomes smaller, and a table says what that costs."""

from __future__ import annotations

import argparse

from pyops.cli.first_rank import is_first_rank
from pyops.cli.overrides import add_overrides

__all__ = ["add_compress", "compressed"]


def add_compress(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops compress`."""
    parser.add_argument("config", metavar="CONFIG.toml")
    add_overrides(parser, help="override a key of the file: --set model.output=smaller")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def compressed(given: argparse.Namespace) -> str:
    """What `pyops compress` prints at its end.

    Args:
        given: The arguments.

    Raises:
        ConfigError, CorpusError, HubError: On every rank alike, for what the user can put right.
    """
    from pyops.compress import compress, load_compress_config

    def say(line: str) -> None:
        if is_first_rank():
            print(line, flush=True)

    config = load_compress_config(given.config, overrides=given.overrides)
    report = compress(config, device=given.device, say=say)
    return f"{report.table()}\nfolder out: {report.output}"
