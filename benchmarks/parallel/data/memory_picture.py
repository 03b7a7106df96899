"""`python -m benchmarks.parallel.data.memory_picture`: draw docs/zero_memory.png from the newest
rows of the memory bench.

For each number of ranks a group of bars, one a stage: parameters, gradients and states as counted,
stacked; a line where the paper's formula is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.instruments import report

__all__ = ["draw", "main"]

PICTURE = report.ROOT / "docs" / "zero_memory.png"
KINDS = ("parameters", "gradients", "states")
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Rows of one machine, one for each stage and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=120)
    sizes = sorted({row["ranks"] for row in rows})
    ticks: list[int] = []
    labels: list[str] = []
    for group, size in enumerate(sizes):
        for row in sorted(
            (row for row in rows if row["ranks"] == size), key=lambda row: row["stage"]
        ):
            at, bottom = group * 5 + row["stage"], 0.0
            for colour, kind in enumerate(KINDS):
                height = row["kinds_per_parameter"][kind]
                axes.bar(
                    at,
                    height,
                    bottom=bottom,
                    color=f"C{colour}",
                    width=0.8,
                    label=kind if not ticks else None,
                )
                bottom += height
            formula = row["formula_per_parameter"]
            axes.plot(
                [at - 0.45, at + 0.45],
                [formula, formula],
                color="black",
                label="formula" if not ticks else None,
            )
            axes.text(at, bottom + 0.2, f"{row['kept_per_parameter']:.2f}", ha="center", fontsize=8)
            ticks.append(at)
            labels.append(
                f"{row['stage']}"
                + (f"\n{size} rank{'s' if size > 1 else ''}" if row["stage"] == 1 else "")
            )
    axes.set_xticks(ticks, labels)
    axes.set(
        xlabel="stage, for each number of ranks",
        ylabel="bytes kept per parameter and rank",
        title="ZeRO: bf16 parameters and gradients, fp32 master weights and AdamW's states",
    )
    axes.set_ylim(top=19)
    axes.legend(fontsize=9)
    axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    rows = [row for row in report.newest(report.read_rows()) if row["bench"] == "memory"]
    if not rows:
        print("no rows of the memory bench yet: python -m benchmarks memory", file=sys.stderr)
        return 1
    draw(rows, PICTURE)
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(rows)} bars")
    return 0


if __name__ == "__main__":
    sys.exit(main())
