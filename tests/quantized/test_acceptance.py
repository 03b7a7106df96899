"""What few bits cost, and what training and calibration win back, of small trained models; whole
tables under -m full."""

from __future__ import annotations

import pytest

from benchmarks.compress.quantized_models import (
    EXAMPLE,
    GROUP_64,
    OUTLIERS,
    SMALL,
    Digits,
    Text,
    accuracy,
    digits_mlp,
    example_gpt,
    rounded_accuracy,
    text_losses,
    trained_aware,
)
from pyops.quantized import IntN
from tests.grids import full
from tests.optional_packages import skip_module_without

skip_module_without("sklearn")
pytestmark = pytest.mark.cpu_only


OF_INT8 = 0.01  # nats a byte that 8 bits may cost at most


def check_digits(seeds: int, *, epochs: int) -> None:
    """The mean over seeds, in percent."""
    digits = Digits.load()
    models = [digits_mlp(digits, seed=seed, epochs=epochs) for seed in range(seeds)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    exact = mean([accuracy(model, digits) for model in models])
    nearest = {
        bits: mean([rounded_accuracy(model, digits, bits) for model in models])
        for bits in (8, 4, 3, 2)
    }
    aware = {
        bits: mean([trained_aware(model, digits, bits, seed=s) for s, model in enumerate(models)])
        for bits in ((4, 3, 2) if seeds > 1 else (2,))
    }
    assert exact > 96
    assert abs(nearest[8] - exact) <= 0.2
    assert abs(nearest[4] - exact) <= 0.3 + (seeds == 1)
    assert nearest[2] < exact - 2
    assert aware[2] >= min(97.0, exact - 0.5)
    if seeds > 1:
        assert aware[3] >= exact - 0.2
        assert aware[4] >= exact - 0.3


@pytest.mark.full
@pytest.mark.parametrize("seeds", [1, full(5)])
def test_digits(seeds: int):
    check_digits(seeds, epochs=40 if seeds > 1 else 15)


@pytest.mark.full
def test_text():
    """Of two bits, which cost enough of so small a model for methods to be told apart."""
    text = Text.load(64, rows=1000, held_out=64)
    model = example_gpt(SMALL, text, steps=400, batch=16)
    found, _ = text_losses(model, text, IntN(2, group=64), examples=16)
    check_text(found)


@pytest.mark.full
def test_text_of_the_example():
    """AWQ, and 50 times an input in 8 bits, are told by the bench: this model bears both, and 200
    times an input it does not."""
    text = Text.load(256, rows=8000, held_out=128)
    model = example_gpt(EXAMPLE, text, steps=700, batch=8)
    found, _ = text_losses(model, text, GROUP_64, examples=64)
    check_methods(found)
    lost = found["nearest"] - found["float"]
    assert found["awq, gptq"] - found["float"] <= 0.6 * lost


def check_text(found: dict[str, float]) -> None:
    check_methods(found)
    assert found["outlier of 50"] - found["float"] > OF_INT8, "an outlier that int8 bears"


def check_methods(found: dict[str, float]) -> None:
    exact = found["float"]
    lost = found["nearest"] - exact
    assert found["int8"] - exact <= OF_INT8
    assert lost > 0
    assert found["gptq"] - exact <= 0.6 * lost
    assert found["outlier of 200"] - exact > OF_INT8, "an outlier that int8 bears"
    for times in OUTLIERS:
        assert found[f"outlier of {times}, smooth"] - exact <= OF_INT8
