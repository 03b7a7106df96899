"""What timm computes of tiny CoAtNets, written down: logits, and of each gradient its product with
a tensor that its name gives.

    python -m tests.hub.timm.oracle     # writes recorded.json; needs timm and torchvision

Values of all tensors come from their names in timm, so that the file holds results alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops import random

__all__ = ["CASES", "RECORDED", "computed", "image_of", "value_of"]

RECORDED = Path(__file__).with_name("recorded.json")
SIZES: dict[str, Any] = {"depths": (1, 2, 1, 2), "widths": (8, 8, 32, 64), "stem_width": 16}
# {name: (fields of our configuration, timm's configuration of convolution blocks, of transformer
# blocks, and of the model)}
RW: dict[str, Any] = {"act_layer": "silu", "expand_output": False}
OURS_RW: dict[str, Any] = {
    "expand_from": "input",
    "activation": "silu",
    "head_hidden": False,
    "stem_hidden": 8,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}, {"stem_width": 16, "head_hidden_size": 64}),
    "expand max": (
        {"stride_in": "expand", "pool": "max"},
        {"stride_mode": "1x1", "pool_type": "max2"},
        {"pool_type": "max2"},
        {"stem_width": 16, "head_hidden_size": 64},
    ),
    "0_rw": (
        {
            **OURS_RW,
            "stride_in": "pool",
            "pre_norm_act": True,
            "conv_bias": False,
            "se_activation": "relu",
            "se_early": True,
            "shortcut_bias": False,
        },
        {
            **RW,
            "stride_mode": "pool",
            "pre_norm_act": True,
            "output_bias": False,
            "attn_act_layer": "relu",
            "attn_early": True,
        },
        {"expand_first": False, "shortcut_bias": False},
        {"stem_width": (8, 16)},
    ),
    "3_rw, max3": (
        {
            **OURS_RW,
            "pre_norm_act": True,
            "conv_bias": False,
            "layer_scale": 1e-6,
            "pool": "max3",
        },
        {**RW, "pre_norm_act": True, "output_bias": False, "pool_type": "max"},
        {"expand_first": False, "init_values": 1e-6, "pool_type": "max"},
        {"stem_width": (8, 16)},
    ),
}


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Of a tensor of timm's state, float64."""
    drawn = random.normal(1, name, shape, dtype=torch.float64)
    last = name.rpartition(".")[2]
    if last == "running_var":
        return 0.5 + drawn.square()
    if last == "running_mean" or "table" in last:
        return drawn
    return 0.3 * drawn + (1.0 if "norm" in name and last == "weight" else 0.0)


def image_of() -> tuple[Tensor, Tensor]:
    """Images [3, 2, 64, 96] and labels."""
    images = random.normal(2, "images", (3, 2, 64, 96), dtype=torch.float64)
    return images, torch.tensor([4, 0, 2])


def computed(model: nn.Module, names: dict[str, str]) -> dict[str, Any]:
    """Logits in eval mode, the loss in training, and products of its gradients; names: of
    parameters, in timm."""
    images, labels = image_of()
    with torch.no_grad():
        found: dict[str, Any] = {"logits": model.eval()(images).tolist()}
    loss = functional.cross_entropy(model.train()(images), labels)
    loss.backward()
    found["loss"] = loss.item()
    found["gradients"] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        theirs = names[name]
        weights = random.normal(3, theirs, (p.numel(),), dtype=torch.float64)
        found["gradients"][theirs] = float((p.grad.flatten() * weights).sum())
    return found


def timm_model(name: str) -> nn.Module:
    """timm's, with the values of the names."""
    from timm.models import maxxvit

    _, convolution, transformer, more = CASES[name]
    config = maxxvit.MaxxVitCfg(
        embed_dim=SIZES["widths"],
        depths=SIZES["depths"],
        conv_cfg=maxxvit.MaxxVitConvCfg(**convolution),
        transformer_cfg=maxxvit.MaxxVitTransformerCfg(dim_head=8, **transformer),
        **more,
    )
    model = maxxvit.MaxxVit(config, img_size=(64, 96), in_chans=2, num_classes=5).double()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(value_of(key, tuple(tensor.shape)))
    return model


def main() -> None:
    """Write what timm computes."""
    found = {}
    for name in CASES:
        model = timm_model(name)
        found[name] = computed(model, {key: key for key, _ in model.named_parameters()})
        found[name]["shapes"] = {
            key: list(tensor.shape)
            for key, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }
    RECORDED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
