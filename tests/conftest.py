"""What every test can ask for: the device under test, the ISA-independent seed, a world of gloo
ranks."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import grids
from tests.default_device import default_device
from tests.workers import world  # noqa: F401 - a fixture, found by name

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # torch reads it at the first product on a GPU, whoever makes it
# torch asks for the name of each address that connects to a TCPStore, also of this host's own: a
# question to the name server that is lost would hold it up for the five seconds of the default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# pytest-xdist: processes that each took all cores would wait for one another at the end of every
# parallel loop.
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)
# torch.manual_seed would keep a seed for each kind of device that is not there, and beside it the
# text of the whole stack: half of the time of a test that does little else.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None
DEVICE = os.environ.get("PYOPS_TEST_DEVICE", "cpu")
PRETENDED = "PYOPS_PRETEND_CUDA" in os.environ  # tests/pretend_cuda: a CUDA device over host memory


def pytest_report_header() -> str:
    return (
        f"pyops: device under test is {DEVICE}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )


# pytest-xdist deals whole files out in the order of collection: one that takes long and comes last
# would run alone, while the other workers are done. Longest first.
LONG = (
    "tests/train/test_task_runs.py",
    "tests/ops/triton/test_interpreter.py",
    "tests/project/test_build.py",
    "tests/elastic/runtime/test_lost_ranks.py",
    "tests/project/test_docs.py",
    "tests/train/test_optimizers.py",
    "tests/zero/test_stages.py",
    "tests/train/faults/test_faults.py",
    "tests/train/test_pipeline.py",
    "tests/cuda/test_kernels.py",
    "tests/train/test_zero.py",
    "tests/tensor_parallel/convert/test_parallelize_check.py",
    "tests/parameter_server/test_rooms.py",
    "tests/parallel/test_trainer.py",
    "tests/pipeline/runtime/test_faults.py",
    "tests/tensor_parallel/grids/test_products.py",
    "tests/cuda/test_codecs.py",
    "tests/plan/test_layout_search.py",
    "tests/train/pretrained/test_taught_folder.py",
    "tests/pipeline/schedules/test_asynchronous.py",
    "tests/train/test_parallel.py",
    "tests/comm/test_failure.py",
    "tests/train/test_asynchronous.py",
    "tests/test_data_parallel_codec.py",
    "tests/project/test_examples.py",
    "tests/project/test_lab.py",
    "tests/context_parallel/test_ranks.py",
    "tests/train/faults/test_neighbor.py",
    "tests/parallel/test_shared_tokens.py",
    "tests/tensor_parallel/layers/test_layers.py",
    "tests/zero/state/test_saving.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of LONG: by default pytest-xdist begins with the files of most tests, however
    short these are, and ends with the long ones. And make no cases that are left out below."""
    grids.ALL_CASES["made"] = bool(config.option.markexpr)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def _turn(item: pytest.Item) -> int:
    file = item.nodeid.partition("::")[0]
    return LONG.index(file) if file in LONG else len(LONG)


def _is_for_the_device(item: pytest.Item) -> bool:
    """Whether a test has something to prove on a device other than the CPU: it asks for it, or is
    made for it."""
    if item.get_closest_marker("cpu_only") or (
        PRETENDED and item.get_closest_marker("real_device")
    ):
        return False
    asks = "device" in getattr(item, "fixturenames", ()) or hasattr(
        getattr(item, "module", None), "DEVICE"
    )
    return asks or item.get_closest_marker("on_device") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cut grids to pairs, leave out full grids and real launchers unless `-m` was given, and on
    another device what has nothing to prove there."""
    grids.cut_to_pairs(items)
    if not config.option.markexpr:
        later = [
            item
            for item in items
            if item.get_closest_marker("full") or item.get_closest_marker("cluster")
        ]
        config.hook.pytest_deselected(items=later)
        left_out = {id(item) for item in later}
        items[:] = [item for item in items if id(item) not in left_out]
    items.sort(key=_turn)
    if DEVICE == "cpu":
        return
    config.hook.pytest_deselected(items=[item for item in items if not _is_for_the_device(item)])
    items[:] = [item for item in items if _is_for_the_device(item)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """What is imported and collected is never garbage: to look through it again and again would
    take a third of the time of the collection."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nor would a test find garbage there: to look through it would take every gc.collect of a test
    most of a second."""
    gc.enable()
    gc.freeze()


# Libraries that count what is left over at the end are to find nothing; before that, pytest looks
# five times for what tests left over.
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A test marked on_device makes its tensors there without naming it, its fixtures and the
    workers of its pool as well."""
    there = DEVICE != "cpu" and item.get_closest_marker("on_device") is not None
    with default_device(DEVICE if there else "cpu"):
        return (yield)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test: PYOPS_TEST_DEVICE, cpu unless told."""
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail("PYOPS_TEST_DEVICE=cuda, but this torch sees no CUDA device")
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
