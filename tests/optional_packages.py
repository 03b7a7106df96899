"""A pytest plugin for machines that lack an optional package: what needs it is skipped, and says
which one.

    python -m pytest -p tests.optional_packages

Without it, a test module whose package is missing is an error, as it should be where everything was
installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONAL = {
    "PIL",
    "accelerate",
    "hypothesis",
    "matplotlib",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "tomli",
    "transformers",
    "triton",
}


def missing(error: BaseException | None) -> str | None:
    """The optional package that an import error, or one of its causes, is about."""
    while error is not None:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and error.name.split(".")[0] in OPTIONAL
        ):
            return error.name.split(".")[0]
        error = error.__cause__ or error.__context__
    return None


def skip_module_without(package: str) -> None:
    """Skip the calling test module where `package` is not installed.

    Unlike pytest.importorskip, the package is not imported: scikit-learn takes more than two
    seconds of each worker of pytest-xdist, and pyops reads a file of it without importing it.

    Args:
        package: The top-level module, such as `sklearn`.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed", allow_module_level=True)


class Module(pytest.Module):
    def collect(self) -> Iterable[Any]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            package = missing(error)
            if package is None:
                raise
            pytest.skip(f"needs {package}, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def _skipped(error: Exception) -> None:
    package = missing(error)
    if package is None:
        raise error
    pytest.skip(f"needs {package}, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:  # one of pyops' own, such as CorpusError, may come from the import's
        return _skipped(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        return _skipped(error)
