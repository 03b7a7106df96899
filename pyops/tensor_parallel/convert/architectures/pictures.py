"""Models of pictures, and of pictures and text."""

from __future__ import annotations

__all__ = ["PLANS"]

VIT = {
    "layers": "blocks",
    "attention": "attention",
    "attention.[qkv]_proj": "columns",
    "attention.o_proj": "rows",
    "mlp.fc1": "columns",
    "mlp.fc2": "rows",
}
DINO = {
    **{key: kind for key, kind in VIT.items() if kind != "blocks"},
    "layer": "blocks",
    "mlp": "mlp",
    "mlp.gate_proj": "columns",
    "mlp.up_proj": "columns",
    "mlp.down_proj": "rows",
}
CLIP = {
    "token_embedding": "vocabulary",
    "layers": "blocks",
    "self_attn": "attention",
    "self_attn.[qkv]_proj": "columns",
    "self_attn.out_proj": "rows",
    "mlp.fc1": "columns",
    "mlp.fc2": "rows",
}

PLANS: dict[str, dict[str, str]] = {
    "ViTLayer": VIT,
    "DeiTLayer": VIT,
    "Dinov2Layer": DINO,
    "CLIPEncoderLayer": CLIP,
}
