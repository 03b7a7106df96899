"""Draw docs/downpour.png from the newest rows of the bench `downpour`:
`python -m benchmarks.asynchronous.downpour_picture`.

One field for each situation: the held-out loss over virtual seconds, of each way to train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.instruments import report

__all__ = ["PICTURE", "draw", "main"]

PICTURE = report.ROOT / "docs" / "downpour.png"
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """The picture of the rows of virtual time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [row for row in rows if "curve" in row]
    situations = list(dict.fromkeys(row["situation"] for row in chosen))
    figure, fields = pyplot.subplots(
        1, len(situations), figsize=(12, 4.2), dpi=110, sharey=True, squeeze=False
    )
    for axes, situation in zip(fields[0], situations, strict=True):
        for row in chosen:
            if row["situation"] == situation:
                seconds, losses = zip(*row["curve"], strict=True)
                part = f"{100 * row['part_of_all_steps']:.0f} % of the steps"
                axes.plot(seconds, losses, label=f"{row['way']}: {part}", linewidth=1.5)
        axes.set(title=situation, xlabel="virtual seconds", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    fields[0][0].set(ylabel="loss of held-out digits")
    figure.suptitle("Four workers, steps of 16 images in 10 ms, MLP 64-256-128-10 of 203 KB")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    rows = [row for row in report.newest(report.read_rows()) if row["bench"] == "downpour"]
    if not rows:
        print("no rows yet: python -m benchmarks downpour", file=sys.stderr)
        return 1
    draw(rows, PICTURE)
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
