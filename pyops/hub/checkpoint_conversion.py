"""Between Hugging Face folders and checkpoints, whose tensors have our names and packing.

to_checkpoint     a folder  ->  {"model": state_dict of GPT, BERT, T5 or ViT,
                                "model_class": "GPT", "model_config": {...}}
from_checkpoint   such a checkpoint, or one that `pyops train` wrote, on any ranks  ->  a folder

Both run as one process and hold the model once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pyops.checkpoint import CheckpointError, LazyTensor, Reader, save
from pyops.hub.architectures.registry import ARCHITECTURES
from pyops.hub.folder_files import HubError
from pyops.hub.folder_loading import load
from pyops.hub.folder_saving import save as save_folder

__all__ = ["from_checkpoint", "to_checkpoint"]


def to_checkpoint(folder: Path | str, checkpoint: Path | str) -> dict[str, tuple[int, ...]]:
    """Make a checkpoint of a Hugging Face folder.

    GPT(GPTConfig(**state["model_config"])).load_state_dict(state["model"]) is then the folder's
    model.

    Args:
        folder: The Hugging Face folder.
        checkpoint: The folder to be made.

    Returns:
        {name: shape} of the model's tensors.

    Raises:
        HubError: When the folder can't be read.
        CheckpointError: When there is a checkpoint already.
    """
    if Path(checkpoint).exists():
        raise CheckpointError(f"{checkpoint} is there already; remove it, or name another place")
    model = load(folder)
    config: Any = model.config
    state = model.state_dict()
    save(
        checkpoint,
        {"model": state, "model_class": type(model).__name__, "model_config": asdict(config)},
    )
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@torch.no_grad()
def from_checkpoint(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    like: Path | str | None = None,
) -> dict[str, tuple[int, ...]]:
    """Write the model of a checkpoint as a Hugging Face folder; {our name: shape}. dtype: of the
    tensors; None: as they are.

    Args:
        like: As in `save`.

    Raises:
        CheckpointError: For a checkpoint that is damaged.
        HubError: For one that does not hold a model that can be written, and for a folder that is
            there already.
    """
    if Path(folder).exists():
        raise HubError(f"{folder} is there already; remove it, or name another place")
    reader = Reader(checkpoint)
    reader.check_files()
    state = reader.state()
    if not isinstance(state, Mapping) or not {"model", "model_config"} <= state.keys():
        raise HubError(
            f'{checkpoint} has no "model" and "model_config", as those of pyops train '
            "have; name one, or a file.safetensors to "
            "write"
        )
    kinds = {a.model.__name__: a for a in ARCHITECTURES}
    kind = state.get("model_class", "GPT")
    if kind not in kinds:
        raise HubError(
            f"{checkpoint} holds a {kind!r}, which is no model that can be written; "
            f"these are {', '.join(kinds)}"
        )
    stored: dict[str, LazyTensor] = dict(state["model"])
    try:
        config = kinds[kind].config(**state["model_config"])
    except (TypeError, ValueError) as error:
        raise HubError(f"{checkpoint} has a model_config that is none of {kind}: {error}") from None
    found = {tensor.dtype for tensor in stored.values()}
    if dtype is None and len(found) != 1:
        raise HubError(
            f"{checkpoint} holds tensors of {sorted(map(str, found))}; name the dtype to write"
        )
    model = kinds[kind].model(config, seed=None, dtype=dtype or found.pop())
    parameters = dict(model.named_parameters())
    wrong = [
        name
        for name, p in parameters.items()
        if name not in stored or stored[name].shape != tuple(p.shape)
    ]
    if wrong:
        raise HubError(
            f"{checkpoint} lacks {wrong[:6]}, or has them in other shapes than its "
            "model_config says"
        )
    for name, parameter in parameters.items():
        parameter.copy_(stored[name].read())
    save_folder(model, folder, like=like)
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}
