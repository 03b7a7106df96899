"""Adapters of low rank against weights that have the update in them, and what they leave alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pyops
from pyops.adapters import LoRA, freeze
from pyops.models import GPT, GPTConfig
from pyops.models.vocabulary_head import VocabularyHead
from pyops.tensor_parallel import set_dropout
from tests.adapters.adapted import filled
from tests.models.families import FAMILIES, loss_of, make

pytestmark = pytest.mark.cpu_only

EVERYTHING = ["*"]


def plain(name: str) -> Any:
    return make(name, dtype=torch.float64).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_at_first_the_model_computes_what_it_did(name):
    """Bit for bit; A is uniform within 1 / sqrt(in), and only the adapters require gradients."""
    model = plain(name)
    before = loss_of(model, step=0)
    names = {n for n, _ in model.named_parameters()}
    lora = LoRA(model, rank=3, seed=1)
    assert torch.equal(loss_of(model, step=0), before)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters()} - names
    assert len(trained) == 2 * len(lora.adapters) == len(list(lora.parameters())) > 4
    for adapter in lora.adapters.values():
        assert not adapter.B.any()
        bound = adapter.A.shape[1] ** -0.5
        assert 0.5 * bound < adapter.A.abs().max() <= bound
    assert not any(isinstance(layer, VocabularyHead) for layer in lora.layers.values())
    assert "next_sentence" not in lora.layers
    drawn = [a.A for a in lora.adapters.values()]
    other = [a.A for a in LoRA(plain(name), rank=3, seed=2).adapters.values()]
    assert not any(torch.equal(a, b) for a, b in zip(drawn, other, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_update(name):
    """Of the loss as a function of W + scale B A, by torch."""
    model = plain(name)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    reference = copy.deepcopy(model)
    lora = filled(model, only=EVERYTHING, rank=2, alpha=4)
    factors = {n: (a.A, a.B) for n, a in lora.adapters.items()}
    twins = {n: [f.detach().clone().requires_grad_() for f in fs] for n, fs in factors.items()}
    weights = {
        f"{n}.weight": base.get(f"{n}.weight", base.get("embedding.token.weight")) + 2 * (B @ A)
        for n, (A, B) in twins.items()
    }
    # A tied head is given a weight of its own: the table stays as it is.
    for n, module in reference.named_modules():
        if f"{n}.weight" in weights:
            module.weight = nn.Parameter(module.weight.detach().clone())

    def with_weights(*args: Any, **options: Any) -> Tensor:
        return functional_call(reference, weights, args, options)

    expected = loss_of(reference, step=0, through=with_weights)
    expected.backward()
    loss = loss_of(model, step=0)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert (loss - loss_of(plain(name), step=0)).abs() > 1e-4
    for n, pair in factors.items():
        for own, other in zip(pair, twins[n], strict=True):
            assert other.grad.abs().max() > 1e-9, n
            torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-12)
    unchanged = {n: p for n, p in model.named_parameters() if ".adapter." not in n}
    assert all(torch.equal(p, base[n]) for n, p in unchanged.items())
    assert all(p.grad is None for p in unchanged.values())


def logits(model: Any) -> Tensor:
    return model(torch.arange(10).view(2, 5))


@torch.no_grad()
def test_merged_and_not_merged_are_the_same():
    """In the head, too, where it has a table of its own; and merged, then unmerged, W is what it
    was, to rounding."""
    model = make("llama", dtype=torch.float32).eval()
    base = {n: p.clone() for n, p in model.named_parameters()}
    lora = filled(model, only=EVERYTHING)
    separate = logits(model)
    lora.merge()
    lora.merge()  # once
    torch.testing.assert_close(logits(model), separate, rtol=1e-5, atol=1e-6)
    changed = [n for n, p in model.named_parameters() if n in base and not torch.equal(p, base[n])]
    assert len(changed) == len(lora.adapters)
    lora.unmerge()
    assert torch.equal(logits(model), separate) or (logits(model) - separate).abs().max() < 1e-5
    for name, before in base.items():
        torch.testing.assert_close(model.get_parameter(name), before, rtol=1e-6, atol=1e-7)
    lora.merge()
    merged = logits(model)
    lora.remove()
    assert torch.equal(logits(model), merged)
    assert not any("adapter" in name for name, _ in model.named_parameters())
    LoRA(model, rank=2)  # again


class Foreign(nn.Module):
    """Of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_torch_linear_layers():
    """Outputs, gradients, merging; an optimizer of pyops steps the adapters and nothing else."""
    model = Foreign()
    x = torch.randn(3, 6)
    before, base = model(x), copy.deepcopy(model)
    lora = LoRA(model, rank=2, alpha=4, only=["second"])
    assert torch.equal(model(x), before)
    assert list(lora.adapters) == ["second"]
    optimizer = pyops.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert model(x).square().sum() < before.square().sum()
    adapter = lora.adapters["second"]
    by_hand = base.first(x).relu() @ (base.second.weight + 2 * adapter.B @ adapter.A).T
    torch.testing.assert_close(model(x), by_hand + base.second.bias, rtol=0, atol=1e-6)
    for name, parameter in base.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    assert len(optimizer.state) == 2
    separate = model(x)
    lora.merge()
    torch.testing.assert_close(model(x), separate, rtol=0, atol=1e-6)
    lora.remove()
    torch.testing.assert_close(model(x), separate, rtol=0, atol=1e-6)


