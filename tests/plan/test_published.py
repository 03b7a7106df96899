"""Published runs are predicted within what docs/planner.md says, and the page says what is
predicted."""

from __future__ import annotations

import pytest

from benchmarks.plan.published_runs import PAGE, TABLES, fill
from benchmarks.plan.published_table import blind, mean_error, worst_error
from pyops.plan import training_days
from tests.plan.shapes import gpt

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("name", TABLES)
def test_rows_that_nothing_was_fitted_to_are_within_the_bound(name: str):
    table = TABLES[name]
    if rows := blind(table):
        assert worst_error(table, rows) <= table.bound
    else:
        assert worst_error(table, table.runs) <= table.bound


def test_most_rows_are_blind():
    """And those of the two large tables are no worse than what was fitted."""
    runs = [run for table in TABLES.values() for run in table.runs]
    assert sum(run.fitted for run in runs) < 0.4 * len(runs)
    for name in ("foundry_a100", "foundry_h100"):
        table = TABLES[name]
        fitted = [run for run in table.runs if run.fitted]
        assert len(fitted) <= -(-len(table.runs) // 3)
        assert mean_error(table, blind(table)) < 0.10


def test_more_devices_lose_as_much_as_published():
    """Llama 3 405B: 400 TFLOP/s on 16,384 devices, 430 on 8,192, the same batch."""
    small, large = (run for run in TABLES["thousands"].runs if run.name.startswith("Llama 3 405B"))
    table = TABLES["thousands"]
    assert table.predicted(large) / table.predicted(small) == pytest.approx(400 / 430, rel=0.03)


def test_a_training_takes_the_days_published():
    """Narayanan et al.: 175 billion parameters, 300 billion tokens, 1,024 A100 at 140 TFLOP/s: 34
    days; and a trillion parameters, 5e24 operations, 4,000 A100 at half their peak: 93 days."""
    days = training_days(175e9, 300e9, devices=1024, operations=140e12, recompute=True)
    assert days == pytest.approx(34, abs=0.5)
    tokens = 5e24 / 6 / 1e12
    assert training_days(1e12, tokens, devices=4000, operations=156e12) == pytest.approx(
        92.7, abs=0.1
    )


def test_operations_are_those_of_the_paper():
    """96 B s l h^2 (1 + s / 6h + V / 16lh) is four thirds of the model operations."""
    shape = gpt(24, 2304, 24)
    s, l, h = 2048, 24, 2304  # noqa: E741
    paper = 96 * s * l * h * h * (1 + s / (6 * h) + 51200 / (16 * l * h))
    # The head is not computed again, and norms and biases have parameters that are no products.
    assert 4 / 3 * shape.operations() * s == pytest.approx(paper, rel=0.03)


@pytest.mark.full
def test_the_page_says_what_is_predicted():
    page = PAGE.read_text()
    assert all(f"<!-- published:{name} -->" in page for name in TABLES)
    assert fill(page) == page, "run python -m benchmarks.plan.published_runs"
