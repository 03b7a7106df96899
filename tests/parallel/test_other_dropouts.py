"""Attention of torch.nn and layers that drop whole rows draw by counters; what can't is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.optim import SGD
from pyops.parallel import parallelize as composed
from pyops.parallel.dropout.keyed_dropout import KeyedDropPath, key_dropout, set_keyed_dropout
from pyops.tensor_parallel import parallelize, sync_partial_grads
from tests.parallel.tiny_transformers import make_model

pytestmark = pytest.mark.cpu_only

P, D, T = 0.3, 8, 5


class TinyDropPath(nn.Module):
    """As those of transformers: whole rows fall."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        kept = torch.floor(torch.rand(len(x), *[1] * (x.dim() - 1)).to(x) + 1 - self.drop_prob)
        return x.div(1 - self.drop_prob) * kept


class Block(nn.Module):
    """A layer of torch.nn, rows of which fall."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 4, 16, dropout=P, batch_first=True)
        self.path = TinyDropPath(P)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(self.layer(x))


class Net(nn.Module):
    """Blocks, and attention whose weights somebody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(D, 2, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.attention(x, x, x)[0]


PLAN = {
    "layers": "blocks",
    "self_attn": "attention",
    "linear1": "columns",
    "linear2": "rows",
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double().train()


def rows() -> Tensor:
    return torch.randn(6, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def forward(model: nn.Module, x: Tensor, first_row: int, step: int = 2) -> Tensor:
    set_keyed_dropout(model.named_modules(), seed=3, step=step, first_row=first_row)
    found: Tensor = model(x)
    return found


def test_two_micro_batches_are_one_batch():
    model, x = net(), rows()
    torch.manual_seed(5)
    unkeyed = model(x)
    key_dropout(model)
    before = torch.get_rng_state()
    whole = forward(model, x, 0)
    parts = [forward(model, x[2:], 2), forward(model, x[:2], 0)]
    torch.testing.assert_close(torch.cat(parts[::-1]), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), before), "something draws from torch's generator"
    assert (forward(model, x, 0, step=3) - whole).abs().max() > 1e-2
    expected = net().eval()(x)
    torch.testing.assert_close(model.eval()(x), expected)
    assert (whole - expected).abs().mean() > 0.3 * (unkeyed - expected).abs().mean()


def differences(rank: int, group: Any, shares_tokens: bool) -> tuple[float, float]:
    """Of outputs and of gradients of two ranks that share the layers from those of one process."""
    whole, model = net(), net()
    parallelize(model, group=group, plan=PLAN, sequence_parallel=shares_tokens, check=False)
    key_dropout(whole)
    key_dropout(model, group=group)
    outputs = [forward(each, rows()[1:4], 1) for each in (whole, model)]
    for each in outputs:
        each.square().sum().backward()
    sync_partial_grads(model, group=group)
    expected = dict(whole.named_parameters())
    worst = max(
        float((p.grad - expected[name].grad).abs().max())
        for name, p in model.named_parameters()
        if p.shape == expected[name].shape
    )
    return float((outputs[1] - outputs[0]).abs().max()), worst


@pytest.mark.parametrize("shares_tokens", [False, True], ids=["heads", "heads and tokens"])
def test_ranks_that_share_layers_of_torch_drop_what_one_process_does(world, shares_tokens):
    for outputs, gradients in world(2).run(differences, shares_tokens):
        assert outputs < 1e-11
        assert gradients < 1e-10


def test_about_p_of_the_rows_fall_and_the_others_are_scaled():
    model = nn.Sequential(TinyDropPath(P))
    assert key_dropout(model) == 1
    assert isinstance(model[0], KeyedDropPath)
    y = forward(model, torch.ones(2000, 2, 3), 0)
    kept = y[:, 0, 0] != 0
    assert torch.equal(y, kept[:, None, None] * torch.full_like(y, 1 / (1 - P)))
    assert P * 0.9 < (~kept).double().mean() < P * 1.1


def flash() -> nn.Module:
    model = make_model("llama", num_hidden_layers=1, attention_dropout=P)
    model.config._attn_implementation = "flash_attention_2"
    return model


REFUSED = {
    "channels": (lambda: nn.Sequential(nn.Dropout2d(P)), "0 (Dropout2d) drops with p 0.3", "use"),
    "alpha": (lambda: nn.Sequential(nn.AlphaDropout(P)), "AlphaDropout", "set p to 0"),
    "slopes": (lambda: nn.Sequential(nn.RReLU()), "RReLU", "LeakyReLU"),
    "layers": (
        lambda: make_model("bart", encoder_layerdrop=P), "model.encoder (BartEncoder) leaves",
        "set the layerdrop of the model's config to 0",
    ),
    "flash": (flash, "self_attn (LlamaAttention) drops with p 0.3", 'attn_implementation="sdpa"'),
    "rows second": (
        lambda: nn.Sequential(nn.MultiheadAttention(D, 2, dropout=P)), "[T, B, D]", "batch_first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_draws_in_a_way_of_its_own_is_refused(name: str):
    make, what, fix = REFUSED[name]
    model = nn.Sequential(nn.Linear(2, 2), make())
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="on each layout of the ranks") as caught:
        composed(model, optimizer=lambda params: SGD(params, lr=0.1))
    assert what in str(caught.value)
    assert fix in str(caught.value)
    assert kinds == [type(module) for module in model.modules()]
    assert before.keys() == model.state_dict().keys()


def test_what_drops_nothing_is_taken():
    for model in (
        nn.Sequential(nn.Dropout2d(0.0), nn.MultiheadAttention(D, 2), TinyDropPath(0.0)),
        make_model("bart", encoder_layerdrop=0.0, num_hidden_layers=1),
    ):
        key_dropout(model, group=ALONE)
