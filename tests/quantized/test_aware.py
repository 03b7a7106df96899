"""Training with quantization in mind: what layers compute with, what is learned, what is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.quantized import FP8, Int4, Int8, IntN, Scheme, decode, encode
from pyops.quantized.formats import extremes, scales_of, to_codes
from pyops.quantized.training import aware
from pyops.tensor_parallel import clip_grad_norm_

pytestmark = pytest.mark.cpu_only

TOKENS = Scheme(IntN(3), Int8(per="token"))


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)).to(dtype)


def rounded(model: nn.Module, x: Tensor, scheme: Scheme) -> Tensor:
    """What the network computes with codes of weights and inputs, by `encode` and `decode`."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            if scheme.activations is not None:
                x = decode(encode(x, scheme.activations))
            weight = decode(encode(layer._parameters["weight"], scheme.weights))
            x = functional.linear(x, weight, layer.bias)
        else:
            x = layer(x)
    return x


@pytest.mark.parametrize(
    "scheme",
    [
        TOKENS,
        Scheme(Int4(group=4)),
        Scheme(IntN(4, symmetric=False), Int8(per="token")),
        Scheme(Int8(), Int8(per="token", symmetric=False)),
    ],
    ids=str,
)
def test_what_codes_would_give(scheme: Scheme):
    """Bitwise the numbers of the codes, which are those that are asked for afterwards."""
    model, x = network(), torch.randn(5, 8)
    before, names = model(x), [*model.state_dict()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with aware(model, scheme) as training:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        y = model(x)
        assert torch.equal(y, rounded(model, x, scheme))
        assert [*model.state_dict()] == names
        assert {id(p) for p in model.parameters()} == {
            id(p) for group in optimizer.param_groups for p in group["params"]
        }
        used = {name: model.get_submodule(name).weight.detach().clone() for name in ("0", "2")}
    codes = training.codes()
    for name, numbers in used.items():
        assert torch.equal(decode(codes[name]), numbers)
        assert not torch.equal(numbers, model.get_submodule(name).weight)
    assert type(model[0]) is nn.Linear
    assert not torch.equal(model(x), before)
    assert training.input_ranges() == {}
    assert list(training.parameters()) == []


def test_gradients_go_straight_through():
    """The weight's gradient is that of the rounded weight, but 0 where a code is clipped: nowhere,
    where scales are those of the largest."""
    model, x = network(), torch.randn(5, 8)
    with aware(model, TOKENS, only=["0"]):
        model[0](x).square().sum().backward()
    inputs = decode(encode(x, Int8(per="token")))
    weight = decode(encode(model[0].weight, IntN(3))).requires_grad_()
    functional.linear(inputs, weight, model[0].bias).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, weight.grad)
    assert weight.grad.abs().min() > 0


def test_static_ranges_move_and_then_stay():
    """Momentum 0.01 from the first batch on, for the first half of ten steps."""
    model, scheme = network(), Scheme(Int8(), Int8(per="tensor"))
    batches = list(torch.randn(10, 6, 8) * torch.arange(1.0, 11)[:, None, None])
    with aware(model, scheme, steps=10, freeze_after=0.5) as training:
        with pytest.raises(ValueError, match="no range before the model has run in training"):
            training.input_ranges()
        for i, x in enumerate(batches):
            assert training.frozen == (i >= 5)
            if i == 2:  # what is seen in evaluation moves nothing
                seen = training.input_ranges()
                model.eval()
                model(100 * x)
                assert training.input_ranges() == seen
                model.train()
            model(x).sum().backward()
            if i == 4:
                kept = training.input_ranges()
        model.eval()
        y = model(batches[9])
        ranges = training.input_ranges()
    highest = batches[0].abs().max()
    for x in batches[1:5]:
        highest = highest + 0.01 * (x.abs().max() - highest)
    assert float(ranges["0"].highest) == pytest.approx(float(highest), rel=1e-5)
    assert ranges == kept
    x = batches[9]
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        x = decode(to_codes(x, *ranges[name].scale(scheme.activations), scheme.activations))
        x = functional.linear(x, decode(training.codes()[name]), layer.bias)
        x = x.relu() if name == "0" else x
    assert torch.equal(x, y)


