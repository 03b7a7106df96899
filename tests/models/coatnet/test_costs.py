"""Parameters, products and bytes kept of every layer are those counted in a forward, without
values: of the variants of the paper, and of every way that a block can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pyops.models import CoAtNet, CoAtNetConfig
from pyops.models.coatnet.costs import layer_sizes
from tests.grids import full
from tests.models.coatnet.tiny import config_of

pytestmark = pytest.mark.cpu_only

# G multiply-adds of an image of 224 pixels, strides in the depthwise convolution and in the
# expansion, as the paper has it.
PRODUCTS = {"0": (4.55, 4.14), "1": (8.64, 8.24), "2": (16.43, 15.50), "3": (36.45, 34.37)}
WAYS: dict[str, dict[str, Any]] = {
    "layer norms": {"norm": "layer"},
    "stride in the expansion": {"norm": "layer", "stride_in": "expand", "pool": "max"},
    "stride in a pool": {"norm": "layer", "stride_in": "pool"},
    "pooled by a maximum": {"norm": "layer", "stride_in": "pool", "pool": "max3"},
    "timm's": {
        "norm": "layer",
        "expand_from": "input",
        "pre_norm_act": True,
        "conv_bias": False,
        "se_early": True,
        "layer_scale": 0.5,
        "head_hidden": False,
    },
}


def kept(layer: nn.Module, x: Tensor, known: set[int]) -> tuple[Tensor, int]:
    """What a layer gives, and the bytes that autograd keeps of it, parameters and `known` storages
    apart."""
    own = {p.untyped_storage()._cdata for p in layer.parameters()} | known
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    return y, sum(each.untyped_storage().nbytes() for each in found.values())


def counted(config: CoAtNetConfig, images: int) -> list[tuple[int, int, int]]:
    """Of each layer: parameters, operations of a forward, bytes kept."""
    found = []
    with FakeTensorMode() as fake:
        model = CoAtNet(config, seed=None)
        x = torch.zeros(images, config.num_channels, *config.sides)
    for layer in model.layers():
        with fake, FlopCounterMode(display=False) as counter:
            x, size = kept(layer, x.detach().requires_grad_(), set())
        parameters = sum(p.numel() for p in layer.parameters())
        found.append((parameters, counter.get_total_flops(), size))
    return found


def check(config: CoAtNetConfig) -> None:
    sizes = layer_sizes(config)
    for layer, (parameters, operations, size) in zip(sizes, counted(config, 2), strict=True):
        assert layer.parameters == parameters, layer
        assert 2 * 2 * layer.products == operations, layer
        # The loss is not computed, which keeps a number of each label.
        missing = 2 * 4 * config.num_labels if layer.kind == "head" else 0
        assert layer.kept_bytes(2, element=4) - missing == size, layer


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("5", 1),
        full("0", 2),
        *(full(name, 1) for name in "26"),
        *(full(str(number), 99) for number in range(8)),
    ],
)
def test_layers_of_a_variant_take_what_is_counted(name: str, most: int):
    """All blocks of a stage but the first are alike; those of 1 are 0's, of 4 3's."""
    config = CoAtNetConfig.named(name, norm="layer", image_size=64)
    check(replace(config, depths=tuple(min(most, depth) for depth in config.depths)))


@pytest.mark.parametrize("way", WAYS)
def test_layers_take_what_is_counted_in_every_way(way: str):
    check(config_of(**WAYS[way]))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_paper(name: str):
    for stride, published in zip(("depthwise", "expand"), PRODUCTS[name], strict=True):
        layers = layer_sizes(CoAtNetConfig.named(name, stride_in=stride))
        assert sum(each.products for each in layers) / 1e9 == pytest.approx(published, abs=5e-3)
    wide = layer_sizes(CoAtNetConfig.named("0", image_size=384, stride_in="expand"))
    assert sum(each.products for each in wide) / 1e9 == pytest.approx(13.05, abs=5e-3)


def _of_rank(rank: int, group: Any, changes: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each layer on a rank: parameters, bytes kept of two images."""
    model = CoAtNet(config_of(**changes), group=group, seed=0)
    x = torch.zeros(2, 1, *config_of().sides)
    found = []
    for layer in model.layers():
        x, size = kept(layer, x.detach().requires_grad_(), set())
        found.append((sum(p.numel() for p in layer.parameters()), size))
    return found


def test_ranks_share_what_is_said_to_be_cut(world):
    changes = {"norm": "layer", "widths": (4, 8, 16, 16)}
    for found in world(2).run(_of_rank, changes):
        for layer, (parameters, size) in zip(layer_sizes(config_of(**changes)), found, strict=True):
            assert layer.rank_parameters(2) == parameters, layer
            missing = 2 * 4 * config_of().num_labels if layer.kind == "head" else 0
            assert layer.kept_bytes(2, element=4, ranks=2) - missing == size, layer
