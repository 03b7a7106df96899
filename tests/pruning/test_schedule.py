"""The cubic schedule and the rates of a lottery, by hand."""

from __future__ import annotations

import pytest

from pyops.pruning import CubicSchedule, LotteryConfig, rate_of

pytestmark = pytest.mark.cpu_only


def test_the_cubic_schedule_by_hand():
    schedule = CubicSchedule(final=0.8, begin=100, every=10, times=4, initial=0.2)
    assert [schedule.at(t) for t in (0, 99, 100, 109)] == [0.2] * 4
    assert schedule.at(110) == pytest.approx(0.8 - 0.6 * 0.75**3)
    assert schedule.at(119) == schedule.at(110), "the mask in force"
    assert schedule.at(120) == pytest.approx(0.8 - 0.6 / 8)
    assert [schedule.at(t) for t in (140, 141, 10_000)] == [0.8] * 3
    assert [t for t in range(300) if schedule.due(t)] == [100, 110, 120, 130, 140]
    gains = [schedule.at(t + 10) - schedule.at(t) for t in (100, 110, 120, 130)]
    assert gains == sorted(gains, reverse=True), "steep at first"


def test_schedules_that_make_no_sense():
    for options, words in (
        ({"final": 1.1}, "final is 1.1; give shares from 0 to 1"),
        ({"final": "half"}, "final is 'half'; give shares"),
        ({"begin": 0.5}, "begin is 0.5; give a whole number, 0 or more"),
        ({"total_steps": 0}, "total_steps is 0; give a whole number, 1 or more"),
        ({"initial": 0.95}, "initial is 0.95 and final 0.9"),
        ({"begin": -1}, "begin is -1; give a whole number, 0 or more"),
        ({"every": 0}, "every is 0; give a whole number, 1 or more"),
        ({"times": 1.5}, "times is 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            CubicSchedule(**{"final": 0.9, "begin": 0, "every": 10, "times": 5, **options})
    with pytest.warns(UserWarning, match=r"ends after step 50, .* after 40: .* give times=4"):
        CubicSchedule(0.9, 0, 10, 5, total_steps=40)


def test_rates_of_a_lottery():
    assert rate_of(0.875, 3) == pytest.approx(0.5)
    config = LotteryConfig(rounds=8, rate=0.4)
    assert config.sparsity(8) == pytest.approx(1 - 0.6**8)
    assert LotteryConfig(3, rate_of(0.9, 3)).sparsity(3) == pytest.approx(0.9)
    for options, words in (
        ({"rounds": 0}, "rounds is 0; give a whole number, 1 or more"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"rate": 1.0}, "rate is 1.0; give a share between 0 and 1"),
        ({"rate": "0.2"}, "rate is '0.2'"),
        ({"rewind": -1}, "rewind is -1"),
        ({"scope": "x"}, "scope is 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            LotteryConfig(**{"rounds": 2, **options})
    with pytest.raises(ValueError, match=r"sparsity is 1.0"):
        rate_of(1.0, 3)
