"""Ranks in network namespaces: what goes over the link is counted, and nothing of it is left
behind. Needs root."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.links import slow_link
from benchmarks.links.slow_link import INTERFACE, Link, available

REASON = available()
pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(REASON is not None, reason=f"no slow link here: {REASON}"),
]
ROOT = Path(__file__).resolve().parents[2]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def where_am_i(nbytes: int) -> dict[str, object]:
    """On a rank: a transfer, and what this rank can see of the machine."""
    import os

    sent = slow_link.plain_send(nbytes=nbytes)
    return {
        **sent,
        "shared": os.stat("/dev/shm").st_dev,
        "interfaces": sorted(os.listdir("/sys/class/net")),
    }


@pytest.mark.full
def test_a_transfer_goes_over_the_link_and_is_counted():
    with Link(ranks=2, mbit=100) as link:
        assert set(link.namespaces) <= namespaces()
        first, second = link.run(
            "tests.benchmarks.test_slow_link:where_am_i", {"nbytes": 300_000}, timeout=120
        )
    assert 300_000 <= first["wire"] <= 330_000
    assert 300_000 <= second["wire"] <= 330_000
    assert first["shared"] != second["shared"], "ranks could pass data through /dev/shm"
    assert set(first["interfaces"]) == {"lo", INTERFACE}
    assert not set(link.namespaces) & namespaces()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_direction_is_limited(ranks):
    with Link(ranks=ranks, mbit=250) as link:
        hops = [(name, INTERFACE) for name in link.namespaces]
        if ranks > 2:
            (bridge,) = {n for n in namespaces() if n.startswith(link.namespaces[0][:-1])} - set(
                link.namespaces
            )
            hops += [(bridge, f"port{rank}") for rank in range(ranks)]
        for name, interface in hops:
            shown = subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "show", "dev", interface],
                capture_output=True,
                text=True,
            ).stdout
            assert "tbf" in shown
            assert "rate 250Mbit" in shown


@pytest.mark.full
def test_a_rank_that_fails_is_named_and_the_link_goes_away():
    with (
        pytest.raises(RuntimeError, match=r"rank \d ended with 1(.|\n)*no_such_function"),
        Link(ranks=2, mbit=100) as link,
    ):
        link.run("benchmarks.links.slow_link:no_such_function", timeout=60)
    assert not set(link.namespaces) & namespaces()


def test_ranks_that_take_too_long_are_stopped():
    with Link(ranks=2, mbit=100) as link:
        with pytest.raises(TimeoutError, match="rank 1"):
            link.run("time:sleep", {}, timeout=0.2)
        for name in link.namespaces:
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout
            assert pids == ""


@pytest.mark.full
def test_a_killed_bench_leaves_no_namespaces():
    script = (
        "import time; from benchmarks.links.slow_link import Link\n"
        "with Link(ranks=3, mbit=100) as link:\n"
        "    print(*link.namespaces, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    made = set(process.stdout.readline().split())
    assert len(made) == 3
    assert made <= namespaces()
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(200):  # the guard needs a moment
        if not made & namespaces():
            break
        subprocess.run(["sleep", "0.05"])
    assert not made & namespaces()


@pytest.mark.parametrize(("ranks", "mbit"), [(1, 100), (2, 0)])
def test_a_link_of_nothing_is_refused(ranks, mbit):
    with pytest.raises(ValueError, match="a link needs 2 ranks and 1 Mbit/s"):
        Link(ranks=ranks, mbit=mbit)
