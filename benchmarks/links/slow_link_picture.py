"""`python -m benchmarks.links.slow_link_picture`: draw docs/slow_link.png from the newest rows of
the slow-link bench's runs.

Loss against seconds, one line for each way to communicate; all take the same number of steps, so a
line that ends early is a run that was done early.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.instruments import report
from benchmarks.links.slow_link_ranks import WAYS

__all__ = ["draw", "main", "smooth"]

BATCH = 8  # of the runs that are drawn
PICTURE = report.ROOT / "docs" / "slow_link.png"
Row = dict[str, Any]


def smooth(values: Iterable[float], *, keep: float = 0.9) -> list[float]:
    """An exponential mean without the bias towards the first value."""
    found, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found


def draw(rows: Iterable[Row], path: Path) -> None:
    """One line a row that has a "curve": [[seconds, loss], ...]; rows are of one network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    rows = list(rows)
    colours = {way: f"C{i}" for i, way in enumerate(WAYS)}
    for row in rows:
        (way, *_) = row["us"]
        seconds, loss = zip(*row["curve"], strict=True)
        label = f"{way}: {row['us'][way][1] / 1e6:.0f} s, {row['validation_loss']:.3f}"
        line = smooth(loss)
        axes.plot(seconds, line, color=colours.get(way), linewidth=1.6, label=label)
        axes.plot(seconds[-1:], line[-1:], color=colours.get(way), marker="o", markersize=5)
    first = rows[0]
    speed = f"{first['mbit']} Mbit/s" if first["mbit"] < 1000 else f"{first['mbit'] // 1000} Gbit/s"
    axes.set(
        xlabel="seconds of training",
        ylabel="training loss, nats per byte (running mean)",
        title=f"The example GPT, {first['ranks']} ranks, {speed}: {len(first['curve'])} steps each",
    )
    axes.set_ylim(top=3.5)
    axes.legend(title="way: time taken, validation loss at the end", fontsize=9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    rows = [
        row for row in report.newest(report.read_rows()) if "curve" in row and row["batch"] == BATCH
    ]
    if not rows:
        print(
            "no runs of the slow-link bench yet: python -m benchmarks slow_link --only loss",
            file=sys.stderr,
        )
        return 1
    draw(rows, PICTURE)
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(rows)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
