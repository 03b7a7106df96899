"""What these tests need is missing before a worker looks for it, so that tests/optional_packages.py
can tell."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in ("transformers", "accelerate"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"these tests need {name}", name=name)
