"""All architectures that are known, and which of them a config.json or a model of ours is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.architectures.bert_mapping import BERT_MODEL, ROFORMER
from pyops.hub.architectures.coatnet_mapping import COATNET
from pyops.hub.architectures.gpt2_mapping import GPT2
from pyops.hub.architectures.llama_mapping import LLAMA
from pyops.hub.architectures.pattern_fields import pattern_fields, with_pattern
from pyops.hub.architectures.t5_mapping import T5_MODEL
from pyops.hub.architectures.vit_mapping import VIT
from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import HubError

__all__ = ["ARCHITECTURES", "architecture_of", "find_architecture"]

ARCHITECTURES = (GPT2, LLAMA, BERT_MODEL, ROFORMER, T5_MODEL, VIT)


def find_architecture(values: Mapping[str, Any]) -> Architecture:
    """The one that a config.json is of.

    Raises:
        HubError: Naming those that are known, for another.
    """
    if isinstance(values.get("architecture"), str) and "model_type" not in values:
        return COATNET  # timm's config.json; it says which are known
    classes, kind = values.get("architectures") or [None], values.get("model_type")
    if not isinstance(classes, list) or not all(
        each is None or isinstance(each, str) for each in classes
    ):
        raise HubError(
            f"config.json has architectures = {str(classes)[:80]!r}; it must be a list "
            "of a class's name"
        )
    for architecture in ARCHITECTURES:
        if kind == architecture.kind and classes[0] in (None, *architecture.classes):
            return architecture
    known = ", ".join(f"{name} ({a.kind})" for a in ARCHITECTURES for name in a.classes)
    raise HubError(
        f"config.json is of architecture {classes[0]!r}, model_type {kind!r}, which is "
        f"not known; known are {known}"
    )


def architecture_of(model: nn.Module) -> Architecture:
    """The one that computes what the model computes. HubError saying why each does not."""
    reasons = []
    for architecture in ARCHITECTURES:
        if type(model) is not architecture.model:
            continue
        config: Any = model.config
        own_head = (
            frozenset() if getattr(config, "tied_head", True) else frozenset(["lm_head.weight"])
        )
        values = ConfigFields({**architecture.write(config), **pattern_fields(config)})
        written = with_pattern(architecture.read(values, own_head), values).resolved()
        differing = {
            f.name: getattr(config, f.name)
            for f in fields(config)
            if "dropout" not in f.name
            and getattr(config.resolved(), f.name) != getattr(written, f.name)
        }
        if not differing:
            return architecture
        reasons.append(
            f"{architecture.kind} has no {', '.join(f'{f} = {v!r}' for f, v in differing.items())}"
        )
    if not reasons:
        raise HubError(
            f"a {type(model).__name__} is no model that can be written; these are GPT, "
            "BERT, T5, ViT"
        )
    raise HubError(
        f"no architecture computes what this {type(model).__name__} does: {'; '.join(reasons)}"
    )
