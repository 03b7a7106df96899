"""save_pretrained: a model of which each rank has a part becomes a Hugging Face folder.

    pp 0, tp 0   q_proj rows 0 .. 31  --.
    pp 0, tp 1   q_proj rows 32 .. 63 --+--> q_proj --.
                                             k_proj --+--> model-00001-of-00002.safetensors
    pp 1, tp 0   ...                                       model-00002-of-00002.safetensors

Written beside the folder, which is replaced at the end.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pyops.checkpoint.writing import replace_folder
from pyops.comm.agreement import agree, gather, ranks_agree
from pyops.hub.folder_files import CONFIG, HubError
from pyops.hub.pretrained.layouts import gathered
from pyops.hub.pretrained.save_plan import (
    INDEX,
    Unit,
    file_names,
    files_of,
    held_tensors,
    left_out,
)
from pyops.hub.pretrained.sources import is_of_transformers, reverted, with_rules
from pyops.mesh import ALONE, Mesh, ProcessGroupLike
from pyops.tensor_parallel import Ranks

__all__ = ["save_pretrained"]

GENERATION = "generation_config.json"
# What a folder has beside configuration and weights, and goes with them.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class Position:
    """This rank's place among those that have the model."""

    group: ProcessGroupLike
    """All of them."""

    ranks: Ranks
    """Those that share each layer."""

    pp: int = 0
    """Its number among the ranks that have other layers."""

    writes_part: bool = True
    """Whether it is of the first copy of the model."""

    @property
    def first(self) -> bool:
        """Whether it writes what is there once."""
        return self.pp == 0 and self.writes

    @property
    def writes(self) -> bool:
        """Whether it writes files."""
        return self.writes_part and self.ranks.rank == 0

    @classmethod
    def of(cls, mesh: Mesh | None) -> Position:
        """In a mesh; None: this process alone."""
        if mesh is None or mesh.device_mesh is None:
            return cls(ALONE, Ranks.of(ALONE))
        copy_number = mesh.rank("dp") + mesh.rank("cp")
        return cls(None, Ranks.of(mesh), mesh.rank("pp"), copy_number == 0)


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: Path | str,
    *,
    mesh: Mesh | None = None,
    max_file_bytes: int = 1 << 30,
    tokenizer_from: Path | str | None = None,
) -> list[str]:
    """Writes a folder that from_pretrained of transformers reads: config.json, and the tensors with
    the names, layouts and dtypes of the uncut model. Collective: every rank must call it.

    Tensors are gathered over tensor-parallel ranks one after the other; the first of these holds
    those of one file at a time. Each pipeline rank writes files of its own. At stage 3 of ZeRO call
    it within `optimizer.whole_parameters()`.

    Args:
        model: Of a class of transformers; cut by `pyops.tensor_parallel.parallelize` or not, with
            all modules or those of this rank's pipeline stages, under their names in the whole
            model.
        folder: Written beside its place and renamed, so that it is whole or not there. What a save
            wrote there is replaced; a folder with anything else in it is refused.
        mesh: Of all ranks; None: this process alone has the whole model.
        max_file_bytes: Of tensors in one file, which holds one tensor at least.
        tokenizer_from: A folder whose tokenizer's files are copied.

    Returns:
        The names of the files.

    Raises:
        HubError: On every rank: a model that is none of transformers, parameters without memory, a
            folder of something else, a disk that is full.
        ValueError: max_file_bytes is less than 1.
    """
    position, folder = Position.of(mesh), Path(folder)
    aside = folder.with_name(folder.name + ".tmp")
    try:
        with ranks_agree(position.group):
            _check(model, folder, max_file_bytes, tokenizer_from)
            held = held_tensors(model)
            if position.first:
                shutil.rmtree(aside, ignore_errors=True)
                with _disk(folder):
                    aside.mkdir(parents=True)
        with with_rules(model):
            stages = _of_stages(sorted(held), position)
            dropped = left_out(stages, position.pp, model)
            files = files_of(
                model, {n: each for n, each in held.items() if n not in dropped}, max_file_bytes
            )
            counts = _of_stages(len(files), position)
            names = file_names(sum(counts[: position.pp]), len(files), sum(counts))
            written = _write_files(model, dict(zip(names, files, strict=True)), aside, position)
        return _finish(model, folder, aside, written, position, tokenizer_from)
    finally:
        if position.first:
            shutil.rmtree(aside, ignore_errors=True)


