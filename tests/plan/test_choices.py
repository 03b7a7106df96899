"""docs/choosing.md says what the planner chooses."""

from __future__ import annotations

import re

import pytest

from benchmarks.plan.planned_choices import CHOICES, MARKED, PAGE, text
from tests.grids import full

pytestmark = pytest.mark.cpu_only


@pytest.mark.full
@pytest.mark.parametrize("name", ["device", full("nodes"), full("links")])
def test_the_page_says_what_is_chosen(name: str):
    found = {each[2]: each[0] for each in MARKED.finditer(PAGE.read_text())}
    assert set(found) == set(CHOICES)
    assert text(name) in found[name], "run python -m benchmarks.plan.planned_choices"


def test_slow_links_take_a_pipeline():
    """As the page states."""
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| Llama 8B, ")]
    assert len(rows) == 5
    layouts = [row.split("|")[4] for row in rows]
    assert "pp" not in layouts[0]
    assert all(re.search(r"pp \d", layout) for layout in layouts[-2:])
