"""Which tensors of the files a tensor of the model is made of, and the way back.

    in the files                                         in the model
    bert.encoder.layer.0.output.dense.weight        ->   encoder.layer.0.output.dense.weight
    model.layers.0.block_sparse_moe.experts.*.w1    -+
    model.layers.0.block_sparse_moe.experts.*.w3    -+-> model.layers.0.mlp.experts.gate_up_proj

The rules are those of transformers (its conversion_mapping), which from_pretrained goes by.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyops.hub.folder_files import HubError

__all__ = [
    "Sources",
    "find_sources",
    "ignorable",
    "is_of_transformers",
    "may_lack",
    "reverted",
    "units_of",
    "with_rules",
]

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], Tensor]


def is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a PreTrainedModel.

    Args:
        model: Any module.
    """
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


@dataclass
class Conversion:
    """One operation of transformers that makes tensors of the model from several of the files."""

    converter: Any
    """A WeightConverter of transformers."""

    first: str
    """The name of the first tensor that it makes."""

    parts: list[tuple[str, str]] = field(default_factory=list)
    """(pattern, name in the files) of what it takes, in its order."""

    def made(self, read: Read, model: Any) -> dict[str, Tensor]:
        """{name in the model: tensor} of all that it makes.

        Args:
            read: Gives a tensor of the files by its name.
            model: Of whose config the operation takes sizes.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            converter.add_tensor(self.first, name, pattern, partial(read, name))
        try:
            found = converter.convert(self.first, model=model, config=model.config)
        except HubError:
            raise
        except Exception as error:
            raise HubError(
                f"{self.first} can't be made of {self.parts[0][1]} and {len(self.parts) - 1} "
                f"others as transformers does it ({error}); they are of another model"
            ) from None
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }


@dataclass
class Sources:
    """What the files hold for a model."""

    names: dict[str, str] = field(default_factory=dict)
    """{name in the model: name in the files} of tensors that are there as they are."""

    conversions: dict[str, Conversion] = field(default_factory=dict)
    """{name in the model: what makes it} of others."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """{name in the model: shape} as the files have it."""

    unknown: dict[str, str] = field(default_factory=dict)
    """{name in the files: how the model would call it} of what the model does not have."""

    def files_names(self, name: str) -> list[str]:
        """The tensors of the files that one of the model is made of.

        Args:
            name: In the model.
        """
        if name in self.names:
            return [self.names[name]]
        return [each for _, each in self.conversions[name].parts]

    def read(self, name: str, read: Read, model: Any) -> Tensor:
        """A tensor of the model, whole.

        Args:
            name: In the model.
            read: Gives a tensor of the files by its name.
            model: The model.
        """
        if name in self.names:
            return read(self.names[name])
        return self.conversions[name].made(read, model)[name]


def find_sources(model: nn.Module, shapes: Shapes) -> Sources:
    """What the files hold for the model.

    Args:
        model: The model, uncut or cut by `pyops.tensor_parallel.parallelize`.
        shapes: {name: shape} of the files' tensors.
    """
    found = Sources()
    state = model.state_dict(keep_vars=True)
    if not is_of_transformers(model):
        for name, shape in shapes.items():
            if name in state:
                found.names[name], found.shapes[name] = name, shape
            else:
                found.unknown[name] = name
        return found
    _apply_rules(model, state, shapes, found)
    for conversion in {id(each): each for each in found.conversions.values()}.values():
        on_meta = {name: torch.empty(shapes[name], device="meta") for _, name in conversion.parts}
        for name, tensor in conversion.made(on_meta.__getitem__, model).items():
            found.conversions[name], found.shapes[name] = conversion, tuple(tensor.shape)
    return found


def _apply_rules(model: Any, state: Mapping[str, Tensor], shapes: Shapes, found: Sources) -> None:
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    where: Any = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": state}
    for name in sorted(shapes, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, **where)
        if renamed not in state and name in state:
            renamed, pattern = loading.rename_source_key(name, [], [], **where)
        if renamed not in state:
            found.unknown[name] = renamed
        elif pattern is None:
            found.names[renamed], found.shapes[renamed] = name, shapes[name]
        else:
            made = found.conversions.setdefault(renamed, Conversion(by_pattern[pattern], renamed))
            made.parts.append((pattern, name))
    # As from_pretrained: a save goes back by the rules that were needed.
    model._weight_conversions = [rule for rule in rules if rule.was_used()]


@contextmanager
def with_rules(model: Any) -> Iterator[None]:
    """Within, the rules of a model that was not read from files are found once, and not for each of
    its tensors.

    Args:
        model: The model.
    """
    if not is_of_transformers(model) or getattr(model, "_weight_conversions", None) is not None:
        yield
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    try:
        yield
    finally:
        del model._weight_conversions


def reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model as they are in the files.

    Args:
        model: The model, within `with_rules`.
        tensors: {name in the model: tensor} of one unit, see `units_of`.
    """
    if not is_of_transformers(model) or not model._weight_conversions:
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def units_of(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Names of tensors, those together that become tensors of the files only together.

    Args:
        model: The model, within `with_rules`.
        names: In the model.
    """
    if not is_of_transformers(model) or not model._weight_conversions:
        return [[name] for name in names]
    from transformers import core_model_loading as loading

    rules = [rule.reverse_transform() for rule in model._weight_conversions[::-1]]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    found: dict[str, list[str]] = {}
    for name in names:
        renamed, pattern = loading.apply_converters(name, converters)
        found.setdefault(name if pattern is None else f"made: {renamed}", []).append(name)
    return list(found.values())


def ignorable(model: Any) -> re.Pattern[str]:
    """Names in files that are no loss where the model does not have them.

    Args:
        model: The model.
    """
    patterns = [r"(^|\.)position_ids$", r"rotary_emb\.inv_freq$", r"(^|\.)attn\.masked_bias$"]
    patterns += sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


def may_lack(model: Any) -> re.Pattern[str]:
    """Names of the model that files may lack.

    Args:
        model: The model.
    """
    patterns = [r"(^|\.)num_batches_tracked$"]  # files of old versions of torch have none
    patterns += sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    return re.compile("|".join(f"({pattern})" for pattern in patterns))
