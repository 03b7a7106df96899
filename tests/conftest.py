"""What every test can ask for: the device under test, the ISA-independent seed, a world of gloo ranks."""

from __future__ import annotations

import os

import pytest
import torch

from tests.workers import world  # noqa: F401 - a fixture, found by name

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at the first product on a GPU, whoever makes it
DEVICE = os.environ.get("PYOPS_TEST_DEVICE", "cpu")


def pytest_report_header() -> str:
    return f"pyops: device under test is {DEVICE}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device, leave out what has nothing to prove there."""
    if DEVICE == "cpu":
        return
    left_out = [item for item in items if item.get_closest_marker("cpu_only")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("cpu_only")]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test: PYOPS_TEST_DEVICE, cpu unless told."""
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail("PYOPS_TEST_DEVICE=cuda, but this torch sees no CUDA device")
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
