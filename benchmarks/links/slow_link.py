"""A slow network on one machine: a network namespace for each rank, links of a set rate between
them, ranks that run there.

    2 ranks [ns 0: slow0]--veth--[ns 1: slow0] tc tbf at both ends: each direction has its own rate

    more    [ns 0: slow0]--veth--[port 0 |        |
            [ns 1: slow0]--veth--[port 1 | bridge |    tc tbf at both ends of each veth: up and down
            [ns 2: slow0]--veth--[port 2 | (ns)   |

    with Link(ranks=2, mbit=100) as link:
        function = "benchmarks.links.slow_link:plain_send"
        first, second = link.run(function, {"nbytes": 10**7}, timeout=60)

Each rank also has a /dev/shm of its own, so that ranks can't share memory past the link. Everything
is torn down on exit by a guard process that also acts when this one is killed. Needs root, `ip` and
`tc`: `available()` says what is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["INTERFACE", "Link", "available", "plain_send", "wire_bytes"]

INTERFACE = "slow0"
ROOT = Path(__file__).resolve().parents[2]
PORT = 29500  # free: each link is a network of its own
# Reads until its end of the pipe is closed, by __exit__ or by the death of the process that held
# it.
GUARD = """read -r _
for name in "$@"; do
  ip netns pids "$name" 2>/dev/null | xargs -r kill -9
  ip netns del "$name" 2>/dev/null
