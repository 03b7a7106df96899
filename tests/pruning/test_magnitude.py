"""Pruning by magnitude: exactly as many weights as asked for, ties by their place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pyops.pruning import Structure, kth_magnitude, magnitude
from pyops.pruning.ranking.threshold import kth_place

pytestmark = pytest.mark.cpu_only


class Odd(nn.Module):
    """Matrices of many equal values, zeros of both signs, subnormals; one element; a kernel."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.one = nn.Linear(1, 1)
        self.wide = nn.Linear(30, 21)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)
        for p in self.parameters():
            values = (torch.randn(p.shape, generator=generator) * 2).round() / 4
            values.view(-1)[::5] = -0.0
            values.view(-1)[::7] *= 1e-41
            p.data.copy_(values)


def kept_by_sorting(weights: dict[str, torch.Tensor], keep: int) -> dict[str, torch.Tensor]:
    """The largest by (magnitude, then name, then place), as a list in Python sorts them."""
    entries = [
        (-abs(value), name, place)
        for name in sorted(weights)
        for place, value in enumerate(weights[name].flatten().tolist())
    ]
    found = {name: torch.zeros(w.numel(), dtype=torch.bool) for name, w in weights.items()}
    for _, name, place in sorted(entries)[:keep]:
        found[name][place] = True
    return {name: mask.view(weights[name].shape) for name, mask in found.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_exactly_as_many_stay(sparsity: float):
    names = ["conv.weight", "one.weight", "wide.weight"]
    for scope in ("layer", "global"):
        model = Odd()
        before = {name: model.get_parameter(name).detach().clone() for name in names}
        others = {k: v.clone() for k, v in model.state_dict().items() if k not in names}
        masks = magnitude(model, sparsity, scope=scope)
        assert sorted(masks) == names, "no embedding, norm, bias or last layer"
        pools = [{n: w} for n, w in before.items()] if scope == "layer" else [before]
        for pool in pools:
            n = sum(w.numel() for w in pool.values())
            keep = n - round(sparsity * n)
            expected = kept_by_sorting(pool, keep)
            assert sum(masks[name].kept for name in pool) == keep
            for name in pool:
                assert masks[name].alive().equal(expected[name])
                weight = model.get_parameter(name).detach()
                assert weight.equal(before[name].masked_fill(~expected[name], 0.0))
                gone = weight[~expected[name]].view(torch.int32)
                assert not gone.any(), "+0 to the bit"
        assert all(v.equal(model.state_dict()[k]) for k, v in others.items())


def test_all_equal_weights_go_by_their_place():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    for p in model.parameters():
        p.data.fill_(-0.5)
    masks = magnitude(model, 0.5, scope="global", only=["*"])
    assert masks["0.weight"].kept == 12
    assert masks["1.weight"].kept == 0


def test_a_floor_keeps_a_layer():
    model = nn.Sequential(nn.Linear(20, 10, bias=False), nn.Linear(10, 20, bias=False))
    model[0].weight.data.mul_(1e-3)
    masks = magnitude(copy.deepcopy(model), 0.9, scope="global", only=["*"])
    assert masks["0.weight"].kept == 0
    masks = magnitude(model, 0.9, scope="global", only=["*"], least=0.03)
    assert masks["0.weight"].kept == 6
    assert masks["1.weight"].kept == 34
    with pytest.raises(ValueError, match=r"sparsity 0.9 keeps 40 of 400 .* least of at most 0.1"):
        masks.release()
        magnitude(model, 0.9, scope="global", only=["*"], least=0.2)


def test_whole_structures_go():
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(8, 6, 3), nn.Linear(3, 3))
    norms = model[0].weight.detach().double().square()
    rows = magnitude(copy.deepcopy(model), 0.5, scope="rows")
    alive = rows["0.weight"].alive()
    assert alive.all(1).equal(alive.any(1)), "whole rows"
    largest = norms.sum(1).topk(4).indices.sort().values
    assert alive.all(1).nonzero().view(-1).equal(largest)
    assert rows["1.weight"].alive().flatten(1).all(1).sum() == 3
    heads = magnitude(
        copy.deepcopy(model), 1 / 3, scope=Structure(dim=1, width=4), only=["0.weight"]
    )
    alive = heads["0.weight"].alive()
    gone = int(norms.sum(0).view(3, 4).sum(1).argmin())
    assert alive.view(8, 3, 4).all(2).all(0).tolist() == [i != gone for i in range(3)]
    with pytest.raises(ValueError, match=r"1.weight of \(6, 8, 3, 3\) is not made of structures"):
        magnitude(model, 0.5, scope=Structure(dim=1, width=3), only=["1.weight"])


