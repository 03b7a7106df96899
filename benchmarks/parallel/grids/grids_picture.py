"""Draw docs/grids.png from the cost functions of the grids: what a rank receives for a layer,
forward and backward, by the number of ranks.

    python -m benchmarks.parallel.grids.grids_picture

Left with as many tokens as the model is wide, right with four times as many.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.instruments import report
from pyops.tensor_parallel.grids import grid_shape
from pyops.tensor_parallel.grids.costs import LayerCost, best_with_zero, cost_1d, cost_grid

__all__ = ["NAMES", "draw", "main", "series"]

PICTURE = report.ROOT / "docs" / "grids.png"
NAMES = ("1d", "1d, sequence parallel", "1d x ZeRO 3", "2d", "2.5d", "3d")
RANKS = (4, 8, 9, 16, 18, 27, 32, 36, 49, 64)
RATIOS = (1, 4)  # tokens over the width
WIDTH = 4096


def _cost(name: str, tokens: int, ranks: int) -> LayerCost | None:
    """None where so many ranks make no such grid."""
    if name == NAMES[0]:
        return cost_1d(tokens, WIDTH, ranks=ranks, sequence_parallel=False)
    if name == NAMES[1]:
        return cost_1d(tokens, WIDTH, ranks=ranks)
    if name == NAMES[2]:
        return best_with_zero(tokens, WIDTH, ranks=ranks)[2]
    try:
        sizes = grid_shape(ranks, name)
    except ValueError:
        return None
    if name == "2.5d" and sizes[0] == 1:  # it is a grid in two dimensions
        return None
    return cost_grid(tokens, WIDTH, ranks=ranks, mode=name)


def series(ratio: int) -> dict[str, list[tuple[int, float]]]:
    """{layout: [(ranks, elements received in forward and backward over width^2)]}.

    Args:
        ratio: Tokens over the width.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for name in NAMES:
        costs = [(ranks, _cost(name, ratio * WIDTH, ranks)) for ranks in RANKS]
        found[name] = [(ranks, cost.step / WIDTH**2) for ranks, cost in costs if cost is not None]
    return found


def draw(path: Path) -> None:
    """The picture.

    Args:
        path: Of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120, sharey=True)
    for axes, ratio in zip(both, RATIOS, strict=True):
        _panel(axes, ratio)
    both[0].set_ylabel("elements received for a layer,\nforward and backward, over h²")
    both[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _panel(axes: Any, ratio: int) -> None:
    for number, (name, points) in enumerate(series(ratio).items()):
        ranks, received = zip(*points, strict=True)
        style = "--" if name.startswith("1d") else "-"
        axes.plot(ranks, received, style, marker="o", markersize=4, color=f"C{number}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = (4, 8, 16, 32, 64)
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set(xlabel="ranks", title=f"tokens = {ratio} h")
    axes.grid(alpha=0.3)


def main() -> int:
    """Draw."""
    draw(PICTURE)
    print(PICTURE.relative_to(report.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
