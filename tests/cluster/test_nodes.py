"""torchrun with an agent in each of two network namespaces, as on two nodes: one that comes late,
and a link that is down for a while.

    namespace a  10.77.0.1 ---- veth ---- 10.77.0.2  namespace b
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyops.train import train
from tests.cluster.test_launchers import written
from tests.train.tiny_run import config_of, losses, same
from tests.workers import ROOT

pytestmark = [pytest.mark.cpu_only, pytest.mark.cluster]

NAMES = {name: f"pyops-{name}-{os.getpid()}" for name in "ab"}


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[None]:
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("network namespaces need the command ip, and root")
    made = []
    try:
        for name in NAMES.values():
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = NAMES.values()
        ip("-n", first, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        ip("-n", first, "link", "set", "veth1", "netns", second)
        for number, name in enumerate(NAMES.values()):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"veth{number}")
            ip("-n", name, "link", "set", f"veth{number}", "up")
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name])


def agent(name: str, file: str, out: Path, *, pause: int = 0) -> subprocess.Popen[bytes]:
    """torchrun in a namespace, as `pyops launch --nodes 2 --host 10.77.0.1` starts it."""
    number = "ab".index(name)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    words += ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29500"]
    # The host's name is that of both namespaces, and says nothing of where the store is to be.
    words += ["--rdzv-conf", f"is_host={str(name == 'a').lower()}"]
    words += ["--rdzv-id", "run", "--max-restarts", "3", "--local-addr", f"10.77.0.{number + 1}"]
    words += ["-m", "tests.cluster.launched_run", file, str(pause)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": f"veth{number}",
    }
    with open(out, "ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", NAMES[name], *words],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )


def both_end(agents: list[subprocess.Popen[bytes]], out: Path, *, timeout: float) -> None:
    until = time.monotonic() + timeout
    try:
        for each in agents:
            code = each.wait(max(0.1, until - time.monotonic()))
            assert code == 0, out.read_text()[-3000:]
    except subprocess.TimeoutExpired:
        pytest.fail(out.read_text()[-3000:])
    finally:
        for each in agents:
            if each.poll() is None:
                each.terminate()
                each.wait(30)


def test_a_node_that_comes_late_and_a_link_that_drops(tmp_path, nodes):
    config, file = written(tmp_path)
    (tmp_path / "straight").mkdir()
    straight = config_of(tmp_path / "straight", "cpu", stage=1)
    train(straight)
    out = tmp_path / "out"
    agents = [agent("a", file, out, pause=300)]
    time.sleep(5)  # the other agent waits, and says nothing wrong
    assert agents[0].poll() is None, out.read_text()
    agents.append(agent("b", file, out, pause=300))
    until = time.monotonic() + 90
    while not (config.folder / "metrics.jsonl").exists() or len(losses(config)) < 4:
        assert time.monotonic() < until, out.read_text()[-3000:]
        time.sleep(0.2)
    ip("-n", NAMES["a"], "link", "set", "veth0", "down")
    time.sleep(2)
    ip("-n", NAMES["a"], "link", "set", "veth0", "up")
    both_end(agents, out, timeout=150)
    assert same(losses(config), losses(straight)), out.read_text()[-3000:]
