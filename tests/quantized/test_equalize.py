"""SmoothQuant and AWQ: scales that move between a norm and the layers that read it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.quantized import Int8, IntN, decode, encode
from pyops.quantized.calibration import awq, smooth
from pyops.quantized.calibration.activation_aware import awq_scale, rounding_error
from pyops.quantized.calibration.readers import readers_of_norms
from pyops.quantized.calibration.smoothing import smoothing_scale
from pyops.quantized.layers import chosen, matrix
from pyops.tensor_parallel import RMSNorm

pytestmark = pytest.mark.cpu_only

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
SHAPE = {
    "vocab_size": 31,
    "sequence_length": 16,
    "num_layers": 2,
    "num_heads": 4,
    "dim": 32,
    "hidden": 48,
}


def gpt(**changes: object) -> GPT:
    """In float64, with norms that are not 1, and one input that is far larger than the others."""
    model = GPT(GPTConfig(**{**SHAPE, **changes}), dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter))
            if "norm1.weight" in name:
                parameter[5] *= 50
    return model


def tokens() -> list[Tensor]:
    return list(torch.randint(31, (3, 2, 12), generator=torch.Generator().manual_seed(2)))


MODELS = ({}, LLAMA, {**LLAMA, "num_kv_heads": 2})


@pytest.mark.parametrize("changes", MODELS, ids=["gpt2", "llama", "grouped"])
def test_readers_of_each_norm(changes: dict):
    model = gpt(**changes)
    found = readers_of_norms(model, tokens()[0], chosen(model, None))
    names = {entry.name: sorted(entry.layers) for entry in found}
    first = ["attention.qkv"] if "num_kv_heads" not in changes else ["attention.kv", "attention.q"]
    assert names == {
        f"blocks.{i}.{norm}": [f"blocks.{i}.{layer}" for layer in layers]
        for i in range(2)
        for norm, layers in (("norm1", first), ("norm2", ["mlp.up"]))
    }


@pytest.mark.parametrize("method", ["smooth", "awq"])
@pytest.mark.parametrize("changes", MODELS, ids=["gpt2", "llama", "grouped"])
def test_the_model_computes_what_it_did(changes: dict, method: str):
    model = gpt(**changes)
    before, weights = model(tokens()[0]), copy.deepcopy(model.state_dict())
    done = smooth(model, tokens()) if method == "smooth" else awq(model, IntN(3), tokens())
    before_layers = 2 * (1 + bool(changes)) if method == "awq" else 0
    assert len(done) == 4 + before_layers
    torch.testing.assert_close(model(tokens()[0]), before, rtol=1e-12, atol=1e-12)
    moved = [name for name, w in model.state_dict().items() if not torch.equal(w, weights[name])]
    assert {"blocks.0.norm1.weight", "blocks.1.norm2.weight", "blocks.0.mlp.up.weight"} <= {*moved}
    below = [name for name in moved if "output" in name or "mlp.down" in name]
    assert len(below) == before_layers
    assert not any("head" in name for name in moved)


def test_norms_that_add_an_offset_to_their_weight():
    """As Gemma's: the weight is divided with its offset."""
    model = gpt(**LLAMA)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.offset = 1.0
            norm.weight.sub_(1.0)
    before = model(tokens()[0])
    assert len(norms) == 5
    assert len(smooth(model, tokens())) == 4
    torch.testing.assert_close(model(tokens()[0]), before, rtol=1e-12, atol=1e-12)


