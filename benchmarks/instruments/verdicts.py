"""Whether a row meets its targets; `python -m benchmarks.instruments.verdicts ROWS.jsonl` lists
those of a file of rows.

    targets   {rival: how many times faster than it ours ought to be}
    least     {field of the row: what it ought to reach at least}, percent_of_copy say
    most      {field of the row: what it ought to stay within}; the field "ms" is our median time

A target whose field is missing, because a rival is not there or a figure could not be taken, is
neither met nor missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Verdict", "main", "verdicts"]

Row = dict[str, Any]


class Verdict(NamedTuple):
    """One target of a row: in words, what was found, and whether that does."""

    target: str
    found: float
    met: bool


def _field(row: Row, name: str) -> float | None:
    if name == "ms":
        return next((us[1] / 1e3 for us in row["us"].values()), None)
    value = row.get(name)
    return float(value) if value is not None else None


def verdicts(row: Row) -> list[Verdict]:
    """All targets of a row that can be judged: those against rivals first."""
    found = [
        Verdict(f"{aim:g}x {rival}", row["speedup"][rival], row["speedup"][rival] >= aim)
        for rival, aim in row.get("targets", {}).items()
        if rival in row["speedup"]
    ]
    for sign, key in ((">=", "least"), ("<=", "most")):
        for name, aim in row.get(key, {}).items():
            if (value := _field(row, name)) is not None:
                met = value >= aim if key == "least" else value <= aim
                found.append(Verdict(f"{name} {sign} {aim:g}", value, met))
    return found


def main(arguments: Sequence[str]) -> int:
    """Print each missed target, and how many there are of both; returns 0 whatever they say."""
    rows = [
        json.loads(line)
        for path in arguments
        for line in Path(path).read_text().splitlines()
        if line.strip()
    ]
    met = 0
    for row in rows:
        for verdict in verdicts(row):
            met += verdict.met
            if not verdict.met:
                print(
                    f"BELOW {row['bench']}: {row['case']}: {verdict.target}, found "
                    f"{verdict.found:g}"
                )
    judged = sum(len(verdicts(row)) for row in rows)
    print(f"{met} targets met, {judged - met} missed, in {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
