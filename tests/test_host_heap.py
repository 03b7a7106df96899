"""Freed memory that the allocator keeps goes back to the system."""

from __future__ import annotations

import sys

import pytest

from pyops import host_heap as heap
from pyops.host_heap import trim, trim_after

pytestmark = pytest.mark.cpu_only


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or heap._malloc_trim() is None,
    reason="the C library has no malloc_trim",
)
def test_gaps_go_back_to_the_system():
    pieces = [bytearray(b"x" * 50_000) for _ in range(2000)]
    del pieces[::2]  # 50 MB, every piece between two that stay
    before = resident()
    assert trim()
    assert before - resident() > 30e6
    assert len(pieces) == 1000


def test_once_in_a_hundred_steps(monkeypatch):
    taken = []
    monkeypatch.setattr(heap, "trim", lambda: taken.append(True))
    for step in range(1, 301):
        trim_after(step)
    assert len(taken) == 3


def test_a_c_library_without_it(monkeypatch):
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    assert not trim()
