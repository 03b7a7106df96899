"""Laws of scaling and failures, against literals."""

from __future__ import annotations

import math

import pytest

from pyops.plan import (
    Failures,
    PlanError,
    SyncSGD,
    amdahl,
    compute_optimal,
    gustafson,
    spares,
    training_days,
)

pytestmark = pytest.mark.cpu_only

HOUR = 3600.0


def test_amdahl_and_gustafson():
    assert [round(amdahl(n, parallel=0.99)) for n in (1, 64, 512)] == [1, 39, 84]
    assert amdahl(10**9, parallel=0.99) == pytest.approx(100, rel=1e-6)
    assert [round(gustafson(n, parallel=0.99)) for n in (1, 64, 512)] == [1, 63, 507]
    assert amdahl(7, parallel=1.0) == pytest.approx(gustafson(7, parallel=1.0))
    assert amdahl(7, parallel=0.0) == gustafson(7, parallel=0.0) == 1.0


def test_synchronous_sgd():
    """38 ms of sums, 812 ms of work, 32 replicas: 38 ms < 31 x 812 ms = 25.2 s; 95.5 %."""
    law = SyncSGD(compute=0.812, sync=0.038, replicas=32)
    assert law.pays
    assert law.limit == pytest.approx(25.17, abs=0.01)
    assert round(100 * law.efficiency, 1) == 95.5
    assert law.speedup == pytest.approx(32 * 0.812 / 0.850)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_break_even_at_equality(replicas: int):
    """An epoch takes (N/b) T_comp alone and (N/(R b)) (T_comp + T_sync) together."""
    equal = SyncSGD(compute=0.5, sync=(replicas - 1) * 0.5, replicas=replicas)
    assert not equal.pays
    assert equal.speedup == pytest.approx(1.0)
    less = SyncSGD(compute=0.5, sync=0.99 * equal.sync, replicas=replicas)
    assert less.pays
    assert less.speedup > 1.0


def test_one_replica_has_nobody_to_wait_for():
    assert SyncSGD(compute=1.0, sync=0.0, replicas=1).speedup == 1.0


def test_the_model_that_makes_most_of_the_operations():
    """Hoffmann et al.: Chinchilla has 70 billion parameters and 1.4 trillion tokens."""
    parameters, tokens = compute_optimal(6 * 70e9 * 1.4e12)
    assert (parameters, tokens) == pytest.approx((70e9, 1.4e12))
    longer, more = compute_optimal(1e21, tokens_per_parameter=200)
    assert 6 * longer * more == pytest.approx(1e21)
    assert more / longer == pytest.approx(200)


def test_days_grow_with_work_and_fall_with_devices():
    days = training_days(1e9, 1e11, devices=8, operations=1e14)
    assert days == pytest.approx(6e20 / 8e14 / 86400)
    assert training_days(1e9, 1e11, devices=16, operations=1e14) == pytest.approx(days / 2)
    assert training_days(1e9, 1e11, devices=8, operations=1e14, recompute=True) == pytest.approx(
        4 / 3 * days
    )


# Devices, hours between failures of the run, seconds of a save and a restart: hours between saves,
# percent lost; at four times the interval; with a save in the background.
TABLE = [
    (8, 6250, 30, 120, 10.2, 0.2, 0.3, 0.1),
    (1024, 48.8, 60, 600, 76 / 60, 3.0, 5.9, 1.2),
    (992, 16, 300, 1800, 98 / 60, 13.3, 24.8, 6.4),
    (16384, 3.1, 60, 600, 19 / 60, 15.8, 27.4, 8.7),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: str(row[0]))
def test_what_saves_and_failures_take(row):
    devices, between, save, restart, interval, lost, seldom, background = row
    run = Failures(devices, devices * between, save, restart)
    assert run.between == pytest.approx(between * HOUR)
    assert run.interval / HOUR == pytest.approx(interval, rel=0.02)
    assert 100 * run.lost() == pytest.approx(lost, abs=0.11)
    assert 100 * run.lost(4 * run.interval) == pytest.approx(seldom, abs=0.11)
    quick = Failures(devices, devices * between, save / 10, restart)
    assert 100 * quick.lost() == pytest.approx(background, abs=0.11)


def test_the_interval_loses_least():
    run = Failures(1024, 50000)
    least = run.lost()
    assert all(run.lost(factor * run.interval) > least for factor in (0.5, 0.9, 1.1, 2.0))
    assert run.parts()["saves"] == pytest.approx(run.parts()["lost work"])
    assert run.exact_interval == pytest.approx(60 + math.sqrt(2 * (run.between + 600) * 60 + 3600))


def test_failures_of_a_run_are_published_ones():
    """Llama 3: 419 interruptions of 16,384 devices in 54 days are one in 50,700 device hours."""
    run = Failures(16384, 54 * 24 * 16384 / 419)
    assert run.device_hours == pytest.approx(50700, rel=2e-3)
    assert run.expected(54 * 24 * HOUR) == pytest.approx(419)


def test_spares():
    run = Failures(992, 15900)  # a failure in 16 hours
    assert spares(run, repair_hours=0.0) == 0
    few, more = (spares(run, repair_hours=hours) for hours in (24, 72))
    assert 1 <= few < more
    mean = run.expected(72 * HOUR)
    covered = sum(mean**k / math.factorial(k) for k in range(more + 1)) * math.exp(-mean)
    assert covered >= 0.99 > covered - mean**more / math.factorial(more) * math.exp(-mean)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amdahl(0, parallel=0.5), "ranks is 0; give a whole number, 1 or more"),
        (lambda: amdahl(2, parallel=1.5), r"parallel is 1.5; give the part of the time, from 0"),
        (lambda: gustafson(2, parallel=-1), "parallel is -1; give the part of the time"),
        (lambda: SyncSGD(0.0, 1.0, 2), r"compute is 0.0; give a number, above 0"),
        (lambda: SyncSGD(1.0, -1.0, 2), r"sync is -1.0; give a number, 0 or more"),
        (lambda: SyncSGD(1.0, float("nan"), 2), "sync is nan; give a number"),
        (lambda: compute_optimal(-1.0), r"operations is -1.0; give a number, above 0"),
        (
            lambda: training_days(1e9, 0, devices=1, operations=1e12),
            "tokens is 0; give a number, above 0",
        ),
        (lambda: Failures(0, 1.0), "num_devices is 0; give a whole number, 1 or more"),
        (lambda: Failures(8, -5.0), r"device_hours is -5.0; give a number above 0"),
        (lambda: Failures(8, 5.0, 0.0), r"save_seconds is 0.0; give a number above 0"),
        (lambda: Failures(8, 5.0, 1.0, -1.0), r"restart_seconds is -1.0; give 0 or more"),
        (lambda: Failures(8, 5.0).lost(0.0), r"interval is 0.0; give seconds, above 0"),
        (
            lambda: spares(Failures(8, 5.0), repair_hours=-1.0),
            r"repair_hours is -1.0; give a number, 0 or more",
        ),
        (
            lambda: spares(Failures(8, 5.0), repair_hours=1.0, confidence=1.0),
            r"confidence is 1.0; give a number between 0 and 1",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(call, message: str):
    with pytest.raises(PlanError, match=message):
        call()
