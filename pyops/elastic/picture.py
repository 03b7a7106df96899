"""A picture of an elastic run, from its rows of metrics: what is frozen, who does what, how fast,
how well.

    frozen blocks    ____----======          rows: {"step": 120, "epoch": 3, "frozen": 5,
    rank 0  | stage 0     | stage 0 | ...           "stages": 2, "replicas": 2,
    rank 1  | stage 1     | stage 1 | ...           "samples_per_s": 812.0, "cached": True,
    rank 2  | stage 2     | stage 0 | ...           "validation_accuracy": ...}
    samples/s        ____----======

After figure 9 of PipeTransformer (He et al., 2021). The axis is epochs; an epoch is as wide as any
other, however fast.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LayoutSpan", "places", "plot_elastic", "stretches"]

Row = Mapping[str, Any]
IDLE, FROZEN, PLAIN, CACHED = "0.88", "#7aa6c2", "#4c4c4c", "#d95f02"
HUES = ("Blues", "Oranges", "Greens", "Purples", "Reds", "YlOrBr", "PuRd", "BuGn")


@dataclass(frozen=True)
class LayoutSpan:
    """Steps, one after the other, of one layout.

    Attributes:
        begin, end: In epochs.
        seconds: That the change to it took, None where it isn't known or there was none.
    """

    begin: float
    end: float
    frozen: int
    stages: int
    replicas: int
    seconds: float | None = None


def places(rows: Sequence[Row]) -> list[float]:
    """Where each row's step ends, in epochs. An epoch that is not over is taken to have as many
    steps as the longest."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["epoch"]] = counts.get(row["epoch"], 0) + 1
    last, most = max(counts, default=0), max(counts.values(), default=1)
    found, seen = [], dict.fromkeys(counts, 0)
    for row in rows:
        epoch = row["epoch"]
        seen[epoch] += 1
        found.append(epoch + seen[epoch] / (most if epoch == last else counts[epoch]))
    return found


def stretches(rows: Sequence[Row]) -> list[LayoutSpan]:
    """The layouts of a run, in their order.

    Args:
        rows: With "epoch", "frozen", "stages" and "replicas"; "transition_s" in a layout's first
            row, or the last before it, says how long the change to it took.
    """
    ends, found, start = places(rows), list[LayoutSpan](), 0
    for i, row in enumerate(rows):
        layout = row["frozen"], row["stages"], row["replicas"]
        if i + 1 < len(rows) and layout == tuple(
            rows[i + 1][key] for key in ("frozen", "stages", "replicas")
        ):
            continue
        begin, seconds = float(rows[0]["epoch"]), None
        if found:
            begin, seconds = (
                found[-1].end,
                rows[start].get("transition_s", rows[start - 1].get("transition_s")),
            )
        found.append(LayoutSpan(begin, ends[i], *layout, seconds))
        start = i + 1
    return found