def test_scores_in_place_of_weights():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    scores = torch.arange(24.0).view(4, 6) * torch.tensor([1.0, -1.0]).repeat(12).view(4, 6)
    masks = magnitude(model, 0.75, importance={"0.weight": scores})
    assert masks["0.weight"].alive().flatten().nonzero().view(-1).tolist() == list(range(18, 24))
    masks.release()
    with pytest.raises(ValueError, match=r"importance has no scores of 0.weight"):
        magnitude(model, 0.5, importance={})
    with pytest.raises(ValueError, match=r"importance of 0.weight is of \(6, 4\); give scores of"):
        magnitude(model, 0.5, importance={"0.weight": scores.t()})
    with pytest.raises(ValueError, match=r"importance of 0.weight is of int; give scores of"):
        magnitude(model, 0.5, importance={"0.weight": 3})
    with pytest.raises(ValueError, match=r"what ranks 0.weight is torch.int64; give one of"):
        magnitude(model, 0.5, importance={"0.weight": scores.long()})
    with pytest.raises(ValueError, match=r"0.weight is on meta and has no numbers"):
        magnitude(model.to("meta"), 0.5)


def test_what_is_refused_changes_nothing():
    model = Odd()
    before = copy.deepcopy(model.state_dict())
    for options, words in (
        ({"sparsity": 1.5}, "sparsity is 1.5; give a share from 0 to 1"),
        ({"sparsity": -0.1}, "sparsity is -0.1"),
        ({"sparsity": float("nan")}, "sparsity is nan"),
        ({"sparsity": "0.5"}, "sparsity is '0.5'; give a share"),
        ({"sparsity": None}, "sparsity is None"),
        ({"sparsity": True}, "sparsity is True"),
        ({"least": "x", "scope": "global"}, "least is 'x'"),
        ({"scope": "network"}, "scope is 'network'; choose"),
        ({"least": 0.1}, "least=0.1 is for scope='global'"),
        ({"only": ["blocks.*"]}, r"only: 'blocks.\*' matches none of 11 names"),
        ({"only": ["norm.*"]}, "no matrix or convolution kernel to prune"),
    ):
        with pytest.raises(ValueError, match=words):
            magnitude(model, **{"sparsity": 0.5, **options})
    with pytest.raises(TypeError, match=r"only is 'wide.weight'; give a list"):
        magnitude(model, 0.5, only="wide.weight")
    with pytest.raises(TypeError, match=r"only is \[3\]; give a list of patterns of names"):
        magnitude(model, 0.5, only=[3])
    with pytest.raises(ValueError, match=r"Structure\(dim=2, width=1\)"):
        Structure(2)
    model.conv.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"1 of the numbers that rank conv.weight are nan"):
        magnitude(model, 0.5)
    model.conv.weight.data[0, 0, 0, 0] = before["conv.weight"][0, 0, 0, 0]
    model.wide.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"only: wide.weight is frozen or quantized"):
        magnitude(model, 0.5, only=["wide.*"])
    assert "wide.weight" not in magnitude(copy.deepcopy(model), 0.5), "frozen ones are left out"
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    magnitude(model, 0.5, only=["norm.weight"])
    with pytest.raises(ValueError, match=r"norm.weight has masks of another owner"):
        magnitude(model, 0.5, only=["norm.weight"])


def test_kth_of_one_process_and_places():
    x = torch.randn(1000)
    assert kth_magnitude([x], 10).value == float(x.abs().topk(10).values[-1])
    places = torch.randperm(3_000_000)[:5000] + 7
    for k in (1, 2500, 5000):
        found = kth_place(
            [places[:4000], places[4000:]], k, total=3_000_007, device=torch.device("cpu")
        )
        assert found == int(places.sort().values[k - 1])
