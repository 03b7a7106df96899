"""A student of some of the teacher's layers: the same class, each layer a copy of one of the
teacher's.

    teacher   0 1 2 3 4 5 6 7 8 9 10 11
    keep      0   2   4     7   9    11       (DistilBERT; Sanh et al., 2019, section 3)
    student   0   1   2     3   4     5
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

__all__ = ["blocks_of", "student_from_layers"]

COUNTS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
NUMBERS = ("layer_idx", "layer_id")  # by which modules of transformers find their part of a cache
Model = TypeVar("Model", bound=nn.Module)


def student_from_layers(teacher: Model, keep: Sequence[int]) -> Model:
    """A copy of the teacher that has these of its layers only.

    Everything beside the layers (embedding, norms, head) is copied too; tied parameters stay tied.
    The student is in training mode and its parameters require gradients, whatever the teacher's do.
    Only the kept layers are copied: the teacher's memory is not needed twice.

    Args:
        teacher: a model with one list of layers, which its config counts (`num_layers`,
            `num_hidden_layers`, `n_layer`): GPT, BERT and ViT of pyops, and most of transformers.
        keep: the numbers of the teacher's layers, ascending, from 0.

    Raises:
        ValueError: numbers that are out of order or out of range, none; a model whose layers are
            not found.
    """
    name, blocks = blocks_of(teacher)
    _check(keep, len(blocks))
    memo: dict[int, Any] = {}
    short = nn.ModuleList(copy.deepcopy(blocks[i], memo) for i in keep)
    memo[id(blocks)] = short
    student = copy.deepcopy(teacher, memo)
    for i, block in enumerate(short):
        for module in block.modules():
            for number in NUMBERS:
                if number in vars(module):
                    setattr(module, number, i)
    _shorten(student, len(short), blocks=len(blocks))
    assert student.get_submodule(name) is short
    return student.train().requires_grad_(True)


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the list of a model's layers, and the list.

    Raises:
        ValueError: there is no list of as many modules as the config counts, or several.
    """
    config = getattr(model, "config", None)
    counts = {getattr(config, name) for name in COUNTS if hasattr(config, name)}
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in counts
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} lists of as many layers as its config "
            f"counts ({', '.join(map(str, sorted(counts))) or 'no count'}): "
            f"{', '.join(name for name, _ in lists) or 'none'}; distillation by layers needs one"
        )
    return lists[0]


def _check(keep: Sequence[int], layers: int) -> None:
    if not keep:
        raise ValueError("keep is empty; name the teacher's layers that the student begins with")
    for before, number in zip([-1, *keep], keep, strict=False):
        if not 0 <= number < layers:
            raise ValueError(f"keep has layer {number}; the teacher's are 0 to {layers - 1}")
        if number <= before:
            raise ValueError(
                f"keep has {number} after {before}; give each layer once, in the teacher's order"
            )


def _shorten(student: nn.Module, layers: int, *, blocks: int) -> None:
    """Write the number of layers in the student's config, a copy of the teacher's."""
    config: Any = student.config
    names = [name for name in COUNTS if getattr(config, name, None) == blocks]
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        changed: Any = dataclasses.replace(config, **dict.fromkeys(names, layers))
        student.config = changed
        return
    for name in names:
        setattr(config, name, layers)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list):
        config.layer_types = kinds[:layers]
