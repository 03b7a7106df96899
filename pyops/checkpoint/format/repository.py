"""Names of the Hugging Face Hub, given where a folder is asked for: nothing is fetched, but the
message says how to."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["how_to_fetch"]

NAME = re.compile(r"(?:(?P<owner>[A-Za-z0-9][\w.-]*)/)?[A-Za-z0-9][\w.-]*")


def how_to_fetch(path: Path | str, *, dataset: bool = False, bare: bool = False) -> str:
    """What a message about a missing `path` goes on with where it could be "owner/name" of the Hub;
    "" else.

    Args:
        dataset: A data set's name, not a model's.
        bare: A name without owner counts too, such as "gpt2".
    """
    name = str(path)
    found = NAME.fullmatch(name)
    if found is None or Path(name).exists() or not (found["owner"] or bare):
        return ""
    if (
        found["owner"] and Path(found["owner"]).exists()
    ):  # a folder's path, with a mistake further on
        return ""
    more = ', repo_type="dataset"' if dataset else ""
    return (
        f". If {name!r} is a name on the Hugging Face Hub, nothing is fetched from "
        "there: give the folder that "
        f'huggingface_hub.snapshot_download("{name}"{more}) returns'
    )
