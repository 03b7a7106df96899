"""Folders of models between the steps: written whole or not at all, and read again.

config.json  model.safetensors        as pyops.hub.save writes them
tokenizer.json, ...                   of the folder in
generation_config.json                of the folder in
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyops import hub
from pyops.comm.agreement import on_first_rank
from pyops.hub.folder_files import read_config
from pyops.hub.pretrained.saving import COMPANIONS, GENERATION
from pyops.models import GPT
from pyops.tensor_parallel import Ranks

__all__ = ["file_bytes", "load_model", "write_model"]


def write_model(
    model: Any,
    folder: Path,
    *,
    source: Path,
    ranks: Ranks,
    dtype: torch.dtype,
    reports: Mapping[str, str] | None = None,
) -> None:
    """Write a model, with the tokenizer of the folder in. A collective of the ranks that share it.

    Args:
        model: This rank's part of it.
        folder: Which is not there.
        source: The folder in.
        ranks: That share the layers.
        dtype: Of the numbers in the files.
        reports: {name of a further file: its text}.
    """
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    hub.save(model, folder, group=ranks, like=source)

    def rest() -> None:
        for name in (*COMPANIONS, GENERATION):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        for name, text in (reports or {}).items():
            (folder / name).write_text(text)

    on_first_rank(rest, group=ranks.group)


def load_model(
    folder: Path | str,
    *,
    ranks: Ranks,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GPT:
    """The model of a folder, in eval mode. A collective of the ranks that share it.

    Args:
        folder: Of a causal language model.
        ranks: That share the layers.
        device: Of the parameters.
        dtype: Of the parameters; None: as they are in the files.

    Raises:
        HubError: On every rank, for a folder that can't be read, or is of another kind of model.
        ValueError: On every rank, for heads that the ranks can't share.
    """
    found = hub.load(folder, group=ranks, device=device, dtype=dtype)
    if not isinstance(found, GPT):
        kind = read_config(folder).get("model_type")
        raise hub.HubError(
            f"{folder} has a model of type {kind!r}, which does not predict the token that follows;"
            " name a folder of a GPT-2 or a Llama"
        )
    return found


def file_bytes(folder: Path) -> int:
    """Bytes of the files that hold a folder's weights.

    Args:
        folder: Of a model.
    """
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
