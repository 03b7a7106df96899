"""Permuted channels leave every model's function as it is, and each part of a set is needed for
that."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.pruning import NM, channel_sets, inverse, masks_of, nm_masks, permute, rearrange
from pyops.pruning.symmetries import moves
from tests.grids import full
from tests.pruning.permuted_models import MODELS, TEXT, outputs, randomized

pytestmark = pytest.mark.cpu_only

ROTARY = ("llama", "roformer")


def free(model: nn.Module) -> dict[str, Tensor]:
    """A random order for all channels that may move."""
    return {
        name: torch.randperm(channels.size)
        for name, channels in channel_sets(model).items()
        if not channels.fixed
    }


def away(model: nn.Module, y: Tensor) -> float:
    return float((outputs(model).detach() - y).abs().max())


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    y = outputs(model)
    (y * torch.linspace(-1.0, 1.0, len(y), dtype=y.dtype)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_stay(kind: str):
    model = randomized(MODELS[kind]())
    before, y = copy.deepcopy(model), outputs(model).detach()
    grads = gradients(model)
    orders = free(model)
    assert len(orders) >= 7
    rearrange(model, orders)
    assert away(model, y) <= 1e-12 * float(y.abs().max())
    moved = sum(
        not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert moved > 0.8 * len(grads)
    # The gradients of the permuted model, put where they belong, are those of the first
    found = gradients(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(found[name])
    rearrange(model, {name: inverse(order) for name, order in orders.items()})
    for name, p in model.named_parameters():
        size = float(grads[name].abs().max())
        assert size > 0, name
        assert float((p.detach() - grads[name]).abs().max()) <= 1e-11 * size, name


@pytest.mark.parametrize("kind", ["llama", "bert", "vit", "t5", full("coatnet")])
def test_every_part_of_a_set_is_needed(kind: str):
    """Without one of them the model computes something else: norms, biases, running statistics,
    tables."""
    model = randomized(MODELS[kind]())
    y = outputs(model).detach()
    state = copy.deepcopy(model.state_dict())
    tried = set()
    for name, channels in channel_sets(model).items():
        of_kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if channels.fixed or (of_kind in tried and not name.startswith(("stream", "residual"))):
            continue
        tried.add(of_kind)
        parts = tuple(part for _, part in moves(model, channels))
        order = torch.arange(channels.size).roll(1)
        for left_out, part in enumerate(parts):
            if "scores" in name and part.name.endswith("bias"):
                continue  # that of keys adds the same to all scores of a query
            some = replace(channels, parts=parts[:left_out] + parts[left_out + 1 :])
            model.permutations = lambda some=some: [some]
            rearrange(model, {name: order})
            error = away(model, y)
            assert error > 1e-7 * float(y.abs().max()), (name, parts[left_out])
            model.load_state_dict(state)
        del model.permutations
    assert len(tried) >= 3


@pytest.mark.parametrize("kind", ROTARY)
def test_queries_and_keys_stay_under_rotary_positions(kind: str):
    model = randomized(MODELS[kind]())
    name = "blocks.0.attention.scores.1"
    channels = channel_sets(model)[name]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"{name} can't be permuted: rotary positions turn pairs"):
        rearrange(model, {name: torch.randperm(8), "residual": torch.randperm(32)})
    with pytest.raises(ValueError, match="rotary positions turn"):
        permute(model, only=["*.scores.*"])
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    # And rightly so: even whole pairs
    y = outputs(model).detach()
    model.permutations = lambda: [replace(channels, fixed="")]
    rearrange(model, {name: torch.tensor([2, 3, 0, 1, 6, 7, 4, 5])})
    assert away(model, y) > 1e-6


def uneven(model: nn.Module) -> nn.Module:
    """Weights whose inputs differ in size, as those of trained models do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and not name.startswith("embedding"):
                p.mul_(torch.randn(p.shape[1], dtype=p.dtype).mul(0.7).exp())
    return model


