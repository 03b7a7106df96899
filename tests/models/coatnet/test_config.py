"""The variants of CoAtNet have the parameters that the paper's and timm's have, and a shape that
makes no sense is refused."""

from __future__ import annotations

import pytest

from pyops.models import CoAtNet, CoAtNetConfig
from tests.models.coatnet.tiny import config_of

pytestmark = pytest.mark.cpu_only

# Dai et al. 2021: 25, 42, 75, 168, 275 and 688 million, and 2.44 billion of the last. Those of 0 to
# 4 and of all "rw" are timm's.
PARAMETERS = {
    "0": 25_036_820,
    "1": 42_225_776,
    "2": 74_684_744,
    "3": 166_966_264,
    "4": 275_425_288,
    "5": 687_052_952,
    "6": 1_348_435_040,
    "7": 2_441_972_728,
    "pico_rw": 10_851_364,
    "nano_rw": 15_141_244,
    "0_rw": 27_435_562,
    "1_rw": 41_721_502,
    "2_rw": 73_868_400,
    "3_rw": 181_805_305,
}
PAPER = {"0": 25e6, "1": 42e6, "2": 75e6, "3": 168e6, "4": 275e6, "5": 688e6, "7": 2.44e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_so_many_parameters(name):
    labels = 11821 if name == "3_rw" else 1000  # those that timm has trained it for
    config = CoAtNetConfig.named(name, num_labels=labels)
    model = CoAtNet(config, seed=None, device="meta")
    found = sum(p.numel() for p in model.parameters())
    assert found == PARAMETERS[name]
    if name in PAPER:
        assert found == pytest.approx(PAPER[name], rel=0.01)


def test_stages_halve_the_side_and_other_options_keep_the_count():
    config = CoAtNetConfig.named("0", image_size=384, image_width=224)
    grids = {block.stage: block.grid for block in config.blocks()}
    assert grids == {1: (96, 56), 2: (48, 28), 3: (24, 14), 4: (12, 7)}
    assert config.num_tokens == 84
    assert config.num_layers == 12
    paper = CoAtNetConfig.named("0", stride_in="expand", pool="max")
    model = CoAtNet(paper, seed=None, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS["0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 100}, r"image_size is 100, .* multiple of 32, .* is 128"),
        ({"image_width": 33}, r"image_width is 33, .* is 64"),
        ({"kinds": ("C", "X", "T", "T")}, r"kinds is .* with 'X'; each must be \"C\" or \"T\""),
        ({"depths": (1, 2)}, "depths has 2 values, kinds 4"),
        ({"depths": (1, 0, 1, 1)}, "depths is .* with 0; each must be 1 or more"),
        ({"strides": (2, 3, 2, 2)}, "strides is .* with 3; each must be 1 or 2"),
        ({"widths": (4, 8, 18, 12)}, "attention 18 wide, which head_dim = 4 does not divide"),
        ({"norm": "group"}, "norm is 'group'; choose one of batch, ghost, layer"),
        ({"norm": "ghost"}, "norm is 'ghost', but ghost_size is 0"),
        ({"ghost_size": 2}, "norm is 'batch', but ghost_size is 2"),
        ({"stride_in": "projection"}, "stride_in is 'projection'; choose one of expand"),
        ({"stochastic_depth": 1.0}, "stochastic_depth is 1.0; it is a probability"),
        ({"se_ratio": 0.0}, "se_ratio is 0.0; give more than 0"),
        ({"num_labels": 0}, "num_labels is 0; it must be 1 or more"),
        ({"stem_hidden": -1}, "stem_hidden is -1; give a number, or 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be more than 0"),
        ({"layer_scale": -1.0}, "layer_scale is -1.0; give 0 for none"),
        ({"widths": (1 << 40,) * 4}, "no memory holds such a model"),
    ],
)
def test_a_bad_shape_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_an_unknown_variant_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"no CoAtNet '8'; choose one of 0, 1, .*, 3_rw"):
        CoAtNetConfig.named("8")
