"""The rule of the house that a file can be read at one sitting, and a function understood as one.

What is counted is code: neither docstrings nor comments nor blank lines, nor how many lines an
argument list takes, so that no file becomes shorter by being set more tightly.

    file        lines of code                            MAX_FILE_LINES
    line        columns                                  `line-length` in pyproject.toml, WIDTH
    function    statements, branches, complexity and     `[tool.ruff.lint.mccabe]` and
                parameters, by ruff                      `[tool.ruff.lint.pylint]` in pyproject.toml
    folder      modules, packages, stems of kernels      MOST_ENTRIES
    table       `# fmt: skip`, which keeps a table's     MAX_TABLES
                columns and may set no code more tightly
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyops"
FOLDERS = ("pyops", "csrc", "tests", "benchmarks", "examples")
MAX_FILE_LINES = 400
MOST_ENTRIES = 12  # of one folder, without its __init__
MAX_TABLES = 40
WIDTH = 100
MARK = "fmt:"
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def sources(*suffixes: str) -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return [*sorted(found), *(p for p in [ROOT / "setup.py"] if p.suffix in suffixes)]


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def code_lines(source: str) -> int:
    """Lines of a Python file that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*LAYOUT, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def may_be_long(source: str) -> bool:
    """Whether more than MAX_FILE_LINES lines are neither blank nor a comment: to read a file token
    by token takes long."""
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines) > MAX_FILE_LINES


def test_files_fit():
    assert len(sources(".py")) > 20, "the search found too few files to mean anything"
    texts = {p: p.read_text() for p in sources(".py")}
    sizes = {p: code_lines(t) for p, t in texts.items() if may_be_long(t)}
    assert len(sizes) > 3, "of long files too few to mean anything"
    sizes |= {p: len(p.read_text().splitlines()) for p in sources(".cpp", ".cu", ".h", ".cuh")}
    long = {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines of code, split by capability: {long}"


def test_lines_of_kernels_fit():
    """Clang-format breaks code at this width, but no comment; ruff checks both of Python."""
    texts = {p: p.read_text().splitlines() for p in sources(".cpp", ".cu", ".h", ".cuh")}
    assert len(texts) > 100, "the search found too few files to mean anything"
    wide = [
        f"{p}:{n}" for p, lines in texts.items() for n, x in enumerate(lines, 1) if len(x) > WIDTH
    ]
    assert not wide, f"over {WIDTH} columns: {wide}"


def test_code_is_counted_without_docstrings_comments_and_blank_lines():
    source = (
        '"""A\nmodule."""\n\n# A comment.\nx = [\n    1,\n]\n\n\ndef f():\n    """F."""\n    '
        "return x\n"
    )
    assert code_lines(source) == 5


def entries(folder: Path) -> set[str]:
    """Modules and packages of a folder; of csrc folders and stems, where optim.cpp, optim.h and
    optim_kernel.cpp are one."""
    if folder.is_relative_to(ROOT / "csrc"):
        names = {p.stem for p in folder.iterdir()}
        return {n for n in names if not any(n.startswith(f"{stem}_") for stem in names)}
    found = {p.stem for p in folder.glob("*.py")} | {
        p.name for p in folder.iterdir() if (p / "__init__.py").exists()
    }
    return found - {"__init__"}


def crowded(folders: Iterable[Path]) -> list[tuple[str, int]]:
    """Those of the folders that have more entries than MOST_ENTRIES, and how many."""
    counts = [(str(folder.relative_to(ROOT)), len(entries(folder))) for folder in folders]
    return [(folder, count) for folder, count in counts if count > MOST_ENTRIES]


def test_no_folder_has_more_entries_than_a_reader_holds_in_mind():
    assert not crowded(p.parent for p in PACKAGE.glob("*/**/__init__.py"))
    assert not crowded(p.parent for p in (ROOT / "benchmarks").glob("**/__init__.py"))
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_dir()]
    assert {p.name for p in sources} > {"cpu", "cuda", "math", "host", "native", "optimizers"}
    assert not crowded(sources)


def unformatted_lines(source: str) -> list[int]:
    """Lines of a Python file whose statement the formatter leaves as it is."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [t for t in tokens if t.type == tokenize.COMMENT]
    return [t.start[0] for t in comments if t.string.replace(" ", "").startswith("#" + MARK)]


def ends_a_table(tree: ast.AST, line: int) -> bool:
    """Whether rows of values end at a line, or the signature of a Triton kernel, whose parameters
    stand in a row for each kind: pointers, strides, sizes, constants."""
    for node in ast.walk(tree):
        if isinstance(node, DISPLAYS) and node.lineno < line == node.end_lineno:
            return True
        if isinstance(node, ast.FunctionDef) and node.lineno < line < node.body[0].lineno:
            return any("jit" in ast.unparse(d) for d in node.decorator_list)
    return False


def test_the_formatter_leaves_nothing_but_tables_as_they_are():
    texts = {p: t for p in sources(".py") if MARK in (t := p.read_text())}
    left = {p: lines for p, t in texts.items() if (lines := unformatted_lines(t))}
    assert 3 < sum(map(len, left.values())) < MAX_TABLES, left
    trees = {p: ast.parse(texts[p]) for p in left}
    others = [f"{p}:{n}" for p in left for n in left[p] if not ends_a_table(trees[p], n)]
    assert not others, f"not the end of a table: {others}"


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("x = [\n    1, 2,\n    3, 4,\n]", True),
        ("x = f(\n    1, 2,\n    3, 4,\n)", False),
        ("@triton.jit\ndef f(\n    x, y,\n    M, N,\n):\n    pass", True),
        ("def f(\n    x, y,\n    M, N,\n):\n    pass", False),
    ],
)
def test_tables_are_told_from_calls_and_functions(source, is_one):
    lines = source.splitlines()
    end = next(n for n, line in enumerate(lines, 1) if line[0] in ")]")
    assert ends_a_table(ast.parse(source), end) is is_one
