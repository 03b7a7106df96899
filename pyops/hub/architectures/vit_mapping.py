"""ViT (ViTForImageClassification): patches, a class token, learned positions, norms in front."""

from __future__ import annotations

from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.architectures.encoder_mapping import (
    attention_shape,
    layer_names,
    read_sizes,
    write_sizes,
)
from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import HubError
from pyops.hub.weight_packing import Same
from pyops.models import ViT, ViTConfig

__all__ = ["VIT"]

NAMES = {
    "embedding.patch.weight": Same("vit.embeddings.patch_embeddings.projection.weight"),
    "embedding.patch.bias": Same("vit.embeddings.patch_embeddings.projection.bias"),
    "embedding.first": Same("vit.embeddings.cls_token", leading=1),
    "embedding.position": Same("vit.embeddings.position_embeddings", leading=1),
    **layer_names(
        "vit.encoder.layer.{i}.",
        attention="attention.attention.",
        norm1="layernorm_before",
        norm2="layernorm_after",
    ),
    "head.norm.weight": Same("vit.layernorm.weight"),
    "head.norm.bias": Same("vit.layernorm.bias"),
    "head.output.weight": Same("classifier.weight"),
    "head.output.bias": Same("classifier.bias"),
}


def read(fields: ConfigFields, names: frozenset[str]) -> ViTConfig:
    fields.fixed(qkv_bias=True)
    if fields.raw("problem_type") not in (None, "single_label_classification"):
        fields.fixed(problem_type="single_label_classification")
    labels = fields.section("id2label")
    return ViTConfig(
        num_labels=len(labels) if labels is not None else fields.integer("num_labels", 2),
        image_size=_side(fields, "image_size", 224),
        patch_size=_side(fields, "patch_size", 16),
        num_channels=fields.integer("num_channels", 3),
        **read_sizes(fields, dropout=0.0),
    )


def _side(fields: ConfigFields, key: str, otherwise: int) -> int:
    found = fields.raw(key, otherwise)
    if isinstance(found, list):
        if len(found) != 2 or found[0] != found[1]:
            raise HubError(
                f"config.json has {key} = {str(found)[:80]}; pyops has square images and "
                "patches only"
            )
        fields = fields.within({key: found[0]})
    side: int = fields.integer(key, otherwise)
    return side


def write(config: ViTConfig) -> dict[str, Any]:
    labels = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
    return {
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "qkv_bias": True,
        **write_sizes(config),
    }


VIT = Architecture(
    kind="vit",
    classes=("ViTForImageClassification",),
    model=ViT,
    config=ViTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=attention_shape,
    prefix="vit.",
    ignored=(r"^vit\.pooler\.", r"embeddings\.mask_token$"),
)
