"""The four steps of examples/lab run, and say what their pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.documents import ROOT, Program, Ranks

pytestmark = pytest.mark.cpu_only

LAB = ROOT / "examples" / "lab"


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(2)
    yield made
    made.close()


def printed(ranks: Ranks, name: str, size: int, folder: Path, arguments: str = "") -> str:
    """What rank 0 printed; no rank failed."""
    start = f"import sys\nsys.argv[1:] = {arguments.split()!r}\nsys.path.insert(0, {str(LAB)!r})\n"
    source = start + (LAB / f"{name}.py").read_text()
    outcomes = ranks.run(Program(name, source, size, ""), folder)
    assert [error for _, error in outcomes if error is not None] == []
    return outcomes[0][0]


# The suite runs one of the four steps; `make docs` runs the others as well.
@pytest.mark.full
def test_the_largest_batch_is_the_one_predicted():
    """In a process of its own, whose memory is limited."""
    script = LAB / "data_parallel.py"
    run = subprocess.run(
        [sys.executable, str(script), "20"],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    predicted = int(re.search(r"predicted: (\d+) images in 20 MiB", run.stdout)[1])
    measured = int(re.search(r"measured: +(\d+) images", run.stdout)[1])
    assert predicted > 20
    assert abs(measured - predicted) <= 0.1 * predicted


def test_zero_divides_the_states_and_changes_no_loss(ranks, tmp_path):
    said = printed(ranks, "zero", 2, tmp_path)
    found = re.findall(r"stage \d: +([\d.]+) bytes a parameter, by the formula +([\d.]+)", said)
    assert [formula for _, formula in found] == ["16.00", "12.00", "10.00", "8.00"]
    for kept, formula in found:
        assert abs(float(kept) - float(formula)) < 0.1 * float(formula)
    assert said.count("losses equal") == 4


@pytest.mark.full
def test_a_pipeline_has_the_loss_of_one_process(ranks, tmp_path):
    said = printed(ranks, "pipeline", 2, tmp_path)
    losses = re.findall(r"loss ([\d.]+), of one process ([\d.]+)", said)
    assert len(losses) == 4
    assert all(abs(float(a) - float(b)) < 2e-6 for a, b in losses)
    assert re.findall(r"even stages (\d+)%", said) == ["50", "33", "20", "11"]


@pytest.mark.full
def test_the_search_takes_the_fastest_that_fits(ranks, tmp_path):
    said = printed(ranks, "search", 0, tmp_path, "4")
    rows = re.findall(r"^(.+?) +(\d+) #* +([\d.]+) #*( +does not fit)?$", said, re.M)
    assert len(rows) == 12
    for _, _, memory, refused in rows:
        assert bool(refused) == (float(memory) > 4.0) or abs(float(memory) - 4.0) < 0.1
    fitting = [name for name, _, _, refused in rows if not refused]
    assert f"best within 4 MiB: {fitting[0].strip()}" in said
    assert any(refused for *_, refused in rows)


@pytest.mark.full
def test_a_price_is_run(ranks, tmp_path):
    said = printed(ranks, "tried", 2, tmp_path)
    rows = re.findall(r"predicted +(\d+) ms(?:, measured +(\d+))?$", said, re.M)
    assert len(rows) == 10
    predicted = [int(first) for first, _ in rows]
    assert predicted == sorted(predicted)
    assert [bool(measured) for _, measured in rows] == [True] * 3 + [False] * 7


@pytest.mark.full  # a comparison of pages with plans, which `make docs` runs
def test_the_pages_have_what_is_planned_for_the_machine_of_the_course(ranks, tmp_path):
    said = printed(ranks, "planned", 0, tmp_path).splitlines()
    pages = "".join(page.read_text() for page in LAB.glob("*.md"))
    assert len(said) > 30
    assert [line for line in said if line not in pages] == []
