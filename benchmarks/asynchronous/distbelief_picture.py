"""Draw docs/distbelief.png from the newest rows of the bench `distbelief`:
`python -m benchmarks.asynchronous.distbelief_picture`.

Left, accuracy against virtual seconds; right, accuracy by the number of replicas; below, what the
paper says beside what these runs do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.instruments import report

__all__ = ["FINDINGS", "draw", "findings", "main"]

PICTURE = report.ROOT / "docs" / "distbelief.png"
Row = dict[str, Any]
FINDINGS = (  # Dean et al. 2012, sections 4.1, 4.2 and 5
    "Downpour SGD with Adagrad is clearly dominant up to 2,000 cores",
    "Adagrad lets more replicas work at once; with a warm start it is stable",
    "Sandblaster scales to thousands of machines, slow ones among them",
)


def _reached(row: Row) -> str:
    """When the first seed's run had read 96 % of the held-out digits."""
    at = row["reached_s"][0]
    return "never" if at is None else f"after {at:.0f} s"


def findings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(what the paper says, what the rows say) for each finding."""
    found = {row["case"]: row for row in rows}
    batch, slow = (found[f"Sandblaster{way}, 32 replicas"] for way in ("", ", one 50 times slower"))
    ways = ("Adagrad", "Adagrad, warm start", "Sandblaster", "SGD")
    reached = [f"{way} {_reached(found[f'{way}, 32 replicas'])}" for way in ways]
    falls = {
        way: ", ".join(f"{row['percent']:.1f}" for row in rows if row["way"] == way)
        for way in ("SGD", "Adagrad", "Adagrad, warm start")
    }
    times = slow["virtual_s"] / batch["virtual_s"]
    return [
        (FINDINGS[0], f"96 % with 32 replicas: {'; '.join(reached)}"),
        (
            FINDINGS[1],
            f"1, 8, 32 replicas: SGD {falls['SGD']} %, Adagrad {falls['Adagrad']} %; 8, 32 with a "
            f"warm start {falls['Adagrad, warm start']} %",
        ),
        (
            FINDINGS[2],
            f"{batch['passes_an_iteration']:.2f} passes an iteration; one worker 50 times slower: "
            f"{times:.2f} times the seconds",
        ),
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """The picture of all cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 5.6), dpi=110, width_ratios=(3, 2), sharey=True
    )
    for row in rows:
        if row["replicas"] == 32 or row["case"] == "SGD, 1 replica":
            seconds, accuracy = zip(*row["curve"], strict=True)
            style = "--" if "slower" in row["case"] else "-"
            left.plot(seconds, accuracy, style, label=row["case"], marker=".", linewidth=1.4)
    left.set(
        xlabel="virtual seconds (a step of 16 images takes 1)",
        ylabel="held-out digits read, percent",
        xscale="log",
    )
    for way in dict.fromkeys(row["way"] for row in rows if "mean_staleness" in row):
        chosen = [row for row in rows if row["way"] == way]
        counts = [row["replicas"] for row in chosen]
        right.plot(counts, [row["percent"] for row in chosen], marker="o", label=way)
    right.set(xlabel="replicas", xscale="log", xticks=[1, 8, 32], xticklabels=["1", "8", "32"])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left")
    lines = [f"DistBelief: {theirs}.   Here: {ours}." for theirs, ours in findings(rows)]
    figure.text(0.02, 0.02, "\n".join(lines), fontsize=7.5, va="bottom")
    figure.suptitle("1,800 pushes of 16 images of handwritten digits, MLP 64-256-128-10")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    rows = [row for row in report.newest(report.read_rows()) if row["bench"] == "distbelief"]
    if not rows:
        print("no rows yet: python -m benchmarks distbelief", file=sys.stderr)
        return 1
    draw(rows, PICTURE)
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
