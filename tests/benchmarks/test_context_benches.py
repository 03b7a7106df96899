"""The benches of context parallelism: the order of methods, and the bisection of lengths."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.parallel.context import (
    bench_context_link,
    bench_context_memory,
    context_memory_picture,
)

pytestmark = pytest.mark.cpu_only


def test_methods_come_in_the_order_that_is_expected() -> None:
    expected = {"ring": 1.0, "ulysses": 1.04, "gather": 2.0}
    assert bench_context_link.agree({"ring": 2.0, "ulysses": 1.9, "gather": 3.0}, expected)
    assert not bench_context_link.agree({"ring": 2.0, "ulysses": 3.1, "gather": 3.0}, expected)


def test_a_row_of_the_link_compares_what_is_measured_with_the_model() -> None:
    def result(ring: float) -> dict[str, Any]:
        one = {"sent": [1.0], "received_bytes": 1}
        return {
            "gather": {**one, "seconds": [3.4, 3.3, 3.5]},
            "ulysses": {**one, "seconds": [2.6, 2.5, 2.7]},
            "ring": {**one, "seconds": [ring, 0.1, ring]},
            "compute": [(0.2, 0.4), (0.3, 0.5), (0.2, 0.4)],
            "latency": 1e-4,
        }

    slow, fast = (
        bench_context_link._row(2, 100, 8, 4096, [result(ring), result(1.0)]) for ring in (3.9, 0.2)
    )
    assert slow["predicted_order"] == ["ulysses", "gather", "ring"] == slow["order"]
    assert slow["same_order"]
    assert slow["us"]["ring"][1] == pytest.approx(3.9e6)
    assert slow["compute_seconds"] == [0.2, 0.4]
    assert not fast["same_order"]


def test_the_longest_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (700, 5_000, 8_200, 20_000):
        tried: list[int] = []

        def seconds(ranks: int, length: int, limit: int = limit) -> float | None:
            tried.append(length)  # noqa: B023
            return float(length) if length <= limit else None

        monkeypatch.setattr(bench_context_memory, "_seconds", seconds)
        found, of_it = bench_context_memory.longest(2, guess=8_192)
        unit = bench_context_memory.UNIT
        assert found % unit == 0
        assert found <= limit < found + max(unit, bench_context_memory.NEAR * limit) + unit
        assert of_it == found
        assert len(tried) < 12
    monkeypatch.setattr(bench_context_memory, "_seconds", lambda ranks, length: None)
    with pytest.raises(RuntimeError, match="not even 128 tokens fit"):
        bench_context_memory.longest(2, guess=8_192)


def test_a_failure_for_another_reason_than_memory_is_raised() -> None:
    import subprocess
    import sys

    def outcome(code: str) -> float | None:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return bench_context_memory._outcome([process])

    assert outcome("print(1.5)") == 1.5
    assert outcome("raise MemoryError") is None
    with pytest.raises(RuntimeError, match=r"(?s)another reason than memory.*ZeroDivisionError"):
        outcome("1 / 0")


@pytest.mark.full
def test_a_picture_is_drawn(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"ranks": n, "tokens": 9 * n, "limit_bytes": 2 << 30} for n in (1, 2)]
    context_memory_picture.draw(rows, tmp_path / "a.png")
    other = [{"ranks": n, "tokens": 9 + n, "limit_bytes": 2 << 30} for n in (1, 2)]
    context_memory_picture.draw(other, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
