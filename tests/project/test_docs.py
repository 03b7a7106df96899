"""The programs that README.md and docs/*.md print run as they stand there, and print what the pages
say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.grids import full
from tests.project import documents
from tests.project.documents import (
    ROOT,
    TABLES,
    Fragment,
    Program,
    Ranks,
    blocks,
    differs,
    fragments_of,
    pages,
    program_of,
    programs_of,
)

pytestmark = pytest.mark.cpu_only

README_LINES = 20
# What trains for seconds is marked full; `make docs` runs it. The suite keeps the README on one
# process, the first program of most pages, and fragments on no rank and on two.
FULL_FIRST = (
    "README.md",  # eight ranks
    "asynchronous.md",
    "choosing.md",
    "compress.md",
    "context_parallel.md",
    "finetune.md",
    "parallel.md",
    "planner.md",
    "pruning.md",
    "quantization_training.md",
    "sandblaster.md",
    "sparsity.md",
    "train.md",
)
FULL_LATER = ("profiling.md", "quickstart.md", "zero.md")
FULL_FRAGMENTS = (
    "attention.md",
    "context_parallel.md",
    "migrate.md",
    "pipeline.md",
    "recompute.md",
    "train.md",
)


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(2)
    yield made
    made.close()


def first() -> list[Any]:
    """The pages, each of which begins with a program."""
    names = [page for page in pages() if page.name not in TABLES]
    return [full(page) if page.name in FULL_FIRST else page for page in names]


def later() -> list[Any]:
    """The programs of all pages but the first of each."""
    return [
        full(each) if page.name in FULL_LATER else each
        for page in pages()
        if page.name not in TABLES
        for each in programs_of(page.name, page.read_text())[1:]
    ]


@pytest.mark.parametrize("page", first(), ids=lambda page: page.name)
def test_the_first_program_of_a_page_runs_as_printed(page, ranks, tmp_path):
    runs_as_printed(program_of(page.name, page.read_text()), ranks, tmp_path)


@pytest.mark.parametrize("program", later(), ids=lambda program: program.page)
def test_a_later_program_with_its_command_and_output_runs_as_printed(program, ranks, tmp_path):
    runs_as_printed(program, ranks, tmp_path)


def fragments() -> list[Fragment]:
    """What stands between the whole programs of all pages."""
    return [
        each
        for page in pages()
        if page.name not in TABLES
        for each in fragments_of(page.name, page.read_text())
    ]


@pytest.mark.parametrize(
    "fragment",
    [full(each) if each.page in FULL_FRAGMENTS else each for each in fragments() if each.program],
    ids=lambda each: f"{each.page}:{each.line}",
)
def test_a_fragment_runs_after_its_setup(fragment, ranks, tmp_path):
    outcomes = ranks.run(fragment.program, tmp_path)
    assert [error for _, error in outcomes if error is not None] == []


def test_few_fragments_are_left_out_and_each_says_why():
    left_out = [each for each in fragments() if each.not_run]
    assert len(left_out) <= 3, [(each.page, each.line) for each in left_out]
    assert all(len(each.not_run.split()) > 5 for each in left_out)


def test_each_library_has_its_lines_beside_ours():
    """And ours are run: no fragment of the page is left out."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    for library in ("DistributedDataParallel", "FSDP2", "DeepSpeed", "Megatron-LM", "Accelerate"):
        own = next(section for section in sections if section.startswith(library))
        languages = [language for _, language, _ in blocks(own)]
        assert languages[:2] == ["text", "python"]
    assert all(each.program for each in fragments_of("migrate.md", page))


def test_a_fragment_takes_its_setup_from_the_comment_before_it():
    whole = "```python\nprint(1)\n```\n\n    python x.py\n\n```text\n1\n```\n"
    page = whole + "<!-- setup, 2 ranks\nx = 3\n-->\n```python\ny = x\n```\n"
    page += (
        "text\n```python\nz = 1\n```\n<!-- not run: no such machine here -->\n```python\n!\n```\n"
    )
    two, alone, left_out = fragments_of("page", page)
    assert two.program.ranks == 2
    assert two.program.source.endswith("init_process_group()\nx = 3\ny = x\n")
    assert alone.program == Program("page", "z = 1\n", 0, "")
    assert (left_out.program, left_out.not_run) == (None, "no such machine here")


def runs_as_printed(program: Program, ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(program, tmp_path)
    assert [error for _, error in outcomes if error is not None] == []
    assert not differs(outcomes[0][0], program.prints), (
        f"{program.page} states\n{program.prints}\nprinted was\n{outcomes[0][0]}"
    )
    assert {printed for printed, _ in outcomes[1:]} <= {""}


def test_the_program_of_the_readme_prints_the_same_on_one_process(ranks, tmp_path):
    readme = pages()[0].read_text()
    program = program_of("README.md", readme)
    assert program.ranks == 8
    assert "With `--nproc-per-node 1` the program prints the same losses." in readme
    assert len(program.source.splitlines()) <= README_LINES
    runs_as_printed(replace(program, ranks=1), ranks, tmp_path)


def test_all_python_of_the_readme_is_whole_programs():
    readme = pages()[0].read_text()
    assert [language for _, language, _ in blocks(readme)].count("python") == 1, (
        "those that no test runs belong into docs/"
    )


def test_a_program_that_is_late_does_not_answer_for_the_next(ranks, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(documents, "TIMEOUT", 0.01)
        slow = Program("page", "import time\nprint(1)\ntime.sleep(3)\n", 0, "")
        ((_, error),) = ranks.run(slow, tmp_path)
    assert error is not None
    assert "did not end" in error
    assert ranks.run(Program("page", "print(2)\n", 0, ""), tmp_path) == [("2\n", None)]


def test_what_is_no_program_is_told(ranks, tmp_path):
    """Of pages without a program, without its command or its output, with a fragment, with other
    numbers."""
    code, run, out = (
        "```python\nprint(0.5, y)\n```\n",
        "\n    python x.py\n\n",
        "```text\n0.51 1\n```\n",
    )
    for text, fault in (
        ("prose", "has no Python"),
        (code + out, "say how to run"),
        (code + run, "say how to run"),
    ):
        with pytest.raises(ValueError, match=fault):
            program_of("page", text)
    needs = code.replace("print", "torch.distributed.init_process_group(); print")
    with pytest.raises(ValueError, match="needs torchrun"):
        program_of("page", needs + run + out)
    program = program_of("page", code + run + out)
    assert program == Program("page", "print(0.5, y)\n", 0, "0.51 1\n")
    assert "name 'y' is not defined" in (ranks.run(program, tmp_path)[0][1] or "")
    assert (
        program_of(
            "page", code + run.replace("python", "torchrun --standalone --nproc-per-node 3") + out
        ).ranks
        == 3
    )
    assert [
        each.prints
        for each in programs_of(
            "page", code + run + out + code + out + code + run + "```text\n2\n```\n"
        )
    ] == ["0.51 1\n", "2\n"]
    assert not differs("0.50 1\n", "0.51 1")
    for printed in ("0.48 1", "0.51 2", "0.51 1\nmore", ""):
        assert differs(printed, "0.51 1")
    assert differs("a\n0.51 1", "0.51 1")
    assert not differs("a\n0.51 1", "...\n0.51 1")
