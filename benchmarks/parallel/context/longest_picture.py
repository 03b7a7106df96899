"""`python -m benchmarks.parallel.context.longest_picture`: draw docs/attention/longest.png from the
newest rows of the benches `longest` and `block_sparse`.

The page shows the picture from then on.

Left, the longest sequence of a BERT-base within a limit of memory, in each setting, and where
DeepSpeed's published factor over explicit scores is. Right, how much faster attention is, forward
and backward, as fewer blocks are visited; and DeepSpeed's published factor of a whole step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.instruments import report
from benchmarks.parallel.context.bench_longest import PUBLISHED, SETTINGS

__all__ = ["PICTURE", "draw", "main"]

PICTURE = report.ROOT / "docs" / "attention" / "longest.png"
PAGE = report.ROOT / "docs" / "attention.md"
PLACE = re.compile(r"(<!-- picture:longest -->\n).*?(<!-- /picture -->)", re.DOTALL)
SHOWN = "![longest sequences, and time by density](attention/longest.png)\n"
STEP = 6.3  # times as fast at most, a step of BERT base; DeepSpeed's post of 9 September 2020
Row = dict[str, Any]


def lengths(axes: Any, rows: Sequence[Row]) -> None:
    """A bar for each setting."""
    found = {row["setting"]: row for row in rows}
    names = [name for name in SETTINGS if name in found]
    tokens = [found[name]["tokens"] for name in names]
    axes.bar(range(len(names)), tokens, color=[f"C{n}" for n in range(len(names))], width=0.7)
    for n, count in enumerate(tokens):
        axes.text(n, count, f"{count:,}\n{count / tokens[0]:.1f}x", ha="center", va="bottom")
    axes.axhline(
        PUBLISHED * tokens[0],
        color="black",
        linestyle="--",
        label=f"DeepSpeed, published: {PUBLISHED:g}x of dense (BERT base, V100)",
    )
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    limit = found[names[0]]["limit_mib"]
    axes.set(
        ylabel="tokens",
        title=f"Longest sequence of a BERT-base within {limit / 1024:g} GiB",
        ylim=(0, 1.25 * max(*tokens, PUBLISHED * tokens[0])),
    )
    axes.legend(loc="upper left", fontsize=9)


def densities(axes: Any, rows: Sequence[Row]) -> None:
    """How many times faster than every block, over the part that is visited."""
    rows = sorted(rows, key=lambda row: row["part_of_causal"])
    parts = [row["part_of_causal"] for row in rows]
    for rival, label in (
        ("pyops, every block", "beside every block"),
        ("torch SDPA, causal", "beside torch's causal attention"),
    ):
        axes.plot(parts, [row["speedup"][rival] for row in rows], marker="o", label=label)
    axes.plot(parts, [1 / part for part in parts], color="grey", label="1 / visited")
    axes.axhline(
        STEP,
        color="black",
        linestyle="--",
        label=f"DeepSpeed, published: a step of BERT base up to {STEP:g}x",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="visited, of the blocks of causal attention",
        ylabel="times as fast, forward and backward",
        title=rows[0]["case"].partition(", ")[2].partition(",")[0].replace("T = ", "")
        + " tokens, windows of blocks of 64",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Rows of one machine, of both benches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=110)
    lengths(left, [row for row in rows if row["bench"] == "longest" and "tokens" in row])
    densities(right, [row for row in rows if row["bench"] == "sparse_density"])
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Returns the exit status."""
    rows = report.newest(report.read_rows())
    needed = [row for row in rows if row["bench"] in ("longest", "sparse_density")]
    if {row["bench"] for row in needed} != {"longest", "sparse_density"}:
        print("no rows yet: python -m benchmarks longest block_sparse", file=sys.stderr)
        return 1
    draw(needed, PICTURE)
    PAGE.write_text(PLACE.sub(lambda found: f"{found[1]}{SHOWN}{found[2]}", PAGE.read_text()))
    print(f"{PICTURE.relative_to(report.ROOT)}: {len(needed)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
