"""The bench of the longest sequence: its search, its limit, and that its settings are one model."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.parallel.context import bench_longest
from benchmarks.parallel.context.bench_longest import CLOSE, SETTINGS, UNIT, longest, probe, step
from tests.square_tensors import SquareTensors

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("start", [64, 1000, 17000, 50_000])
@pytest.mark.parametrize("most", [128, 200, 5000, 16500])
def test_the_longest_is_found(most: int, start: int):
    asked: list[int] = []

    def fits(length: int) -> dict[str, float] | None:
        assert length % UNIT == 0
        assert length not in asked
        asked.append(length)
        return {"length": length} if length <= most else None

    low, high, figures = longest(fits, start)
    assert low <= most < high
    assert high - low <= max(UNIT, CLOSE * low)
    assert figures == {"length": low}
    assert len(asked) <= 16
    again: list[int] = []
    longest(lambda length: again.append(length) or fits_now(length, most), low)
    assert len(again) == 2 or high - low > UNIT


def fits_now(length: int, most: int) -> dict[str, float] | None:
    return {} if length <= most else None


def test_nothing_fits():
    with pytest.raises(AssertionError, match="not even 128 tokens"):
        longest(lambda length: None, 1000)


def test_the_settings_differ_in_attention_alone(monkeypatch: pytest.MonkeyPatch):
    """Without dropout and over two blocks of tokens, of which a pattern sees all, losses are equal;
    only explicit scores make a tensor of queries x keys."""
    monkeypatch.setattr(bench_longest, "P", 0.0)
    found, square = {}, {}
    for setting in SETTINGS:
        take = step(setting, 128, 1, vocab_size=50, dim=24, num_heads=2)
        with SquareTensors(128) as seen:
            take(128)
        found[setting], square[setting] = take(128), bool(seen.found)
    assert found["explicit scores"] == pytest.approx(found["fused, recomputed"], abs=1e-5)
    assert len({round(loss, 4) for loss in found.values()}) == 1
    assert {name for name, made in square.items() if made} == {
        name for name in SETTINGS if "explicit" in name
    }


@pytest.mark.parametrize(
    ("stderr", "fits"),
    [
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate", False),
        ("terminate called after throwing an instance of 'std::bad_alloc'", False),
        ("KeyError: 'another'", None),
    ],
)
def test_a_step_that_does_not_fit_is_no_failure(
    stderr: str, fits: bool | None, monkeypatch: pytest.MonkeyPatch
):
    """And one that ends otherwise is."""
    done = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    if fits is None:
        with pytest.raises(AssertionError, match="explicit scores, 128 tokens ended with"):
            probe("explicit scores", 128, limit=700, layers=1)
    else:
        assert probe("explicit scores", 128, limit=700, layers=1) is None
    done = subprocess.CompletedProcess([], 0, '{"seconds": 1, "loss": 5.0, "peak_bytes": 3}\n', "")
    assert probe("explicit scores", 128, limit=700, layers=1) == {
        "seconds": 1,
        "loss": 5.0,
        "peak_bytes": 3,
    }
    done.stdout = '{"seconds": 1, "loss": NaN, "peak_bytes": 3}'
    with pytest.raises(AssertionError, match="a step over 128 tokens has"):
        probe("explicit scores", 128, limit=700, layers=1)
