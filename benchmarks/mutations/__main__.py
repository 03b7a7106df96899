"""Damaged and odd input by the thousand: checkpoints, Hugging Face folders, configurations; what
becomes of each.

    python -m benchmarks.mutations                      5,000 of them, the same ones each time
    python -m benchmarks.mutations --count 600 --kind hub --seed 7

Each is a sound folder or file with one thing changed: bits, bytes, names, types, sizes, files. It
must be refused with
an error that names the file or the key, or be read as what it says. What is counted as a failure:

    raw      an exception of another kind (TypeError, KeyError, RuntimeError of torch, ...), or one
             that names nothing
    silent   it was read, and a value is not what the files say
    slow     it took more than LIMIT seconds of this process's CPU time, or waited for something for
             more than WAIT seconds
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutations.checkpoint import Checkpoint
from benchmarks.mutations.hub import Hub
from benchmarks.mutations.toml import Toml

__all__ = ["KINDS", "Verdict", "judge", "run"]

LIMIT = 10.0  # seconds of CPU time, which are the same on a busy host
WAIT = 120.0  # seconds by the clock, for what waits and computes nothing
KINDS: dict[str, Callable[[Path], Any]] = {"checkpoint": Checkpoint, "hub": Hub, "toml": Toml}


@dataclass(frozen=True)
class Verdict:
    """What became of one: "refused", "read", or a failure; and what was changed."""

    kind: str
    outcome: str
    change: str
    text: str

    @property
    def failed(self) -> bool:
        return self.outcome not in ("refused", "read")


class _TooSlow(BaseException):
    pass


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise _TooSlow within, once either limit has passed."""
    timers = [
        (signal.ITIMER_PROF, signal.SIGPROF, LIMIT, "of CPU time"),
        (signal.ITIMER_REAL, signal.SIGALRM, WAIT, "in all"),
    ]

    def stop(number: int, _: object) -> None:
        (text,) = (
            f"more than {limit:g} s {what}" for _, kind, limit, what in timers if kind == number
        )
        raise _TooSlow(text)

    before = [signal.signal(kind, stop) for _, kind, _, _ in timers]
    try:
        for timer, _, limit, _ in timers:
            signal.setitimer(timer, limit)
        yield
    finally:
        for (timer, kind, _, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(kind, handler)


def judge(kind: str, subject: Any, folder: Path, number: int, *, seed: int = 0) -> Verdict:
    """Change the sound thing in its way `number`, and read it. subject: of `KINDS`; folder: to be
    made and removed."""
    change = subject.mutate(random.Random(f"{seed} {kind} {number}"), folder)
    try:
        with (
            _limited(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            problem = subject.read(folder, change)
        outcome, text = ("silent", problem) if problem else ("read", "")
    except _TooSlow as late:
        outcome, text = "slow", str(late)
    except subject.refusals as error:
        text = str(error)
        named = any(name in text for name in (*change.names, str(folder)))
        named = named and (not change.keys or any(key in text for key in change.keys))
        outcome = "refused" if named else "raw"
    except Exception as error:
        outcome, text = "raw", f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(kind, outcome, change.text, text)


def run(count: int, *, kinds: list[str], seed: int = 0) -> list[Verdict]:
    """`count` verdicts, dealt out to the kinds in turn."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        subjects = {kind: KINDS[kind](Path(place) / f"sound-{kind}") for kind in kinds}
        for number in range(count):
            kind = kinds[number % len(kinds)]
            found.append(
                judge(kind, subjects[kind], Path(place) / f"{kind}-{number}", number, seed=seed)
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument(
        "--kind", choices=list(KINDS), action="append", help="one or more of these; all unless told"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started = time.perf_counter()
    found = run(given.count, kinds=given.kind or list(KINDS), seed=given.seed)
    counts = Counter((verdict.kind, verdict.outcome) for verdict in found)
    for verdict in found:
        if verdict.failed:
            print(
                f"{verdict.outcome:7} {verdict.kind:10} {verdict.change}\n        "
                f"{verdict.text[:300]}"
            )
    for kind in given.kind or list(KINDS):
        print(
            json.dumps(
                {
                    "kind": kind,
                    **{outcome: n for (k, outcome), n in sorted(counts.items()) if k == kind},
                }
            )
        )
    print(
        json.dumps(
            {
                "count": len(found),
                "failed": sum(v.failed for v in found),
                "seed": given.seed,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )
    return int(any(verdict.failed for verdict in found))


if __name__ == "__main__":
    raise SystemExit(main())
