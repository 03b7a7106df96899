"""Who writes which tensors of a model into which file of a folder.

pipeline rank 0    embed_tokens, blocks 0 1    model-00001-of-00003, model-00002-of-00003
pipeline rank 1    blocks 2 3, norm            model-00003-of-00003
                   lm_head (tied)              left out, as transformers does
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from pyops.hub.folder_files import HubError
from pyops.hub.pretrained.layouts import placement_of, whole_shape
from pyops.hub.pretrained.sources import units_of
from pyops.ops.memory import require_memory

__all__ = ["HeldTensor", "Unit", "file_names", "files_of", "held_tensors", "left_out"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = "model-{:05}-of-{:05}.safetensors"


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of which this rank has a part, or all."""

    name: str
    """In the whole model."""

    module: nn.Module
    """Which holds it."""

    key: str
    """Its name in the module."""

    tensor: Tensor
    """This rank's."""

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        shape = whole_shape(self.module, self.key, self.tensor)
        return prod(shape) * self.tensor.element_size()


Unit = list[HeldTensor]
"""Tensors that become tensors of the files together, see sources.py."""


def held_tensors(model: nn.Module) -> dict[str, HeldTensor]:
    """The parameters and persistent buffers that this rank has, each once.

    Args:
        model: Its modules have the names that they have in the whole model.

    Returns:
        {name: tensor}; tied ones under the name that transformers writes.

    Raises:
        HubError: A tensor has no memory, or is not of its placement's shape.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, list[HeldTensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            name = f"{path}.{key}" if path else key
            if tensor is None or key in module._non_persistent_buffers_set or name in ignored:
                continue
            _check(name, module, key, tensor)
            names.setdefault(id(tensor), []).append(HeldTensor(name, module, key, tensor))
    firsts = (next((e for e in group if e.name not in tied), group[0]) for group in names.values())
    return {each.name: each for each in firsts}


def _check(name: str, module: nn.Module, key: str, tensor: Tensor) -> None:
    place = placement_of(module, key)
    try:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device")
        require_memory(tensor, name)
    except ValueError as error:
        raise HubError(
            f"{error}: save_pretrained writes whole parameters; at stage 3 of ZeRO call it within "
            "optimizer.whole_parameters()"
        ) from None
    if place is not None and tuple(tensor.shape) != place.local_shape:
        raise HubError(
            f"{name} has shape {list(tensor.shape)} on this rank; its part of the whole is "
            f"{list(place.local_shape)}"
        )


def left_out(stages: Sequence[Collection[str]], mine: int, model: Any) -> set[str]:
    """Which of a pipeline rank's tensors others write: those that an earlier rank has as well, and
    those that are tied to one of another rank.

    Args:
        stages: The names that each pipeline rank has, in their order.
        mine: The number of this one.
        model: Whose `all_tied_weights_keys` says what is tied.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    own, anywhere = stages[mine], {name for names in stages for name in names}
    earlier = {name for names in stages[:mine] for name in names}
    # Where this rank has both they are two tensors: the model was untied.
    elsewhere = {name for name in own if tied.get(name) in anywhere.difference(own)}
    return elsewhere | earlier.intersection(own)


def files_of(model: nn.Module, held: Mapping[str, HeldTensor], max_bytes: int) -> list[list[Unit]]:
    """The units of each of this rank's files, in the model's order.

    Args:
        model: The model.
        held: What this rank writes.
        max_bytes: Of tensors in one file, which holds one unit at least.
    """
    files: list[list[Unit]] = []
    free = 0
    for names in units_of(model, held):
        unit = [held[name] for name in names]
        size = sum(each.nbytes for each in unit)
        if not files or size > free:
            files.append([])
            free = max_bytes
        files[-1].append(unit)
        free -= size
    return files


def file_names(before: int, own: int, total: int) -> list[str]:
    """The names of this rank's files.

    Args:
        before: How many files the pipeline ranks before it write.
        own: How many it writes itself.
        total: How many all write.
    """
    if total == 1:
        return [WEIGHTS] * own
    return [PART.format(before + i + 1, total) for i in range(own)]
