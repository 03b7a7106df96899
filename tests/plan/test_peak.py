"""The peak memory of a step beside what is predicted: bytes of tensors on two ranks."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.instruments.storages import storages
from benchmarks.parallel.pipeline.bench_pipeline_memory import allocated
from benchmarks.plan.bench_plan import SOFTWARE
from benchmarks.plan.plan_teams import SIZES, shape_of
from pyops.config import config_of
from pyops.plan import Layout, memory
from pyops.plan.settings import sections
from pyops.train.setup.trial import Trial
from tests.grids import full

pytestmark = pytest.mark.cpu_only

SMALL = SIZES["small"]
LAYOUTS = {
    "suite": (
        Layout(pp=2, schedule="1f1b", micro_batch=2, num_microbatches=4),
        Layout(dp=2, zero=3, micro_batch=4, recompute="block"),
    ),
    "full": (
        Layout(dp=2, zero=2, micro_batch=1, num_microbatches=4),
        Layout(dp=2, zero=3, micro_batch=4),
    ),
}


def _peaks(rank: int, group: Any, which: str) -> list[int]:
    found = []
    for layout in LAYOUTS[which]:
        before = sum(storages().values())
        tables = {**sections(layout, precision="fp32"), "model": asdict(SMALL.model)}
        trial = Trial(config_of(tables))
        for _ in range(2):
            trial.step()
        stays = sum(storages().values()) - before - trial.batch_bytes
        found.append(stays + allocated(trial.step))
        del trial
    return found


@pytest.mark.parametrize("which", ["suite", full("full")])
def test_peaks_are_within_five_percent(world, which: str):
    first, second = world(2).run(_peaks, which)
    for layout, *counted in zip(LAYOUTS[which], first, second, strict=True):
        predicted = memory(shape_of(SMALL), layout, SOFTWARE, precision="fp32").total
        assert predicted == pytest.approx(max(counted), rel=0.05), layout
        more = replace(layout, micro_batch=2 * layout.micro_batch)
        assert memory(shape_of(SMALL), more, SOFTWARE, precision="fp32").total > 1.1 * predicted