def _of_stages(value: Any, position: Position) -> list[Any]:
    """What each pipeline rank has, in their order."""
    everyone = gather((position.writes, position.pp, value), group=position.group)
    found = {pp: each for writes, pp, each in everyone if writes}
    return [found[pp] for pp in sorted(found)]


def _check(
    model: nn.Module, folder: Path, max_file_bytes: int, tokenizer_from: Path | str | None
) -> None:
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}; it must be 1 or more")
    if not is_of_transformers(model):
        raise HubError(
            f"save_pretrained: {type(model).__name__} is no model of transformers; save those of "
            "pyops with pyops.hub.save, others with pyops.checkpoint.save"
        )
    if tokenizer_from is not None and not Path(tokenizer_from).is_dir():
        raise HubError(f"tokenizer_from is {tokenizer_from}, which is no folder; name one, or None")
    if not os.path.lexists(folder):
        return
    there = sorted(os.listdir(folder)) if folder.is_dir() else [folder.name]
    known = {CONFIG, INDEX, GENERATION, *COMPANIONS}
    foreign = [
        name
        for name in there
        if name not in known and not re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name)
    ]
    if there and (foreign or CONFIG not in there):
        what = f"holds {', '.join(foreign[:3])}" if foreign else f"has no {CONFIG}"
        raise HubError(
            f"{folder} is there already and {what}; a save replaces a folder that it wrote and "
            "nothing else: remove it, or name another place"
        )


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """HubError for what the disk refuses."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise HubError(
            f"{folder} can't be written: {getattr(error, 'strerror', None) or error}; make room or "
            "choose another place"
        ) from None


def _write_files(
    model: nn.Module, files: dict[str, list[Unit]], aside: Path, position: Position
) -> dict[str, tuple[str, int]]:
    """{name: (file, bytes)} of the tensors that this rank wrote. Collective over the ranks that
    share layers, and then over all."""
    written: dict[str, tuple[str, int]] = {}
    error: Exception | None = None
    for file, units in files.items() if position.writes_part else ():
        tensors: dict[str, Tensor] = {}
        for unit in units:
            # Also after an error: the other ranks wait in the collectives.
            found = {
                each.name: gathered(each.module, each.key, each.tensor, position.ranks)
                for each in unit
            }
            if position.writes and error is None:
                whole = {name: tensor for name, tensor in found.items() if tensor is not None}
                made = reverted(model, whole)
                tensors.update({name: _alone(tensor) for name, tensor in made.items()})
        if position.writes and error is None:
            try:
                with _disk(aside):
                    _write_file(aside / file, tensors)
            except HubError as caught:
                error = caught
            written.update({name: (file, each.nbytes) for name, each in tensors.items()})
    agree(error, group=position.group)
    return written


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, and with memory of its own: safetensors writes no views of larger tensors."""
    found = tensor.detach().cpu().contiguous()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _finish(
    model: Any,
    folder: Path,
    aside: Path,
    written: dict[str, tuple[str, int]],
    position: Position,
    tokenizer_from: Path | str | None,
) -> list[str]:
    """The rest of the folder, by the first rank, and the renaming."""
    everything = {
        n: found for each in gather(written, group=position.group) for n, found in each.items()
    }
    files = sorted({file for file, _ in everything.values()})
    with ranks_agree(position.group), _disk(folder):
        if position.first:
            if len(files) > 1:
                total = sum(size for _, size in everything.values())
                index = {name: everything[name][0] for name in sorted(everything)}
                content = {"metadata": {"total_size": total}, "weight_map": index}
                (aside / INDEX).write_text(json.dumps(content, indent=2) + "\n")
            _write_config(model, aside)
            for name in COMPANIONS if tokenizer_from is not None else ():
                source = Path(tokenizer_from or ".") / name
                if source.is_file():
                    shutil.copyfile(source, aside / name)
            replace_folder(folder, aside)
    return [CONFIG, *files]


def _write_config(model: Any, aside: Path) -> None:
    """As save_pretrained of transformers."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(aside)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(aside)