def test_permuted_for_2_of_4():
    model = uneven(randomized(MODELS["llama"]()))
    other, y = copy.deepcopy(model), outputs(model).detach()
    names = {n for n, c in channel_sets(model).items() if not c.fixed}
    permuted = permute(model, escapes=5, seed=1)
    assert set(permuted.gains) == names
    assert away(model, y) <= 1e-12 * float(y.abs().max())
    for name, gain in permuted.gains.items():
        assert gain.before <= gain.after <= gain.unstructured < 1.0, name
    assert permuted.gains["residual"].after > permuted.gains["residual"].before + 0.003
    assert permuted.gains["blocks.0.mlp.hidden"].after > 0.01 + (
        permuted.gains["blocks.0.mlp.hidden"].before
    )
    kept = [
        sum(
            float(p.detach().abs()[NM(2, 4).alive(p)].sum())
            for n, p in m.named_parameters()
            if "mlp" in n
        )
        for m in (other, model)
    ]
    stacked = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert stacked  # up and gate in one
    assert kept[1] > 1.005 * kept[0]
    again = permute(copy.deepcopy(other), escapes=5, seed=1)
    assert all(torch.equal(again.orders[name], order) for name, order in permuted.orders.items())
    permuted.undo()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_masks_go_back_with_the_channels():
    model = uneven(randomized(MODELS["gpt"]()))
    permuted = permute(model, escapes=0)
    masks = nm_masks(model)
    y = outputs(model).detach()
    permuted.undo()
    assert away(model, y) <= 1e-12 * float(y.abs().max())
    assert masks_of(model)
    apart = 0
    for name, mask in masks.items():
        assert torch.equal(mask.alive(), masks.parameter(name) != 0), name
        apart += int((mask.alive().unflatten(1, (-1, 4)).sum(2) != 2).sum())
    assert apart > 0


class Nameless(nn.Module):
    """Without permutations()."""


def gpt(**changes) -> GPT:
    return GPT(GPTConfig(**TEXT | changes))


def stage() -> GPT:
    model = gpt()
    model.keep_layers([0, 1])
    return model


def infinite() -> GPT:
    model = gpt()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = torch.inf
    return model


def pruned() -> GPT:
    model = gpt()
    nm_masks(model)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Nameless, {}, r"Nameless has no permutations\(\): a method that returns the ChannelSets"),
        (gpt, {"pattern": NM(1, 4)}, r"searches for 2:4; got 1:4"),
        (gpt, {"escapes": -1}, r"escapes is -1; give a whole number, 0 or more"),
        (gpt, {"escapes": 1.5}, r"escapes is 1.5"),
        (gpt, {"seed": "x"}, r"seed is 'x'; give a whole number"),
        (gpt, {"only": [1]}, r"only is \[1\]; give a list of patterns"),
        (infinite, {"only": ["*.mlp.*"]}, r"down.weight has a weight that is nan or infinite"),
        (gpt, {"only": ["*.mlpp"]}, r"only: '\*.mlpp' matches none of \d+ sets of channels"),
        (gpt, {"only": ["*.scores.0"]}, r"scores.0 can't be permuted for 2:4: no matrix that is"),
        (
            lambda: gpt(dim=24),
            {"only": ["*.values.*"]},
            r"values.0 can't be permuted for 2:4: the 6 channels are not whole groups of 4",
        ),
        (stage, {}, r"this GPT is a part of a model"),
        (pruned, {}, r"blocks.0.attention.qkv.weight is pruned already"),
    ],
)
def test_what_is_refused(make, options: dict, message: str):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        permute(model, **options)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_orders_that_are_none():
    model = gpt()
    for order, message in (
        (torch.zeros(32, dtype=torch.int64), "must be a permutation of 0 to 31"),
        (torch.randperm(31), r"got torch.int64 \[31\]"),
        (torch.randperm(32).int(), r"got torch.int32 \[32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            rearrange(model, {"residual": order})
    with pytest.raises(ValueError, match=r"declares no channels 'residul'; it has residual, "):
        rearrange(model, {"residul": torch.randperm(32)})


def test_small_heads_are_left_out_and_said():
    permuted = permute(gpt(dim=24), escapes=0)
    assert "residual" in permuted.gains
    assert "whole groups of 4" in permuted.skipped["blocks.1.attention.values.3"]
    assert "changes nothing" in permuted.skipped["blocks.1.attention.scores.3"]