def plot_elastic(
    path: Path, rows: Iterable[Row], *, ranks: int, title: str, most: int | None = None
) -> bool:
    """Draw the run; False, and no file, without matplotlib or rows that say what is frozen.

    Args:
        rows: As a run writes them to metrics.jsonl. Those without "frozen" are left out.
        ranks: All of the run, idle ones too; rank r is stage r % stages of replica r // stages.
        most: How many blocks can be frozen (default: the most that were).
    """
    rows = [
        row for row in rows if all(key in row for key in ("epoch", "frozen", "stages", "replicas"))
    ]
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not rows:
        return False
    measured = next(
        (
            key
            for key in ("validation_accuracy", "validation_loss")
            if any(key in row for row in rows)
        ),
        None,
    )
    heights = [1.2, 0.45 + 0.28 * ranks, 1.5, *([1.1] if measured else [])]
    figure = Figure(figsize=(9, sum(heights) + 1.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    several = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    parts = stretches(rows)
    _draw_frozen(several[0], parts, most or max(part.frozen for part in parts))
    _draw_ranks(several[1], parts, ranks, colormaps)
    _draw_rates(several[2], rows)
    if measured:
        _draw_measured(several[3], rows, measured)
    for axes in several:
        for part in parts[1:]:
            axes.axvline(part.begin, color="0.35", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    several[-1].set(xlabel="epoch", xlim=(parts[0].begin, parts[-1].end))
    several[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    return True


def _draw_frozen(axes: Any, parts: Sequence[LayoutSpan], most: int) -> None:
    """How deep, and what the changes took."""
    most = max(most, 1)
    axes.stairs(
        [part.frozen for part in parts],
        [*[part.begin for part in parts], parts[-1].end],
        fill=True,
        color=FROZEN,
    )
    for part in parts:
        middle = (part.begin + part.end) / 2
        axes.text(
            middle,
            part.frozen + 0.04 * most,
            str(part.frozen),
            ha="center",
            va="bottom",
            fontsize=7,
        )
    for part in parts[1:]:
        if part.seconds is not None:
            text = f"{part.seconds:.2f} s"
            axes.text(
                part.begin, 1.32 * most, text, ha="center", va="bottom", fontsize=6.5, color="0.3"
            )
    axes.set(ylabel="frozen blocks", ylim=(0, 1.3 * most))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_ranks(axes: Any, parts: Sequence[LayoutSpan], ranks: int, maps: Any) -> None:
    """A line for each rank: its replica by colour, its stage by shade."""
    whole = parts[-1].end - parts[0].begin
    blocks = [
        list(group)
        for _, group in itertools.groupby(parts, lambda part: (part.stages, part.replicas))
    ]
    for block, rank in itertools.product(blocks, range(ranks)):
        begin, stages = block[0].begin, block[0].stages
        width, active = block[-1].end - begin, rank < stages * block[0].replicas
        replica, stage = divmod(rank, stages)
        darkness = 0.62 - 0.42 * stage / max(1, stages - 1)
        shade = maps[HUES[replica % len(HUES)]](darkness) if active else IDLE
        axes.broken_barh(
            [(begin, width)],
            (rank - 0.46, 0.92),
            facecolors=[shade],
            edgecolor="white",
            linewidth=0.8,
        )
        name = (
            f"replica {replica}" + (f", stage {stage}" if stages > 1 else "") if active else "idle"
        )
        short = (f"{replica}.{stage}" if stages > 1 else f"{replica}") if active else ""
        room = 110 * width / whole  # characters
        text = name if len(name) < room else short if len(short) < room else ""
        colour = "white" if active and darkness > 0.5 else "0.1"
        axes.text(begin + width / 2, rank, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set(ylabel="rank", yticks=range(ranks), ylim=(ranks - 0.4, -0.6))


def _draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    """Each step, and the median of each epoch and layout."""
    begin = float(rows[0]["epoch"])
    ends = places(rows)
    spans = [*zip([begin, *ends], ends, rows, strict=False)]
    known = [span for span in spans if span[2].get("samples_per_s") is not None]
    axes.plot(
        [end for _, end, _ in known],
        [row["samples_per_s"] for *_, row in known],
        color="0.75",
        linewidth=0.7,
        label="each step",
    )

    def key(span: tuple[float, float, Row]) -> tuple[Any, ...]:
        row = span[2]
        return row["epoch"], row["frozen"], row["stages"], row["replicas"], bool(row.get("cached"))

    labels, medians = {False: "median of an epoch", True: "the same, with the cache"}, []
    for (*_, cached), group in itertools.groupby(known, key):
        several = list(group)
        medians.append(middle := statistics.median(row["samples_per_s"] for *_, row in several))
        axes.plot(
            [several[0][0], several[-1][1]],
            [middle] * 2,
            color=CACHED if cached else PLAIN,
            linewidth=2.2,
            label=labels.pop(cached, None),
            solid_capstyle="butt",
        )
    axes.set(ylabel="samples/s")
    if medians and max(medians) > 20 * min(medians) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, loc="upper left", framealpha=1, edgecolor="none")


def _draw_measured(axes: Any, rows: Sequence[Row], key: str) -> None:
    """On held-out data."""
    found = [
        (end, row[key])
        for end, row in zip(places(rows), rows, strict=True)
        if row.get(key) is not None
    ]
    scale = 100 if key == "validation_accuracy" else 1
    ends, values = [end for end, _ in found], [scale * value for _, value in found]
    axes.plot(ends, values, color="#1b7837", marker="o", markersize=3, linewidth=1)
    axes.set(ylabel="validation\naccuracy, %" if scale == 100 else "validation\nloss")
    axes.grid(axis="y", alpha=0.3)
