"""A CoAtNet by itself: what its layers promise, what stochastic depth leaves out, and what is
refused. That it computes what timm's does is tested in tests/hub/timm."""

from __future__ import annotations

import pytest
import torch

from pyops.models.coatnet.stochastic_depth import StochasticDepth
from tests.models.coatnet.tiny import BATCH, images_of, make

pytestmark = pytest.mark.cpu_only


def test_the_layers_composed_are_the_model():
    model = make().eval()
    images, labels = images_of()
    x = images
    for layer in model.layers():
        x = layer(x)
    assert torch.equal(x, model(images))
    assert x.shape == (BATCH, 5)
    wanted = torch.nn.functional.cross_entropy(x, labels)
    assert model.loss(images, labels).item() == pytest.approx(wanted.item(), abs=1e-12)


def test_every_parameter_has_a_gradient_and_norms_forget_in_initialize():
    model = make(layer_scale=0.5, se_early=True, pre_norm_act=True)
    assert (model.blocks[3].scale1 == 0.5).all()
    model.loss(*images_of()).backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 1e-12, name
    norm = model.stem.norm.norm
    assert not torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    model.initialize(3)
    assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(norm.running_var, torch.ones(4, dtype=torch.float64))


def test_stochastic_depth_is_of_the_images_number_in_the_global_batch_and_the_step():
    model = make(norm="layer", stochastic_depth=0.6)
    images, labels = images_of()
    drops = [m.p for m in model.modules() if isinstance(m, StochasticDepth)]
    assert drops == pytest.approx([0.0, 0.12, 0.24, 0.36, 0.36, 0.48, 0.48, 0.6, 0.6])

    def total(step: int, first: int, rows: int) -> float:
        model.set_dropout(rows, seed=9, step=step, first_row=first)
        part = slice(first, first + rows)
        return model.loss(images[part], labels[part], reduction="sum").item()

    whole = total(3, 0, BATCH)
    assert sum(total(3, row, 1) for row in range(BATCH)) == pytest.approx(whole, abs=1e-10)
    assert total(4, 0, BATCH) != pytest.approx(whole, abs=1e-6)
    model.eval()
    assert total(4, 0, BATCH) == total(3, 0, BATCH) != pytest.approx(whole, abs=1e-6)


def test_images_are_left_out_with_the_probability_and_kept_ones_scaled():
    drop = StochasticDepth(0.3)
    drop.set_dropout_state(key=17, first_row=0, shape=(20_000, 1))
    y = drop(torch.ones(20_000, 2, 1, 1, dtype=torch.float64))
    assert torch.equal(y[:, 0], y[:, 1])
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (y[:, 0] == 0).double().mean().item() == pytest.approx(0.3, abs=0.015)
    with pytest.raises(RuntimeError, match="has no state: call set_dropout"):
        StochasticDepth(0.3)(y)


def test_resized_it_takes_other_images_and_back_again_is_what_it_was():
    model = make(image_width=0).eval()
    images = torch.randn(2, 1, 96, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"images are .*; this model takes \[B, 1, 32, 32\]; res"):
        model(images)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.resize_(image_size=96, image_width=64)
    assert model(images).shape == (2, 5)
    assert model.blocks[3].attention.bias.table.shape == (11 * 7, 4)
    with pytest.raises(ValueError, match="image_size is 40, which is no multiple of 32"):
        model.resize_(image_size=40)
    model.resize_(image_size=32)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name])
    block = model.blocks[3]
    with pytest.raises(ValueError, match=r"given \(3, 3\) pixels, but its table is of \(2, 2\)"):
        block.attention(torch.zeros(1, 3, 3, 8, dtype=torch.float64))


def test_stages_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match=r"tp_stages has 5, but the stages .* are 1 to 4"):
        make(tp_stages=(3, 5))


def test_the_options_change_what_is_computed():
    images, _ = images_of()
    plain = make().eval()(images)
    for changes in (
        {"stride_in": "expand"},
        {"stride_in": "pool"},
        {"pool": "max"},
        {"pool": "max3"},
        {"se_early": True},
        {"pre_norm_act": True},
        {"activation": "silu"},
        {"se_activation": "relu"},
    ):
        other = make(**changes).eval()(images)
        assert (other - plain).abs().max() > 1e-9, changes
