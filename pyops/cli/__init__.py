"""The command `pyops`; its subcommands are in pyops/cli/commands.py."""

from pyops.cli.commands import main

__all__ = ["main"]
