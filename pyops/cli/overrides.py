"""--set KEY=VALUE: keys of a configuration that a command overrides."""

from __future__ import annotations

import argparse

__all__ = ["add_overrides"]


def add_overrides(
    parser: argparse.ArgumentParser, *, help: str = "override a key of the file"
) -> None:
    """Let a command take `--set KEY=VALUE`, any number of times.

    Args:
        parser: Of the command, whose arguments have a list `overrides` then.
        help: What is said of it.
    """
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help
    )
