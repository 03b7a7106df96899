"""The CUDA kernels' index arithmetic, run on the host: every element of every row is visited
exactly once, in line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.grids import full

pytestmark = pytest.mark.cpu_only

HERE = Path(__file__).resolve().parent
PARTITION = HERE.parent.parent / "csrc" / "cuda" / "partition.cuh"


def run(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    binary = folder / "partition"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", program, "-o", binary],
        check=True,
    )
    return subprocess.run([binary], capture_output=True, text=True, timeout=60)


def test_every_element_is_visited_once(tmp_path: Path):
    result = run(HERE / "partition.cpp", tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("ok ")
    assert int(result.stdout.split()[1]) > 10_000_000, (
        "the program visited too little to mean anything"
    )


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        # A compilation each: the suite keeps one.
        full("i < packs.end; i += stride", "i + stride < packs.end; i += stride", "never visited"),
        ("index == 0 ? 0 : index * chunk + head", "index * chunk", "visited twice"),
        full(
            "return (pack - misaligned) & (pack - 1)",
            "return misaligned & (pack - 1)",
            "out of line",
        ),
        full("(cta + 1) * here / ctas", "(cta + 1) * here / ctas - (cta == 1)", "never visited"),
        full("<= chunk", "< chunk", "chunk beyond its row"),
    ],
)
def test_the_program_sees_a_mistake(tmp_path: Path, right: str, wrong: str, complaint: str):
    source = PARTITION.read_text()
    assert source.count(right) == 1, right
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "tests" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "partition.cuh").write_text(source.replace(right, wrong))
    program = tmp_path / "tests" / "cuda" / "partition.cpp"
    program.write_text((HERE / "partition.cpp").read_text())
    result = run(program, tmp_path)
    assert result.returncode == 1, "the mistake went unseen"
    assert complaint in result.stdout
