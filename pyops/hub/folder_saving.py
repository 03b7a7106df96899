"""A model of ours becomes a Hugging Face folder: tensors are gathered to rank 0 one after the other
and written at once.

    rank 0   qkv part --gather--> qkv whole --unpack--> q_proj | k_proj | v_proj
    rank 1   qkv part --'                           --> model-00001-of-00002.safetensors

Rank 0 holds one whole parameter at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.checkpoint.format.tensor_file import write_tensors
from pyops.checkpoint.writing import replace_folder
from pyops.comm.agreement import agree, gather, ranks_agree
from pyops.failure import CommunicationError
from pyops.hub.architectures.architecture import Architecture, Entry
from pyops.hub.architectures.pattern_fields import PATTERN_KEYS, pattern_fields
from pyops.hub.architectures.registry import architecture_of
from pyops.hub.folder_files import CONFIG, HubError, read_config
from pyops.hub.part_gathering import gather_parts
from pyops.hub.weight_packing import Source, unpack
from pyops.mesh import ALONE
from pyops.ops.memory import require_memory, resolved_view
from pyops.tensor_parallel import LowRank, Ranks, RanksLike

__all__ = ["save"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = "model-{:05}-of-{:05}.safetensors"


@torch.no_grad()
def save(
    model: nn.Module,
    folder: Path | str,
    *,
    group: RanksLike = ALONE,
    like: Path | str | None = None,
    max_file_bytes: int = 5 << 30,
) -> list[str]:
    """Writes config.json and safetensors files that transformers reads. Collective: every rank of
    the group must call it. Bits are kept: what was loaded is written as it was.

    Args:
        model: a GPT, BERT, T5 or ViT.
        folder: written beside its place and renamed, so that it is whole or not there. What an
            earlier save wrote there is then replaced; a folder with anything else in it, a
            tokenizer say, is refused (as `pyops.checkpoint.save` does it).
        group: the ranks that share the model's layers, the group that it was made with; by default
            this process alone.
        like: a folder of the same architecture, whose other fields of config.json (labels, special
            tokens) are taken over.
        max_file_bytes: of tensors in one file, which holds one tensor at least.

    Returns:
        The names of the files.

    Raises:
        HubError: on every rank, for a model that no architecture computes, a folder of something
            else, a disk that is full.
    """
    ranks = Ranks.of(group)
    architecture = architecture_of(model)
    with ranks_agree(ranks.group):
        entries = _checked_entries(architecture, model)
    _check_same_dtypes(entries, ranks)
    kind, name = architecture.kind, architecture.classes[0]
    written = {**architecture.write(model.config), **pattern_fields(model.config)}
    values = _config(kind, name, written, entries, like)
    folder = Path(folder)
    files = _files(entries, max_file_bytes)
    gathered = _Gathered(entries, ranks)
    temporary = folder.with_name(folder.name + ".tmp")
    error: Exception | None = None
    try:
        if gathered.writes:
            _write(folder, temporary, files, values, gathered)
    except OSError as caught:
        error = HubError(
            f"{folder} can't be written: {caught.strerror or caught}; make room or "
            "choose another place"
        )
    except CommunicationError:
        raise  # there is nobody to tell
    except Exception as caught:  # whatever it is: the other ranks wait to be told
        error = caught
    finally:
        gathered.finish()  # the other ranks wait in its collectives
        if gathered.writes:
            shutil.rmtree(temporary, ignore_errors=True)
    # Not `ranks_agree`: where a rank is lost, `finish` raises, and nothing more is communicated.
    agree(error, group=ranks.group)
    return [CONFIG, *files]


def _checked_entries(architecture: Architecture, model: nn.Module) -> list[Entry]:
    """HubError for a parameter that can't be a part of the whole: before anything is sent."""
    if any(isinstance(module, LowRank) for module in model.modules()):
        raise HubError(
            "the model has adapters; merge them and take them off (lora.merge(), lora.remove()), "
            "or save them alone by pyops.adapters.save"
        )
    try:
        entries = architecture.entries(model)
    except ValueError as error:  # of a parameter that is not of its placement's shape
        raise HubError(str(error)) from None
    for entry in entries:
        if (problem := _problem(entry)) is not None:
            raise problem
    return entries


def _check_same_dtypes(entries: list[Entry], ranks: Ranks) -> None:
    dtypes = {entry.name: str(entry.parameter.dtype) for entry in entries}
    for rank, other in enumerate(gather(dtypes, group=ranks.group)):
        different = [name for name, dtype in dtypes.items() if other.get(name) != dtype]
        if different:
            raise HubError(
                f"{different[0]} is {dtypes[different[0]]} on one rank and "
                f"{other.get(different[0])} on rank {rank}; give it one dtype on all ranks"
            )


def _problem(entry: Entry) -> HubError | None:
    parameter = entry.parameter
    if parameter.layout != torch.strided:
        return HubError(
            f"{entry.name} has layout {parameter.layout}; make it dense (to_dense()) "
            "before the save"
        )
    try:
        require_memory(parameter, entry.name)
    except ValueError as error:
        return HubError(f"{error}: hub.save writes whole parameters")
    wanted = tuple(parameter.shape) if entry.placement is None else entry.placement.local_shape
    if tuple(parameter.shape) != wanted:
        return HubError(
            f"{entry.name} has shape {list(parameter.shape)} on this rank; its part of "
            f"the whole is {list(wanted)}"
        )
    return None


