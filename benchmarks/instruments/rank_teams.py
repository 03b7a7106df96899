"""Teams of processes that take turns: each library trains in ranks of its own, and only one team
works at a time.

    this process                       ranks of a team
    Team("torch DDP").call("step")  -> each: barrier, step, answer      (all others wait)

So the peak memory of a rank is one library's, a library that changes torch changes it for itself
alone, and one that is installed for another interpreter runs in that one. A team is
`python -m benchmarks.parallel.tensor.llama_teams NAME`; a line of its standard input names a
function to call, and a line of JSON on a pipe of its own is the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Team", "serve"]

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = "PYOPS_BENCH_ANSWERS"  # the number of the pipe's file, of one rank
TIMEOUT = 300.0  # seconds that a call may take


class Team:
    """The ranks of one library; they are ready when the first call has answered.

    Args:
        name: Of the library's way, as the module knows it.
        ranks: How many processes.
        module: That is run in each.
        python: The interpreter; None: this one.
        size: Which of the module's models.

    Attributes:
        name: As given.
    """

    def __init__(
        self,
        name: str,
        *,
        ranks: int,
        size: str,
        module: str = "benchmarks.parallel.tensor.llama_teams",
        python: str | None = None,
    ) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it is closed with the ranks
        self._ranks: list[tuple[subprocess.Popen[bytes], Any]] = []
        for rank in range(ranks):
            ours, theirs = os.pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *_inherited()])),
                ANSWERS: str(theirs),
            }
            process = subprocess.Popen(
                [python or sys.executable, "-m", module, name, size],
                env={**os.environ, **variables},
                cwd=tempfile.gettempdir(),
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=self._errors,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
            os.close(theirs)
            self._ranks.append((process, os.fdopen(ours)))

    def call(self, what: str) -> list[Any]:
        """What the function `what` returns on each rank.

        Raises:
            RuntimeError: A rank raised, ended or did not answer; then the team is of no use.
        """
        for process, _ in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the answer that is missing says so
                process.stdin.write(f"{what}\n".encode())
        return [self._answer(rank) for rank in range(len(self._ranks))]

    def _answer(self, rank: int) -> Any:
        _, answers = self._ranks[rank]
        ready, _, _ = select.select([answers], [], [], TIMEOUT)
        line = answers.readline() if ready else ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()[-500:]
            how = "ended" if ready else f"said nothing for {TIMEOUT:g} s"
            raise RuntimeError(f"{self.name}: rank {rank} {how}; printed was: {said}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self.name}: rank {rank}: {found['error']}")
        return found["result"]

    def close(self) -> None:
        """End the ranks."""
        for process, answers in self._ranks:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            answers.close()
        self._ranks = []
        self._errors.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _inherited() -> list[str]:
    """This process' search path of modules."""
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def serve(make: Callable[[], Mapping[str, Callable[[], Any]]]) -> None:
    """A rank's life: make its functions, then call those that are named, one after another.

    Args:
        make: Returns them; an error in it is the first call's.
    """
    with os.fdopen(int(os.environ[ANSWERS]), "w") as answers:
        functions: Mapping[str, Callable[[], Any]] = {}
        problem = None
        try:
            functions = make()
        except Exception as error:
            problem = error
        for line in sys.stdin:
            try:
                if problem is not None:
                    raise problem
                answer = {"result": functions[line.strip()]()}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
