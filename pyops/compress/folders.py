"""Folders of models between the steps: written whole or not at all, and read again.

    form         files
    "dense"      config.json, model.safetensors: as pyops.hub.save writes them, for anybody
    "packed"     of a pruned model: compressed.json, pruned.safetensors    bits, what is alive
    "2:4"        the same, with two values of each four inputs
    "quantized"  of a quantized model: compressed.json, quantized.json, quantized.safetensors

and beside them tokenizer.json, ..., generation_config.json of the folder in.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pyops import hub, pruning, quantized
from pyops.comm.agreement import on_first_rank, ranks_agree
from pyops.hub.architectures.pattern_fields import pattern_fields
from pyops.hub.architectures.registry import architecture_of
from pyops.hub.folder_files import CONFIG, read_config
from pyops.hub.folder_saving import INDEX
from pyops.hub.pretrained.saving import COMPANIONS, GENERATION
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import Ranks

__all__ = ["FORMS", "file_bytes", "form_of", "load_model", "write_model"]

FORMS = ("dense", "packed", "2:4", "quantized")
NOTE, VERSION = "compressed.json", 1
UNREADABLE = {"quant_method": "pyops"}  # in config.json: what reads plain weights refuses it


def form_of(folder: Path | str) -> str:
    """In which of `FORMS` a folder holds its weights.

    Args:
        folder: Of a model.

    Raises:
        HubError: Its compressed.json is damaged.
    """
    return "dense" if (note := _note(Path(folder))) is None else str(note["form"])


def write_model(
    model: Any,
    folder: Path,
    *,
    source: Path,
    ranks: Ranks,
    form: str,
    dtype: torch.dtype,
) -> None:
    """Write a model, with the tokenizer of the folder in. A collective of the ranks that share it.

    Args:
        model: This rank's part of it.
        folder: Which is not there.
        source: The folder in.
        ranks: That share the layers.
        form: One of `FORMS`; others than "dense" are of models that are pruned or quantized.
        dtype: Of the numbers in the files; of "dense" alone.
    """
    if form == "dense":
        if next(model.parameters()).dtype != dtype:
            model = copy.deepcopy(model).to(dtype)
        hub.save(model, folder, group=ranks, like=source)
    elif form == "quantized":
        quantized.save(model, folder, group=ranks)
    else:
        pruning.save(model, folder, form=form, group=ranks)

    def rest() -> None:
        for name in (*COMPANIONS, GENERATION):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if form != "dense":
            _describe(model, folder, source, form)

    on_first_rank(rest, group=ranks.group)


def _describe(model: Any, folder: Path, source: Path, form: str) -> None:
    """The files that say what is in those of the weights."""
    note = {"version": VERSION, "form": form, "model": asdict(model.config)}
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n")
    architecture = architecture_of(model)
    written = {**architecture.write(model.config), **pattern_fields(model.config)}
    values = {**read_config(source), **written, "quantization_config": UNREADABLE}
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    (weights,) = folder.glob("*.safetensors")
    with safe_open(weights, "pt") as opened:
        names = list(opened.keys())
    index = {"weight_map": dict.fromkeys(names, weights.name)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_model(
    folder: Path | str,
    *,
    ranks: Ranks,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GPT:
    """The model of a folder in any of the `FORMS`, in eval mode. A collective of the ranks that
    share it.

    Args:
        folder: Of a causal language model.
        ranks: That share the layers, whatever ranks wrote it.
        device: Of the parameters.
        dtype: Of the parameters; None: as they are in the files.

    Raises:
        HubError: On every rank, for a folder that can't be read, or is of another kind of model.
        ValueError: On every rank, for heads that the ranks can't share.
    """
    folder = Path(folder)
    with ranks_agree(ranks.group):
        note = _note(folder)
    if note is None:
        found = hub.load(folder, group=ranks, device=device, dtype=dtype)
        if not isinstance(found, GPT):
            kind = read_config(folder).get("model_type")
            raise hub.HubError(
                f"{folder} has a model of type {kind!r}, which does not predict the token that "
                "follows; name a folder of a GPT-2 or a Llama"
            )
        return found
    with ranks_agree(ranks.group):
        config, held = _config(folder, note), _dtype(folder)
        model = GPT(config, group=ranks, seed=None, device=device, dtype=held)
    try:
        if note["form"] == "quantized":
            quantized.load(model, folder, group=ranks)
        else:
            pruning.load(model, folder, group=ranks)
    except ValueError as error:
        raise hub.HubError(str(error)) from None
    return model.to(dtype=dtype or held).eval()


def _note(folder: Path) -> dict[str, Any] | None:
    """What compressed.json says; None: there is none."""
    path = folder / NOTE
    if not path.is_file():
        return None
    try:
        note: dict[str, Any] = json.loads(path.read_text())
        if note["version"] != VERSION or note["form"] not in FORMS[1:]:
            raise ValueError(f"version {note['version']!r}, form {note['form']!r}")
        if not isinstance(note["model"], dict):
            raise ValueError("model is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise hub.HubError(f"{path} is damaged ({error}); compress the model anew") from None
    return note


def _config(folder: Path, note: dict[str, Any]) -> GPTConfig:
    try:
        return GPTConfig(**note["model"])
    except (ValueError, TypeError) as error:
        raise hub.HubError(
            f"{folder / NOTE} is damaged ({error}); compress the model anew"
        ) from None


def _dtype(folder: Path) -> torch.dtype:
    """Of the floating numbers of the embedding."""
    try:
        (weights,) = folder.glob("*.safetensors")
        with safe_open(weights, "pt") as opened:
            names = [name for name in opened.keys() if name.startswith("embedding.token.weight")]  # noqa: SIM118
            found: torch.dtype = opened.get_tensor(names[0]).dtype
    except (OSError, ValueError, IndexError, SafetensorError) as error:
        raise hub.HubError(f"{folder} is damaged ({error}); compress the model anew") from None
    return found


def file_bytes(folder: Path) -> int:
    """Bytes of the files that hold a folder's weights.

    Args:
        folder: Of a model.
    """
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
