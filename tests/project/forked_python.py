"""Programs that run as in an interpreter of their own, but in forks of one that has imported what
takes long.

    server      imports torch, then waits
       |--- fork     its folder, environment, path and output are those of `python -c program`
       `--- fork     and it ends as that would

An import of torch takes more than a second of each process, and a fork of one that has it a
hundredth. The server has imported nothing of pyops.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["ForkedPython"]

SERVER = """
import importlib, json, os, sys, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)
PATH = sys.path[1:]


def run(program, arguments, folder, environment, said):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *arguments]
    added = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = ["", *added, *PATH]
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = run(**json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""
TIMEOUT = 120.0  # seconds that a program may take


class ForkedPython:
    """An interpreter that has imported `modules`; each `run` is a fork of it.

    Args:
        modules: What the server imports. A program finds it in `sys.modules`.
    """

    def __init__(self, *modules: str) -> None:
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=alone,
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )

    def run(
        self, program: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What `python -c program arguments` gives in that folder and environment.

        Args:
            program: The source of the program.
            arguments: What it finds in `sys.argv[1:]`.
            cwd: The folder that it runs in, the first entry of its `sys.path`.
            env: Its environment; None for that of the test. The entries of PYTHONPATH are those
                of its `sys.path`.

        Raises:
            TimeoutError: It took longer than TIMEOUT.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            said = [Path(folder, name) for name in ("stdout", "stderr")]
            for path in said:
                path.touch()
            asked = {
                "program": program,
                "arguments": arguments,
                "folder": str(cwd),
                "environment": dict(os.environ if env is None else env),
                "said": [str(path) for path in said],
            }
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            ended, _, _ = select.select([self._server.stdout], [], [], TIMEOUT)
            if not ended:
                os.killpg(self._server.pid, signal.SIGKILL)
                raise TimeoutError(f"it did not end within {TIMEOUT:g} s:\n{program}")
            code = self._server.stdout.readline()
            assert code, f"the interpreter ended with {self._server.wait()}"
            out, err = (path.read_text() for path in said)
        return subprocess.CompletedProcess([program, *arguments], int(code), out, err)

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