done"""
OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def available() -> str | None:
    """None where a Link can be made, else the reason why not."""
    missing = [tool for tool in ("ip", "tc", "mount", "xargs") if shutil.which(tool) is None]
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"the command {missing[0]} is missing (package iproute2, util-linux or findutils)"
    try:
        with Link(ranks=2, mbit=100):
            return None
    except RuntimeError as error:  # a container without the rights, or a kernel without veth or tbf
        return str(error).splitlines()[0]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"`{command}` failed: {done.stderr.strip() or done.stdout.strip() or done.returncode}"
        )


class Link:
    """`ranks` namespaces joined at `mbit` Mbit/s in each direction; a context manager. RuntimeError
    where it can't be made.

    The rate is of Ethernet frames, as a network card's: of 1500-byte frames, TCP's payload is 95 %.
    A full queue (50 ms) drops packets, as a switch does. The burst that a token bucket lets through
    at once is small (1.3 ms of 100 Mbit/s), so that short messages are slowed down as well.
    """

    def __init__(self, *, ranks: int, mbit: int) -> None:
        if ranks < 2 or mbit < 1:
            raise ValueError(
                f"ranks is {ranks} and mbit {mbit}; a link needs 2 ranks and 1 Mbit/s, or more"
            )
        self.ranks, self.mbit = ranks, mbit
        token = f"pyops-{os.getpid()}-{secrets.token_hex(3)}"
        self.namespaces = [f"{token}-{rank}" for rank in range(ranks)]
        self.addresses = [f"10.77.0.{rank + 1}" for rank in range(ranks)]
        self._bridge = f"{token}-bridge" if ranks > 2 else None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Link:
        every = [*self.namespaces, *([self._bridge] if self._bridge else [])]
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", *every],
            stdin=subprocess.PIPE,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._make(every)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._guard is not None:
            self._guard.communicate()  # closes the pipe, which is what it waits for
            self._guard = None

    def _make(self, namespaces: list[str]) -> None:
        for name in namespaces:
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
        if self._bridge:
            _run(f"ip -n {self._bridge} link add bridge type bridge")
            _run(f"ip -n {self._bridge} link set bridge up")
        else:
            first, second = self.namespaces
            _run(
                f"ip link add {INTERFACE} netns {first} type veth peer name {INTERFACE} "
                f"netns {second}"
            )
        for rank, (name, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            if self._bridge:
                port = f"port{rank}"
                _run(
                    f"ip link add {INTERFACE} netns {name} type veth peer name {port} "
                    f"netns {self._bridge}"
                )
                self._limit(self._bridge, port)
                _run(f"ip -n {self._bridge} link set {port} master bridge up")
            self._limit(name, INTERFACE)
            _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")

    def _limit(self, namespace: str, interface: str) -> None:
        # The kernel hands over many frames as one large packet; one above the burst would be cut up
        # at great cost.
        kib, frames = (16, 10) if self.mbit <= 200 else (64, 40) if self.mbit <= 2000 else (256, 44)
        with contextlib.suppress(RuntimeError):  # an old `ip` can't; tbf then cuts
            _run(f"ip -n {namespace} link set {interface} gso_max_segs {frames}")
        _run(
            f"ip netns exec {namespace} tc qdisc add dev {interface} root tbf rate "
            f"{self.mbit}mbit burst {kib}kb latency 50ms"
        )

    def run(
        self,
        target: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The results, by rank, of `module:function`(**options) called on every rank in a process
        of its own.

        The function finds the default Gloo group initialised over the link, one thread, and its
        rank in the environment as under torchrun; what it returns must be JSON. RuntimeError with
        the end of a rank's output when that rank fails, TimeoutError with all of them after
        `timeout` seconds; no process is left behind.
        """
        if self._guard is None:
            raise RuntimeError("the link is not up; write `with Link(...) as link:`")
        with tempfile.TemporaryDirectory(prefix="pyops-link-") as folder:
            results = [Path(folder) / f"result-{rank}.json" for rank in range(self.ranks)]
            logs = [Path(folder) / f"log-{rank}.txt" for rank in range(self.ranks)]
            started = []
            try:
                for rank in range(self.ranks):
                    command = [
                        target,
                        json.dumps(dict(options or {})),
                        str(results[rank]),
                        str(timeout),
                    ]
                    started.append(
                        self._start(rank, command, log=logs[rank], environment=environment or {})
                    )
                _wait(started, logs, deadline=time.monotonic() + timeout)
            finally:
                for process in started:
                    process.kill()
                    process.wait()
            return [json.loads(path.read_text()) for path in results]

    def _start(
        self, rank: int, command: list[str], *, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path),
        }
        enter = ["ip", "netns", "exec", self.namespaces[rank], "sh", "-c", OWN_MEMORY, "sh"]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*enter, sys.executable, "-m", "benchmarks.links.slow_link", *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **told, **environment},
            )


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], *, deadline: float) -> None:
    """Until all have ended well; raises when one has not."""

    def tail(rank: int) -> str:
        lines = logs[rank].read_text(errors="replace").splitlines()
        return f"--- rank {rank} ---\n" + "\n".join(lines[-25:])

    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise RuntimeError(
                f"rank {failed[0]} ended with {processes[failed[0]].returncode}\n{tail(failed[0])}"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(
                "the ranks did not end in time\n" + "\n".join(map(tail, range(len(logs))))
            )
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise RuntimeError(f"rank {rank} ended with {process.returncode}\n{tail(rank)}")


def wire_bytes() -> dict[str, int]:
    """{"sent", "received"}: what the kernel has counted on this rank's interface so far, in bytes,
    headers included.

    A large packet that the interface cuts into frames only later counts with one header, at most 4
    % too little.
    """
    folder = Path("/sys/class/net") / INTERFACE / "statistics"
    return {
        name: int((folder / f"{key}_bytes").read_text())
        for name, key in (("sent", "tx"), ("received", "rx"))
    }


def plain_send(*, nbytes: int) -> dict[str, float]:
    """Rank 0 sends to rank 1, with nothing of pyops: {"seconds", "mbit": payload per second,
    "wire": bytes counted}."""
    import torch
    import torch.distributed as dist

    payload = torch.zeros(nbytes, dtype=torch.uint8)
    note = torch.zeros(1)
    rank = dist.get_rank()
    for size in (1, nbytes):  # the first makes the connection
        dist.barrier()
        before, start = wire_bytes(), time.perf_counter()
        if rank == 0:
            dist.send(payload[:size], 1)
            dist.recv(note, 1)
        elif rank == 1:
            dist.recv(payload[:size], 0)
            dist.send(note, 0)
    seconds = time.perf_counter() - start
    after = wire_bytes()
    wire = max(after[key] - before[key] for key in after)
    return {"seconds": seconds, "mbit": 8e-6 * nbytes / seconds, "wire": wire}


def _serve(target: str, options: str, result: str, timeout: str) -> None:
    """A rank's process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=min(600.0, float(timeout))))
    found = function(**json.loads(options))
    dist.barrier()
    Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