def _config(
    kind: str, name: str, written: Mapping[str, Any], entries: list[Entry], like: Path | str | None
) -> dict[str, Any]:
    dtype = str(entries[0].parameter.dtype).removeprefix("torch.")
    values = {
        "architectures": [name],
        "model_type": kind,
        "dtype": dtype,
        "torch_dtype": dtype,
        **written,
    }
    if like is None:
        return values
    there = read_config(like)
    if there.get("model_type") != kind:
        raise HubError(
            f"{like} is of model_type {there.get('model_type')!r}, this model is a "
            f"{kind}; choose another folder"
        )
    if len(there.get("id2label", ())) == len(
        values.get("id2label", ())
    ):  # names of labels are not ours to know
        values = {
            key: value for key, value in values.items() if key not in ("id2label", "label2id")
        }
    kept = {key: value for key, value in there.items() if key not in PATTERN_KEYS}
    return {**kept, **values}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the files that is made when it is read."""

    source: Source
    entry: Entry
    gathered: _Gathered

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.parameter.dtype

    def read(self) -> Tensor:
        return unpack(self.gathered.whole(self.entry), self.source)


def _files(entries: list[Entry], max_bytes: int) -> dict[str, list[tuple[Entry, Source]]]:
    """The tensors of each file, in the model's order."""
    if max_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_bytes}; it must be 1 or more")
    parts: list[list[tuple[Entry, Source]]] = []
    free = 0
    for entry in entries:
        for source in entry.sources:
            size = prod(source.shape) * entry.parameter.element_size()
            if not parts or size > free:
                parts.append([])
                free = max_bytes
            parts[-1].append((entry, source))
            free -= size
    names = (
        [WEIGHTS]
        if len(parts) == 1
        else [PART.format(i + 1, len(parts)) for i in range(len(parts))]
    )
    return dict(zip(names, parts, strict=True))


def _write(
    folder: Path,
    temporary: Path,
    files: Mapping[str, list[tuple[Entry, Source]]],
    values: Mapping[str, Any],
    gathered: _Gathered,
) -> None:
    _check_place(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file, held in files.items():
        tensors = {source.name: _Tensor(source, entry, gathered) for entry, source in held}
        write_tensors(temporary / file, tensors, in_order=True)
    if len(files) > 1:
        total = sum(
            prod(s.shape) * e.parameter.element_size() for held in files.values() for e, s in held
        )
        index = {source.name: file for file, held in files.items() for _, source in held}
        (temporary / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
        )
    (temporary / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    replace_folder(folder, temporary)


def _check_place(folder: Path) -> None:
    """HubError unless there is nothing, an empty folder, or files that `save` writes and nothing
    else, which are replaced."""
    if not os.path.lexists(folder):
        return
    there = sorted(os.listdir(folder)) if folder.is_dir() else [folder.name]
    foreign = [
        name
        for name in there
        if name not in (CONFIG, INDEX)
        and not re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name)
    ]
    if there and (foreign or CONFIG not in there):
        what = f"holds {', '.join(foreign[:3])}" if foreign else f"has no {CONFIG}"
        raise HubError(
            f"{folder} is there already and {what}; a save replaces a folder that it "
            "wrote and nothing else: remove it, or "
            "name another place"
        )


class _Gathered:
    """Whole parameters on rank 0, asked for in the model's order; the other ranks give their parts.
    writes: this is rank 0."""

    def __init__(self, entries: list[Entry], ranks: Ranks) -> None:
        self.ranks = ranks
        self.writes = ranks.rank == 0
        self._coming = iter(entries)
        self._last: tuple[Entry, Tensor | None] | None = None

    def whole(self, entry: Entry) -> Tensor:
        """On rank 0, of the entry asked for last or of one behind it."""
        while self._last is None or self._last[0] is not entry:
            self._last = None  # frees it first
            following = next(self._coming)
            self._last = (following, self._gathered(following))
        found = self._last[1]
        assert found is not None
        return found

    def finish(self) -> None:
        """Take part in what is left; on rank 0 it is dropped."""
        if self.ranks.size > 1:
            for entry in self._coming:
                self._gathered(entry)

    def _gathered(self, entry: Entry) -> Tensor | None:
        try:
            return _gather(entry, self.ranks)
        except CommunicationError:
            self._coming = iter(())  # a rank is lost, and the others come to nothing that follows
            raise


def _gather(entry: Entry, ranks: Ranks) -> Tensor | None:
    """The whole parameter on rank 0, None on others. A parameter that all ranks hold whole is not
    sent."""
    local = resolved_view(entry.parameter.detach())
    whole = gather_parts(local, entry.placement, ranks)
    # What is whole everywhere is given on every rank, as without a group.
    cut = ranks.size > 1 and entry.placement is not None and bool(entry.placement.cuts)
    return whole if cut else local