def test_learned_steps():
    """They begin at 2 mean |w| / sqrt(hi), have LSQ's gradient, and codes are by what was
    learned."""
    model, x = network(), torch.randn(5, 8)
    scheme = Scheme(IntN(3, group=4), Int8(per="tensor"))
    with aware(model, scheme, learn_steps=True) as training:
        steps = list(training.parameters())
        assert [tuple(s.shape) for s in steps] == [(12, 2), (4, 3), (), ()]
        first = 2 * model._modules["0"]._parameters["weight"].view(12, 2, 4).abs().mean(-1)
        torch.testing.assert_close(steps[0], first / math.sqrt(3))
        optimizer = torch.optim.SGD([*model.parameters(), *steps], lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert all(s.grad.abs().max() > 0 for s in steps)
            optimizer.step()
        y, used = model(x), model[0].weight.detach()
        assert not torch.equal(steps[0].detach(), first / math.sqrt(3))
        ranges = training.input_ranges()
        codes = training.codes()
    assert torch.equal(decode(codes["0"]), used)
    assert torch.equal(codes["0"].scales, steps[0].abs())
    inner = functional.linear(
        decode(to_codes(x, *ranges["0"].scale(scheme.activations), scheme.activations)),
        used,
        model[0].bias,
    ).relu()
    inner = decode(to_codes(inner, *ranges["2"].scale(scheme.activations), scheme.activations))
    assert torch.equal(functional.linear(inner, decode(codes["2"]), model[2].bias), y)


def test_of_models_of_pyops_and_in_float64():
    """Grouped queries, a gated MLP; the head stays; float64 is rounded as fp32."""
    model = GPT(
        GPTConfig(
            vocab_size=31,
            sequence_length=8,
            num_layers=1,
            num_heads=2,
            dim=16,
            num_kv_heads=1,
            activation="swiglu",
            norm="rmsnorm",
            bias=False,
        )
    )
    tokens = torch.randint(31, (2, 8))
    with torch.no_grad():
        exact = model(tokens)
    with aware(model, Scheme(IntN(4), Int8(per="token"))) as training:
        loss = model.loss(tokens, tokens)
        loss.backward()
        assert set(training.layers) == {
            f"blocks.0.{n}"
            for n in ("attention.q", "attention.kv", "attention.output", "mlp.up", "mlp.down")
        }
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        assert clip_grad_norm_(model, 1.0, group=ALONE) > 0  # asks layers for their parameters
        with torch.no_grad():
            y = model(tokens)
        codes = training.codes()
    assert 0 < (y - exact).abs().max() < 0.5 * exact.abs().max()
    for name, found in codes.items():  # the same model, with weights that codes give back
        with torch.no_grad():
            weight = model.get_submodule(name).weight
            weight.copy_(decode(found).view(weight.shape))
    with aware(model, Scheme(Int8(), Int8(per="token"))):
        again = model(tokens)
    torch.testing.assert_close(again, y, rtol=0, atol=0.02 * float(exact.abs().max()))
    wide = network(torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    with aware(wide, Scheme(IntN(3))) as training:
        y = wide[0](x)
    expected = decode(encode(wide[0].weight, IntN(3))).double()
    torch.testing.assert_close(y, functional.linear(x, expected, wide[0].bias))


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (Scheme(FP8(), FP8(per="token")), {}, r"aware rounds to whole numbers; got FP8"),
        (Scheme(Int8(), Int8(per="tensor")), {}, r"aware: steps is None; inputs of per=.tensor."),
        (Scheme(Int8(symmetric=False)), {"learn_steps": True}, r"learned steps are of symmetric"),
        (Scheme(Int4(group=6)), {}, r"0 has 8 inputs on a rank, which groups of 6.*: 2, 4, 8"),
        (Scheme(), {"only": ["x"]}, r"only: 'x' matches none of 2 linear layers"),
        ("int8", {}, r"scheme is 'int8'; give a Scheme"),
        (Scheme(), {"steps": 1.5}, r"steps is 1\.5; give a whole number"),
        (Scheme(), {"freeze_after": "x"}, r"freeze_after is 'x'"),
        (Scheme(), {"freeze_after": 1.5}, r"freeze_after is 1\.5; it is a part of all steps"),
    ],
)
def test_what_is_refused(scheme: Scheme, options: dict, message: str):
    model = network()
    with pytest.raises((ValueError, TypeError), match=message):
        aware(model, scheme, **options)
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert not model[0]._forward_pre_hooks


def test_weights_that_are_not_finite_are_refused():
    """Before training, and before what became of it is converted."""
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="aware: the weight of 2 has a number that is not finite"):
        aware(model, Scheme())
    model = network()
    with aware(model, Scheme()) as training:
        model[2]._parameters["weight"].data[0, 0] = math.inf
        with pytest.raises(ValueError, match="the weight of 2 is no longer finite"):
            training.convert()
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_twice_and_shared_weights_are_refused():
    model = network()
    with aware(model, Scheme()), pytest.raises(ValueError, match="0 is rounded already"):
        aware(model, Scheme())
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    with pytest.raises(ValueError, match=r"the weight of 0 is used by 1\.weight, too"):
        aware(shared, Scheme(), only=["0"])
    shared.append(nn.Linear(4, 4))
    with aware(shared, Scheme()) as training:
        assert [*training.layers] == ["2"]


def test_an_error_within_leaves_the_model_as_it_was():
    model, x = network(), torch.randn(2, 8)
    before = model(x)
    with pytest.raises(KeyError), aware(model, TOKENS):
        raise KeyError("x")
    assert torch.equal(model(x), before)
    assert scales_of(*extremes(x, Int8()), Int8())[1] is None
