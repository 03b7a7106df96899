"""`python -m benchmarks.parallel.context.context_memory_picture`: draw docs/context_memory.png from
the newest rows of the bench of the longest row: a bar for each number of ranks, and a line where as
many times the length of one would be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.instruments import report

__all__ = ["draw", "main"]

PICTURE = report.ROOT / "docs" / "context_memory.png"
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Rows of one machine, one for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    rows = sorted(rows, key=lambda row: row["ranks"])
    one = rows[0]["tokens"] / rows[0]["ranks"]
    for at, row in enumerate(rows):
        axes.bar(at, row["tokens"], color="C0", width=0.6)
        axes.text(at, row["tokens"], f"{row['tokens']:,}", ha="center", va="bottom", fontsize=9)
        ideal = one * row["ranks"]
        axes.plot(
            [at - 0.4, at + 0.4],
            [ideal, ideal],
            color="black",
            linewidth=1,
            label=None if at else "as many times that of one rank",
        )
    axes.set_xticks(range(len(rows)), [str(row["ranks"]) for row in rows])
    gib = rows[0]["limit_bytes"] / 2**30
    axes.set(
        xlabel="ranks that share a row (cp)",
        ylabel="tokens",
        title=f"Longest row that a GPT trains on, {gib:g} GiB a process",
    )
    axes.legend(fontsize=9, loc="upper left")
    axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Draw; 1 where there are no rows."""
    rows = [row for row in report.newest(report.read_rows()) if row["bench"] == "context_memory"]
    if not rows:
        print("no rows yet: python -m benchmarks context_memory", file=sys.stderr)
        return 1
    draw(rows, PICTURE)
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(rows)} bars")
    return 0


if __name__ == "__main__":
    sys.exit(main())
