"""A pytest plugin for runs that may be cut off: each failure is written as it comes, and a process
whose CUDA context a test has broken ends, so that the tests after it run in a fresh one.

    PYOPS_FAILURES=failures.txt python -m pytest -n 8 -p tests.failures_at_once

Without pytest-xdist, which starts a process again that has ended, nothing ends.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

# After any of these, each call of the process' CUDA context fails.
BROKEN = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address"
    r"|illegal instruction|an illegal barrier|hardware stack error"
)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if not report.failed:
        return
    if worker is None and hasattr(report, "node"):
        return  # a worker has written it
    text = f"== {worker} {report.nodeid} ({report.when})\n{report.longreprtext}\n\n"
    with Path(os.environ["PYOPS_FAILURES"]).open("a") as file:
        file.write(text)
    if worker is not None and BROKEN.search(report.longreprtext):
        os._exit(3)