def test_factors_of_another_dtype():
    """fp32 factors beside a base in bf16, as peft keeps them; under autocast, too."""
    model = make("gpt", dtype=torch.bfloat16).eval()
    lora = filled(model, dtype=torch.float32)
    loss = loss_of(model, step=0)
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in lora.parameters())
    assert all(p.grad.any() for p in lora.parameters())
    model = make("gpt").eval()
    filled(model)
    exact = loss_of(model, step=0)
    with torch.autocast("cpu", torch.bfloat16):
        rough = loss_of(model, step=0)
    assert 0 < (exact - rough).abs() < 0.05


def test_dropout_is_keyed():
    """Of the input of the adapter alone: an adapter of zeros changes nothing by it."""
    config = GPTConfig(vocab_size=13, sequence_length=5, num_layers=1, num_heads=2, dim=8)
    model = GPT(config, dtype=torch.float64)
    lora = filled(model, dropout=0.5)
    tokens = torch.arange(10).view(2, 5)
    with pytest.raises(RuntimeError, match="call set_dropout"):
        model(tokens)
    results = []
    for step in (1, 1, 2):
        set_dropout(model, seed=0, step=step, shape=(2, 5))
        results.append(model(tokens))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    evaluated = model.eval()(tokens)
    assert not torch.equal(evaluated, results[0])
    for parameter in lora.parameters():
        parameter.data.zero_()
    set_dropout(model.train(), seed=0, step=1, shape=(2, 5))
    assert torch.equal(model(tokens), model.eval()(tokens))


def test_what_can_not_be_adapted_is_refused():
    model = make("gpt")
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    for options, message in (
        ({"rank": 9}, r"rank is 9, but blocks.0.attention.qkv is \[24, 8\]"),
        ({"rank": 0}, "rank is 0"),
        ({"only": ["blocks.*.atention.*"]}, "'blocks.*.atention.*' matches none of 9 names"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": "0.1"}, "dropout is '0.1'; it is a probability"),
        ({"rank": 99}, "rank is 99, but no linear layer of GPT has so many outputs; .* 1 to 8"),
        ({"rank": "2"}, "rank is '2'; give a whole number, 1 or more"),
        ({"rank": 2.0}, "rank is 2.0"),
        ({"alpha": float("nan")}, "alpha is nan; give a number above 0"),
        ({"alpha": None}, "alpha is None"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
        ({"dtype": torch.int8}, "dtype is torch.int8; give one of"),
        ({"only": []}, r"only is \[\], which names no layer"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRA(model, **{"rank": 2, **options})
    with pytest.raises(TypeError, match=r"only is \[1\]; give a list of patterns of names"):
        LoRA(model, only=[1])
    with pytest.raises(TypeError, match="model is a str"):
        LoRA("gpt")
    assert not any(name.endswith("adapter") for name, _ in model.named_modules())
    with pytest.raises(TypeError, match=r"give a list of patterns: \['blocks"):
        LoRA(model, only="blocks.*")
    assert before == {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="Embedding has no linear layer"):
        LoRA(nn.Embedding(3, 4))
    lora = filled(model, only=["head.*"])
    with pytest.raises(ValueError, match=r"head.output is embedding.token.weight, too"):
        lora.merge()
    with pytest.raises(ValueError, match=r"head.output has an adapter already"):
        LoRA(model, only=["head.*", "blocks.0.*"])
    foreign = Foreign()
    lora = LoRA(foreign, rank=2)
    foreign.second.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.int8), requires_grad=False)
    first = foreign.first.weight.clone()
    with pytest.raises(ValueError, match=r"weight of second is torch.int8"):
        lora.merge()
    assert torch.equal(foreign.first.weight, first)
    broken = Foreign()
    lora = LoRA(broken, rank=2)
    lora.adapters["second"].B.data[0, 0] = torch.nan
    first = broken.first.weight.clone()
    with pytest.raises(ValueError, match="B of the adapter of second has a number that is not"):
        lora.merge()
    assert not lora.merged
    assert torch.equal(broken.first.weight, first)


def test_freezing_ends_backward():
    """The last block alone is trained: no gradient comes before it, and an optimizer steps what has
    one."""
    model = make("gpt").eval()
    names = freeze(model, except_=["blocks.1.*", "head.norm.*"])
    assert names == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert {name.split(".")[0] for name in names} == {"blocks", "head"}
    reached: list[bool] = []
    model.blocks[0].register_full_backward_hook(lambda *_: reached.append(False))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = pyops.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, step=0).backward()
    optimizer.step()
    assert not reached
    changed = sorted(n for n, p in model.named_parameters() if not torch.equal(p, before[n]))
    assert changed == names
    with pytest.raises(ValueError, match=r"'blocks.7.*' matches none"):
        freeze(model, except_=["blocks.7.*"])
    assert names == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert freeze(model) == []
