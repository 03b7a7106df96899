"""The house rule that a file and a function can be read at one sitting, executed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyops", "csrc", "tests", "benchmarks", "examples")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources(*suffixes: str) -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return [*sorted(found), *(p for p in [ROOT / "setup.py"] if p.suffix in suffixes)]


def long_functions(source: str) -> list[tuple[str, int]]:
    """Functions longer than the limit; their docstrings don't count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (
                first.end_lineno - first.lineno + 1
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno
                else 0
            )
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
            if lines > MAX_FUNCTION_LINES:
                found.append((node.name, lines))
    return found


def test_files_fit():
    assert len(sources(".py")) > 20, "the search found too few files to mean anything"
    long = {str(p.relative_to(ROOT)): n for p in sources(".py", ".cpp", ".cu", ".h", ".cuh")
            if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}  # fmt: skip
    assert not long, f"over {MAX_FILE_LINES} lines, split by capability: {long}"


def test_functions_fit():
    long = {str(p.relative_to(ROOT)): f for p in sources(".py") if (f := long_functions(p.read_text()))}
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_the_rule_sees_a_long_function():
    body = "\n".join(f"    x = {i}" for i in range(MAX_FUNCTION_LINES + 5))
    assert long_functions(f"def f():\n{body}\n") == [("f", MAX_FUNCTION_LINES + 6)]
