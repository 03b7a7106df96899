"""A CoAtNet computes what timm's does, in float64, with the values of timm's tensors read from a
file with timm's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyops import hub
from pyops.hub import HubError
from pyops.hub.architectures.coatnet_mapping import COATNET, timm_names
from pyops.models import CoAtNet, CoAtNetConfig
from tests.hub.timm.oracle import CASES, RECORDED, SIZES, computed, value_of

pytestmark = pytest.mark.cpu_only

BASE: dict[str, Any] = {
    "num_labels": 5,
    "num_channels": 2,
    "image_size": 64,
    "image_width": 96,
    "head_dim": 8,
    **SIZES,
}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def ours(name: str, shapes: dict[str, list[int]]) -> CoAtNet:
    """With the values of the names; every tensor of timm's is one of ours."""
    config = CoAtNetConfig(**{**BASE, **CASES[name][0]})
    model = CoAtNet(config, seed=None, dtype=torch.float64)
    filled = set()
    with torch.no_grad():
        for entry in COATNET.entries(model):
            (source,) = entry.sources
            assert tuple(shapes[source.name]) == source.shape
            entry.parameter.copy_(value_of(source.name, source.shape).view(entry.shape))
            filled.add(source.name)
    assert filled == set(shapes)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_that_timm_computed(name):
    wanted = recorded()[name]
    model = ours(name, wanted.pop("shapes"))
    found = computed(model, {key: same.name for key, same in timm_names(model.config).items()})
    torch.testing.assert_close(
        torch.tensor(found["logits"]), torch.tensor(wanted["logits"]), rtol=1e-12, atol=1e-12
    )
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for key, value in wanted["gradients"].items():
        # The batch norm behind a convolution takes away what a bias in front of it adds.
        free = key.endswith("pre_norm.bias") and not model.config.pre_norm_act
        assert free or abs(value) > 1e-9, f"{key} has no gradient, so this shows nothing"
        assert found["gradients"][key] == pytest.approx(value, rel=1e-9, abs=1e-11), key


@pytest.fixture(scope="module")
def pico() -> CoAtNetConfig:
    return CoAtNetConfig.named(
        "pico_rw", num_labels=3, image_size=32, image_width=64, num_channels=1
    )


@pytest.fixture(scope="module")
def weights(pico, tmp_path_factory) -> Path:
    """The file of such a model, with timm's names."""
    model = CoAtNet(pico, seed=None, device="meta")
    tensors = {
        source.name: value_of(source.name, source.shape).float()
        for entry in COATNET.entries(model)
        for source in entry.sources
    }
    tensors["stem.norm1.num_batches_tracked"] = torch.tensor(3)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(tensors, path)
    return path


def folder_of(path: Path, weights: Path, **changes: Any) -> Path:
    """A folder as timm writes one."""
    (path / weights.name).symlink_to(weights)
    values = {
        "architecture": "coatnet_pico_rw_224",
        "num_classes": 3,
        "num_features": 512,
        "global_pool": "avg",
        "pretrained_cfg": {"input_size": [1, 32, 64]},
        **changes,
    }
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_a_folder_of_timm_is_loaded(tmp_path, pico, weights):
    model = hub.load(folder_of(tmp_path, weights))
    assert isinstance(model, CoAtNet)
    assert model.config == pico
    assert not model.training
    wanted = value_of("stages.1.blocks.0.conv1_1x1.weight", (256, 64, 1, 1)).float()
    assert torch.equal(model.blocks[2].expand.weight, wanted[:, :, 0, 0])
    mean = value_of("stages.1.blocks.0.norm1.running_mean", (256,)).float()
    assert torch.equal(model.blocks[2].norm1.norm.running_mean, mean)
    assert model(torch.zeros(1, 1, 32, 64)).shape == (1, 3)


def cut(rank: int, group: Any, path: Path) -> torch.Tensor:
    model = hub.load(path, group=group)
    assert len(model.blocks[2].norm1.norm.running_mean) == 128
    return model(torch.linspace(-1, 1, 32 * 64).view(1, 1, 32, 64)).detach()


def test_ranks_read_their_own_parts(world, tmp_path, weights):
    folder = folder_of(tmp_path, weights)
    wanted = hub.load(folder)(torch.linspace(-1, 1, 32 * 64).view(1, 1, 32, 64))
    for found in world(2).run(cut, folder):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "coatnet_rmlp_1_rw_224"}, "'coatnet_rmlp_1_rw_224', which is not known"),
        ({"architecture": "coatnet_bn_0_rw_224"}, "pyops has coatnet_0_224 to coatnet_5_224"),
        ({"model_args": {"drop_rate": 0.1}}, "config.json has model_args = .* computes {} only"),
        ({"global_pool": "max"}, "config.json has global_pool = 'max'"),
        ({"num_classes": 4}, r"head.fc.weight is \[3, 512\] in the files, but \[4, 512\]"),
        ({"pretrained_cfg": {"input_size": 224}}, "input_size = 224; it must be a list"),
        ({"pretrained_cfg": {"input_size": [1, 33, 64]}}, "no multiple of 32"),
        ({"architecture": "coatnet_0_rw_224"}, "the files lack"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused(tmp_path, weights, changes, message):
    with pytest.raises(HubError, match=message):
        hub.load(folder_of(tmp_path, weights, **changes))


def test_tokens_are_not_shared_and_a_coatnet_is_not_written(tmp_path, pico, weights):
    with pytest.raises(ValueError, match="sequence_parallel is True, but a CoAtNet of timm"):
        hub.load(folder_of(tmp_path, weights), sequence_parallel=True)
    with pytest.raises(HubError, match="a CoAtNet is no model that can be written"):
        hub.save(CoAtNet(pico, seed=None), tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["coatnet_0_224", "coatnet_0_rw_224", "coatnet_1_rw_224", "coatnet_nano_rw_224"]
)
def test_models_of_the_usual_size_compute_what_timm_does(name):
    """Where timm is installed."""
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(name).eval()
    variant = name.removeprefix("coatnet_").removesuffix("_224")
    model = CoAtNet(CoAtNetConfig.named(variant), seed=None).eval()
    state = theirs.state_dict()
    with torch.no_grad():
        for entry in COATNET.entries(model):
            entry.parameter.copy_(state[entry.sources[0].name].view(entry.shape))
        images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-5, atol=1e-5)
