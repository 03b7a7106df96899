"""Byte code of pyops, benchmarks and tests, made by all cores at once before the tests run.

    python -m tests.byte_code

Else each worker of pytest-xdist would rewrite the assertions of all test files, at the same time as
the others, and each process that a test starts would compile pyops again where
PYTHONDONTWRITEBYTECODE is set. What is as its source is left as it is.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pyops", "benchmarks", "tests")
REWRITTEN = re.compile(r"/(test_|interpret_|conftest\.)")

__all__ = ["main", "rewritten_files"]


def rewritten_files() -> list[Path]:
    """The files whose assertions pytest rewrites: the tests, and what it imports of Hypothesis."""
    import hypothesis  # noqa: F401 - for its modules

    tests = [
        path
        for name in ("test_*.py", "conftest.py", "interpret_*.py")
        for path in ROOT.glob(f"tests/**/{name}")
    ]
    modules = [
        Path(getattr(module, "__file__", None) or "")
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "hypothesis"
    ]
    return sorted(tests) + [path for path in modules if path.suffix == ".py"]


def _rewrite(files: list[Path]) -> int:
    """Write what pytest would, and its number; none where this pytest names the functions
    otherwise."""
    try:
        from _pytest.assertion import rewrite
        from _pytest.config import get_config

        config = get_config()
        rewrite_test, read_pyc = rewrite._rewrite_test, rewrite._read_pyc
        write_pyc = rewrite._write_pyc
    except (ImportError, AttributeError):
        return 0
    made, state = 0, SimpleNamespace(trace=lambda text: None)
    for path in files:
        folder = rewrite.get_cache_dir(path)
        pyc = folder / (path.name[:-3] + rewrite.PYC_TAIL)
        if not rewrite.try_makedirs(folder) or read_pyc(path, pyc) is not None:
            continue
        source, code = rewrite_test(path, config)
        made += write_pyc(state, code, source, pyc)  # type: ignore[arg-type]
    return made


def main() -> int:
    """How many files were rewritten."""
    cores = len(os.sched_getaffinity(0))
    for folder in FOLDERS:
        compileall.compile_dir(ROOT / folder, rx=REWRITTEN, quiet=2, workers=cores)
    files = rewritten_files()
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        return sum(pool.map(_rewrite, [files[i::cores] for i in range(cores)]))


if __name__ == "__main__":
    main()
