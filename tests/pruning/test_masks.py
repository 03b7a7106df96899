"""Masks: bits in the order that is written down, bound to parameters of one owner."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import nn

from pyops.pruning import (
    Mask,
    Masks,
    masks_from_state,
    masks_of,
    masks_state,
    pack_bits,
    report,
    unpack_bits,
)

pytestmark = pytest.mark.cpu_only


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def some(model: nn.Module, name: str = "0.weight") -> torch.Tensor:
    shape = model.get_parameter(name).shape
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


def test_bits_lie_as_written():
    alive = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    assert pack_bits(alive).tolist() == [0b00011001, 0b10]
    assert unpack_bits(pack_bits(alive), 10).view(2, 5).equal(alive)
    assert unpack_bits(pack_bits(alive), 4, start=3).tolist() == [True, True, False, False]
    assert pack_bits(torch.zeros(0, dtype=torch.bool)).shape == (0,)
    long = torch.rand(203) < 0.5
    mask = Mask.of(long)
    assert mask.kept == int(long.sum())
    for start, stop in ((0, 203), (8, 203), (9, 203), (64, 130), (5, 6), (7, 7)):
        assert unpack_bits(mask.part(start, stop), stop - start).equal(long[start:stop])


def test_pruned_weights_are_plus_zero_also_where_not_finite():
    model = network()
    model[0].weight.data[0, 0] = torch.nan
    model[0].weight.data[0, 1] = -3.0
    alive = torch.ones(5, 6, dtype=torch.bool)
    alive[0] = False
    masks = Masks(model, {"0.weight": alive})
    assert not model[0].weight[0].detach().view(torch.int32).any()
    assert model[0].weight[1].all()
    assert masks.sparsity == pytest.approx(0.2)
    assert dict(masks_of(model)) == {"0.weight": masks["0.weight"]}


def test_others_are_told_of_new_masks():
    model, told = network(), []
    masks = Masks(model, {"0.weight": some(model), "2.weight": some(model, "2.weight")})
    end = masks.observe(lambda: told.append(1))
    before = model[2].weight.detach().clone()
    masks.update({"0.weight": torch.zeros(5, 6, dtype=torch.bool)})
    assert told == [1]
    assert not model[0].weight.any()
    assert model[2].weight.equal(before)
    with pytest.raises(ValueError, match=r"2.bias has no mask here"):
        masks.update({"2.bias": torch.ones(3, dtype=torch.bool)})
    end()
    masks.update({"0.weight": torch.ones(5, 6, dtype=torch.bool)})
    assert told == [1]


def test_masks_are_of_one_owner():
    model = network()
    masks = Masks(model, {"0.weight": some(model)})
    with pytest.raises(ValueError, match=r"0.weight has masks of another owner .* release"):
        Masks(model, {"0.weight": some(model)})
    masks.release()
    Masks(model, {"0.weight": some(model)})
    assert not masks_of(copy.deepcopy(model)), "a copy is nobody's"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert not masks_of(torch.load(file, weights_only=False))


def test_tied_weights_have_one_mask():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    alive = torch.eye(4).bool()
    with pytest.raises(ValueError, match=r"1.weight is tied to another name with another mask"):
        Masks(model, {"0.weight": alive, "1.weight": ~alive})
    assert list(Masks(model, {"1.weight": alive, "0.weight": alive})) == ["0.weight"]


def test_what_is_refused_changes_nothing():
    model = network()
    model[2].bias.requires_grad_(False)
    model.register_parameter("codes", nn.Parameter(torch.ones(2).to(torch.int8), False))
    before = copy.deepcopy(model.state_dict())
    right = some(model)
    for name, alive, words in (
        ("0.weights", right, "no parameter '0.weights'; it has codes, 0.weight"),
        ("0.bias", right, r"the mask of 0.bias is of shape \(5, 6\), the parameter of \(5,\)"),
        ("2.bias", torch.ones(3, dtype=torch.bool), "2.bias is frozen"),
        ("codes", torch.ones(2, dtype=torch.bool), "codes is torch.int8: prune a model first"),
    ):
        with pytest.raises(ValueError, match=words):
            Masks(model, {"0.weight": right, name: alive})
    with pytest.raises(TypeError, match=r"alive is torch.float32; give a bool"):
        Masks(model, {"0.weight": right.float()})
    with pytest.raises(ValueError, match=re.escape("has 30 bits, uint8 (4,)")):
        Mask((5, 6), torch.zeros(3, dtype=torch.uint8))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not masks_of(model)


def test_saved_masks_are_those_of_a_weight_that_is_zero_and_alive():
    model = network()
    model[0].weight.data[1, 1] = 0.0
    alive = torch.ones(5, 6, dtype=torch.bool)
    alive[0] = False
    state = masks_state(Masks(model, {"0.weight": alive}))
    found = masks_from_state(network(), state)
    assert found["0.weight"].alive().equal(alive)
    assert state["bits"]["0.weight"].numel() == 4
    for words, change in (
        (r"the mask of 0.weight is of \(5, 6\), the parameter of \(3, 6\)", {}),
        ("hash to", {"shapes": {"0.weight": [5, 7]}}),
    ):
        other = nn.Sequential(nn.Linear(6, 3))
        with pytest.raises(ValueError, match=words):
            masks_from_state(other, state | change)
    with pytest.raises(ValueError, match=r"the masks have 0.weight .* which the model has not"):
        masks_from_state(nn.ModuleDict({"a": nn.Linear(6, 5)}), state)


def test_a_report_counts_bytes():
    model = network()
    dense = copy.deepcopy(model.state_dict())
    alive = some(model)
    Masks(model, {"0.weight": alive})
    kept = int(alive.sum())
    found = report(model, dense=dense)
    (layer,) = found.layers
    assert (layer.dense_bytes, layer.packed_bytes) == (120, 4 + 4 * kept)
    assert layer.csr_bytes == 8 * kept + 24
    magnitudes = dense["0.weight"].abs().double()
    assert layer.kept_magnitude == pytest.approx(
        float((magnitudes * alive).sum() / magnitudes.sum())
    )
    assert found.sparsity == pytest.approx(1 - kept / 30)
    assert found.other_numel == 5 + 15 + 3
    assert "23 weights have no mask" in str(found)
