"""convert with examples, and of a model that was trained with few bits in mind: the layers of codes
that come of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.quantized import (
    Calibration,
    Int4,
    Int8,
    IntN,
    QuantizedLinear,
    Scheme,
    aware,
    awq,
    calibrate,
    convert,
    gptq,
    smooth,
)

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    vocab_size=31,
    sequence_length=12,
    num_layers=2,
    num_heads=4,
    dim=32,
    hidden=64,
    num_kv_heads=2,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
TOKEN = Scheme(IntN(4), Int8(per="token"))
STATIC = Scheme(Int8(), Int8(per="tensor"))


def tokens() -> list[Tensor]:
    return list(torch.randint(31, (4, 2, 12), generator=torch.Generator().manual_seed(2)))


def model() -> GPT:
    return GPT(CONFIG).eval()


def codes_of(made: nn.Module) -> dict[str, Tensor]:
    return {
        n: m.as_codes().codes for n, m in made.named_modules() if isinstance(m, QuantizedLinear)
    }


def test_each_method_is_the_function_of_its_name_and_then_to_nearest():
    for method, change in (
        ("smooth", lambda made: smooth(made, tokens())),
        ("awq", lambda made: awq(made, Int4(group=16), tokens())),
    ):
        made, other = model(), model()
        convert(made, Scheme(Int4(group=16)), method=method, batches=tokens())
        change(other)
        convert(other, Scheme(Int4(group=16)))
        own, expected = codes_of(made), codes_of(other)
        assert len(own) == len(expected) == 10
        assert all(torch.equal(own[name], expected[name]) for name in own)
        assert torch.equal(made(tokens()[0]), other(tokens()[0]))


def test_gptq_and_what_the_report_says_of_it():
    made, other, nearest = model(), model(), model()
    report = convert(made, Scheme(Int4(group=16)), method="gptq", batches=tokens())
    expected = gptq(other, Int4(group=16), tokens())
    own = codes_of(made)
    assert all(torch.equal(own[name], codes.codes) for name, codes in expected.items())
    torch.testing.assert_close(made(tokens()[0]), other(tokens()[0]))
    plain = convert(nearest, Scheme(Int4(group=16)))
    for rounded, to_nearest in zip(report.layers, plain.layers, strict=True):
        assert rounded.name == to_nearest.name
        assert to_nearest.error < rounded.error < 3 * to_nearest.error


def test_static_inputs():
    made, how = model(), Calibration("percentile", percentile=99.0)
    ranges = calibrate(made, tokens(), how=how)
    exact = made(tokens()[0])
    convert(made, STATIC, batches=tokens(), calibration=how)
    for name, found in ranges.items():
        assert torch.equal(made.get_submodule(name).input_range, torch.stack(list(found)))
    error = (made(tokens()[0]) - exact).abs().max()
    assert 0 < error < 0.2 * exact.abs().max()


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (TOKEN, {}),
        (STATIC, {"steps": 3}),
        (STATIC, {"learn_steps": True}),
        (Scheme(IntN(3)), {"learn_steps": True}),
    ],
    ids=["token", "static", "static, learned", "weights, learned"],
)
def test_training_and_what_is_converted_compute_the_same(scheme: Scheme, options: dict):
    """Codes bitwise, logits to the rounding of sums in another order."""
    made = GPT(CONFIG)
    with aware(made, scheme, **options) as training:
        optimizer = torch.optim.SGD([*made.parameters(), *training.parameters()], lr=0.1)
        for batch in tokens()[:3]:
            optimizer.zero_grad()
            made.loss(batch, batch).backward()
            optimizer.step()
        made.eval()
        y, codes = made(tokens()[3]), training.codes()
        report = training.convert()
    own = codes_of(made)
    assert len(report.layers) == 10
    assert all(torch.equal(own[name], found.codes) for name, found in codes.items())
    torch.testing.assert_close(
        made(tokens()[3]), y, rtol=1e-6, atol=1e-6 * float(y.detach().abs().max())
    )
    with pytest.raises(ValueError, match="converted"):
        aware(made, scheme, only=["blocks.0.mlp.up"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, r"method is 'best'; choose one of nearest, smooth, awq, gptq"),
        ({"method": "awq"}, r"convert wants examples; give batches="),
        ({"scheme": STATIC}, r"want batches to find it with"),
        ({"method": "gptq", "batches": [], "scheme": Scheme(Int4(group=16))}, r"wants examples"),
    ],
)
def test_what_is_refused(options: dict, message: str):
    made = model()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ValueError, match=message):
        convert(made, options.pop("scheme", Scheme()), **options)
    assert all(torch.equal(w, before[name]) for name, w in made.state_dict().items())
