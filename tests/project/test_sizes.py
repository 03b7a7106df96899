"""The rule of the house that a file can be read at one sitting, and a function understood as one.

What is counted is code: neither docstrings nor comments nor blank lines, nor how many lines an
argument list takes, so that no file becomes shorter by being set more tightly.

    file        lines of code                            MAX_FILE_LINES
    function    statements, branches, complexity and     `[tool.ruff.lint.mccabe]` and
                parameters, by ruff                      `[tool.ruff.lint.pylint]` in pyproject.toml
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyops", "csrc", "tests", "benchmarks", "examples")
MAX_FILE_LINES = 400
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


def test_code_is_counted_without_docstrings_comments_and_blank_lines():
    source = (
        '"""A\nmodule."""\n\n# A comment.\nx = [\n    1,\n]\n\n\ndef f():\n    """F."""\n    '
        "return x\n"
    )
    assert code_lines(source) == 5
