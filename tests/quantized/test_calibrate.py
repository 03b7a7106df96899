"""Scales of inputs from examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.quantized import Int8
from pyops.quantized.calibration import Calibration, Histogram, calibrate

pytestmark = pytest.mark.cpu_only

STATIC, UNEVEN = Int8(per="tensor"), Int8(per="tensor", symmetric=False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def examples() -> list[Tensor]:
    return list(torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1)))


def test_ranges_by_hand():
    model, batches = network(), examples()
    inputs = torch.cat(batches)
    hidden = model[:2](inputs)
    found = calibrate(model, batches)
    assert list(found) == ["0", "2"]
    assert float(found["0"].highest) == -float(found["0"].lowest) == float(inputs.abs().max())
    assert float(found["2"].highest) == pytest.approx(float(hidden.detach().max()), rel=1e-6)
    assert float(found["0"].scale(STATIC)[0]) == float(inputs.abs().max() / 127)
    uneven = calibrate(model, batches, format=UNEVEN)
    assert float(uneven["2"].highest) == pytest.approx(float(hidden.detach().max()), rel=1e-6)
    assert float(uneven["2"].lowest) == 0.0
    assert [float(end) for end in uneven["0"]] == [float(inputs.min()), float(inputs.max())]


def test_each_method():
    model, batches = network(), examples()
    batches[2][3, 2] = 40.0
    inputs = torch.cat(batches)
    most = {
        method: float(
            calibrate(model, batches, only=["0"], how=Calibration(method=method, momentum=0.25))[
                "0"
            ].highest
        )
        for method in ("minmax", "mean", "percentile", "squared", "entropy")
    }
    assert most["minmax"] == 40.0
    low, high = batches[0].min(), batches[0].max()
    for batch in batches[1:]:
        low, high = low + 0.25 * (batch.min() - low), high + 0.25 * (batch.max() - high)
    assert most["mean"] == pytest.approx(float(torch.maximum(high, -low)), rel=1e-6)
    exact = float(inputs.abs().flatten().quantile(0.999, interpolation="higher"))
    assert most["percentile"] == pytest.approx(exact, rel=2**-7)
    counted = Histogram()
    counted.update(inputs)
    assert most["squared"] == pytest.approx(40.0 * counted.clip_of_least_error(STATIC))
    assert most["entropy"] == pytest.approx(40.0 * counted.clip_of_least_divergence(128))


def test_an_input_of_zeros_is_kept_and_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    with pytest.warns(UserWarning, match="the input of 2 was 0 in all examples"):
        found = calibrate(model, [torch.rand(2, 3)])
    assert float(found["2"].scale(STATIC)[0]) == 0.0
    assert float(found["0"].scale(STATIC)[0]) > 0


def test_layers_that_share_their_input_have_one_scale():
    """Grouped queries: one call for two layers, which no hook of theirs sees."""
    model = GPT(
        GPTConfig(
            vocab_size=31, sequence_length=8, num_layers=1, num_heads=2, num_kv_heads=1, dim=16
        )
    ).eval()
    tokens = torch.randint(31, (2, 8))
    found = calibrate(model, [tokens, {"tokens_BT": tokens}])
    assert {name.removeprefix("blocks.0.") for name in found} == {
        "attention.q",
        "attention.kv",
        "attention.output",
        "mlp.up",
        "mlp.down",
    }
    assert found["blocks.0.attention.q"] == found["blocks.0.attention.kv"]
    given = model.blocks[0].norm1(model.embedding(tokens)).detach()
    assert float(found["blocks.0.attention.q"].highest) == float(given.abs().max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, r"calibrate wants examples; give batches="),
        ({"format": Int8(per="token")}, r'per="token" finds its scales when the tokens come'),
        ({"only": ["3*"]}, r"only: '3\*' matches none of 2 linear layers, such as 0, 2"),
        ({"train": True}, r"the model is in training mode.*call model.eval\(\) first"),
        (
            {"nan": True},
            r"calibrate: the input of 0: x of shape \[16, 6\] has a number that is not",
        ),
    ],
)
def test_what_is_refused(change: dict, message: str):
    model, batches = network(), examples()
    model.train(change.pop("train", False))
    if change.pop("nan", False):
        batches[1][0, 0] = torch.nan
    with pytest.raises(ValueError, match=message):
        calibrate(model, change.pop("batches", batches), **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "max"}, "method is 'max'; choose one of minmax, mean"),
        ({"percentile": 101.0}, "percentile is 101.0"),
        ({"momentum": 0.0}, "momentum is 0.0"),
    ],
)
def test_options_without_sense(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Calibration(**fields)
