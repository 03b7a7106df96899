"""ViT (ViTForImageClassification): patches, a class token, learned positions, norms in front."""

from __future__ import annotations

from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.config_fields import Fields
from pyops.hub.folder_files import HubError
from pyops.hub.weight_packing import Grouped, Heads, Same
from pyops.models import ViT, ViTConfig

__all__ = ["VIT"]

LAYER = "vit.encoder.layer.{i}."
SELF = LAYER + "attention.attention."
NAMES = {
    "embedding.patch.weight": Same("vit.embeddings.patch_embeddings.projection.weight"),
    "embedding.patch.bias": Same("vit.embeddings.patch_embeddings.projection.bias"),
    "embedding.first": Same("vit.embeddings.cls_token", leading=1),
    "embedding.position": Same("vit.embeddings.position_embeddings", leading=1),
    "blocks.{i}.norm1.weight": Same(LAYER + "layernorm_before.weight"),
    "blocks.{i}.norm1.bias": Same(LAYER + "layernorm_before.bias"),
    "blocks.{i}.attention.qkv.weight": Grouped(
        SELF + "query.weight", SELF + "key.weight", SELF + "value.weight"
    ),
    "blocks.{i}.attention.qkv.bias": Grouped(
        SELF + "query.bias", SELF + "key.bias", SELF + "value.bias"
    ),
    "blocks.{i}.attention.output.weight": Same(LAYER + "attention.output.dense.weight"),
    "blocks.{i}.attention.output.bias": Same(LAYER + "attention.output.dense.bias"),
    "blocks.{i}.norm2.weight": Same(LAYER + "layernorm_after.weight"),
    "blocks.{i}.norm2.bias": Same(LAYER + "layernorm_after.bias"),
    "blocks.{i}.mlp.up.weight": Same(LAYER + "intermediate.dense.weight"),
    "blocks.{i}.mlp.up.bias": Same(LAYER + "intermediate.dense.bias"),
    "blocks.{i}.mlp.down.weight": Same(LAYER + "output.dense.weight"),
    "blocks.{i}.mlp.down.bias": Same(LAYER + "output.dense.bias"),
    "head.norm.weight": Same("vit.layernorm.weight"),
    "head.norm.bias": Same("vit.layernorm.bias"),
    "head.output.weight": Same("classifier.weight"),
    "head.output.bias": Same("classifier.bias"),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read(told: Fields, names: frozenset[str]) -> ViTConfig:
    told.fixed(qkv_bias=True)
    if told.raw("problem_type") not in (None, "single_label_classification"):
        told.fixed(problem_type="single_label_classification")
    labels = told.section("id2label")
    return ViTConfig(
        num_labels=len(labels) if labels is not None else told.whole("num_labels", 2),
        image_size=_side(told, "image_size", 224),
        patch_size=_side(told, "patch_size", 16),
        num_channels=told.whole("num_channels", 3),
        num_layers=told.whole("num_hidden_layers", of="tensors"),
        num_heads=told.whole("num_attention_heads"),
        dim=told.whole("hidden_size"),
        hidden=told.whole("intermediate_size"),
        activation=told.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=told.number("layer_norm_eps", 1e-12),
        dropout=told.probability("hidden_dropout_prob", 0.0),
        attention_dropout=told.probability("attention_probs_dropout_prob", 0.0),
    )


def _side(told: Fields, key: str, otherwise: int) -> int:
    found = told.raw(key, otherwise)
    if isinstance(found, list):
        if len(found) != 2 or found[0] != found[1]:
            raise HubError(
                f"config.json has {key} = {str(found)[:80]}; pyops has square images and "
                "patches only"
            )
        told = told.within({key: found[0]})
    side: int = told.whole(key, otherwise)
    return side


def write(config: ViTConfig) -> dict[str, Any]:
    labels = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
    return {
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


VIT = Architecture(
    kind="vit",
    classes=("ViTForImageClassification",),
    model=ViT,
    config=ViTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=lambda config: Heads(config.num_heads, config.num_heads, config.dim // config.num_heads),
    prefix="vit.",
    ignored=(r"^vit\.pooler\.", r"embeddings\.mask_token$"),
)