def test_what_smoothing_moves():
    """s = sqrt(max |X| / max |W|); afterwards both have the same far ends."""
    model = gpt(**LLAMA, num_kv_heads=2)
    attention = model.blocks[0].attention
    x = torch.cat([model.blocks[0].norm1(model.embedding(t)).flatten(0, 1) for t in tokens()])
    w = torch.cat([attention.q.weight, attention.kv.weight])
    scales = smooth(model, tokens(), only=["blocks.0.*"])
    expected = (x.abs().amax(0) / w.abs().amax(0)).sqrt()
    torch.testing.assert_close(scales["blocks.0.norm1"].double(), expected, rtol=1e-6, atol=0)
    assert expected.max() > 4 * expected.median()
    x = torch.cat([model.blocks[0].norm1(model.embedding(t)).flatten(0, 1) for t in tokens()])
    w = torch.cat([attention.q.weight, attention.kv.weight])
    torch.testing.assert_close(x.abs().amax(0), w.abs().amax(0), rtol=1e-6, atol=0)


def test_how_much_moves():
    """max |X|^alpha / max |W|^(1 - alpha); 1 where either is 0."""
    inputs, weights = torch.tensor([16.0, 16.0, 0.0]), torch.tensor([81.0, 0.0, 1.0])
    assert smoothing_scale(inputs, weights, 0.25).tolist() == pytest.approx([2 / 27, 1.0, 1.0])
    assert smoothing_scale(inputs, weights, 1.0).tolist() == [16.0, 1.0, 1.0]


def test_a_norm_that_something_else_reads_stays():
    """A residual branch from the norm's result, as in BERT: dividing it would change the sum."""

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.last_norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y = self.last_norm(y + self.one(y))
            return self.two(y.view(-1, 8))

    model = Post().eval()
    x = torch.randn(2, 3, 8)
    found = readers_of_norms(model, x, chosen(model, None))
    assert {entry.name: list(entry.layers) for entry in found} == {"last_norm": ["two"]}
    assert list(smooth(model, [x])) == ["last_norm"]
    # The readers of a norm go together: without one of them nothing is folded
    grouped = gpt(**LLAMA, num_kv_heads=2)
    assert list(smooth(grouped, tokens(), only=["blocks.0.mlp.*"])) == ["blocks.0.norm2"]
    assert smooth(grouped, tokens(), only=["blocks.0.attention.q"]) == {}


def test_a_weight_that_two_layers_share_stays():
    pairs = (nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model = nn.Sequential(*pairs, nn.Linear(8, 3)).eval()
    model[3].weight = model[1].weight
    assert smooth(model, [torch.randn(4, 8)]) == {}


def test_awq_finds_the_exponent_of_least_error():
    """By the error of the outputs themselves, for every r."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 24)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.rand(32) ** 3 * 4)
    batches = [torch.randn(50, 32, dtype=torch.float64) for _ in range(3)]
    x, weight = model[0](torch.cat(batches)).detach(), model[1].weight.detach().clone()
    errors = []
    for i in range(20):
        s = awq_scale(x.abs().mean(0), i / 20).float().double()
        back = decode(encode((weight.float() * s.float()), IntN(3))).double()
        errors.append(float(((x / s) @ back.t() - x @ weight.t()).square().sum()))
        found = rounding_error(weight, s.float(), x.t() @ x, IntN(3))
        assert found == pytest.approx(errors[-1], rel=1e-6)
    best = awq(model, IntN(3), batches)
    assert best == {"0": errors.index(min(errors)) / 20}
    assert min(errors) < 0.9 * errors[0]
    assert float(
        awq_scale(x.abs().mean(0), 0.5).max() * awq_scale(x.abs().mean(0), 0.5).min()
    ) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.5}, r"alpha is 1.5; it is 0 to 1"),
        ({"batches": []}, r"smooth wants examples"),
        ({"weight": torch.nan}, r"the inputs or weights of blocks.1.mlp.up are not all finite"),
    ],
)
def test_what_is_refused(change: dict, message: str):
    model = gpt()
    with torch.no_grad():
        matrix(model.blocks[1].mlp.up)[0, 0] = change.pop("weight", 0.1)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        smooth(model, change.pop("batches", tokens()), **change)
    for name, w in model.state_dict().items():
        assert torch.equal(w.nan_to_num(7.0), before[name].nan_to_num(7.0))
    with pytest.raises(ValueError, match="training mode"):
        awq(gpt().train(), Int8(), tokens())
