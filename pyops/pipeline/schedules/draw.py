"""Pictures of a timeline: as the papers draw it (svg, png, pdf), as text for a terminal, and as a
trace for Perfetto.

0 | 0 1 2 . . 0' 0' 3 1' 1' ...       a forward is its micro-batch, a backward has a mark, W two
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyops.pipeline.schedules.simulate import Timeline

__all__ = ["draw", "text", "trace"]

COLOURS = {
    "F": "#4878b8",
    "B": "#e08a4c",
    "I": "#e08a4c",
    "W": "#6aa56a",
    "R": "#9db8d8",
    "U": "#7a5aa6",
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "R": "forward again",
    "U": "optimizer step",
}
CHANNELS = {"F": "activations", "B": "gradients", "FS": "skips", "BS": "gradients of skips"}
LARGEST = 4000  # boxes that a picture can still show


def draw(timeline: Timeline, path: Path | str, *, title: str | None = None) -> Path:
    """Write the picture to `path`, whose ending says what it becomes. A line for each rank, time to
    the right.

    Args:
        timeline: Of `simulate`, or recorded.
        path: The file; its ending is .svg, .png or .pdf.
        title: Above the picture.

    Raises:
        ValueError: For endings that are none of .svg, .png, .pdf.
        ImportError: Without matplotlib.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{path} should be a picture; give it the ending .svg, .png or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError:
        raise ImportError(
            "drawing a schedule needs matplotlib: pip install matplotlib, or pyops-train[train]"
        ) from None
    made = timeline.schedule
    boxes = sorted(
        (begin, end, action) for action, (begin, end) in timeline.actions.items() if end > begin
    )
    if len(boxes) > LARGEST:
        raise ValueError(
            f"{len(boxes)} actions are too many for one picture, which shows {LARGEST}; "
            "draw fewer micro-batches"
        )
    first = min(begin for begin, _, _ in boxes)
    shortest = min(end - begin for begin, end, _ in boxes)
    width = min(60.0, max(6.0, 0.22 * timeline.makespan / shortest))
    figure = Figure(figsize=(width, 0.9 + 0.34 * made.num_ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for begin, end, action in boxes:
        rank = made.rank_of[action.stage]
        chunk = made.stages_of(rank).index(action.stage)
        shade = 1.0 - 0.45 * chunk / max(1, made.num_stages // made.num_ranks)
        axes.add_patch(
            Rectangle(
                (begin - first, rank - 0.42),
                end - begin,
                0.84,
                facecolor=COLOURS[action.kind],
                alpha=shade,
                edgecolor="white",
                linewidth=0.5,
            )
        )
        axes.text(
            (begin + end) / 2 - first,
            rank,
            str(action.number),
            ha="center",
            va="center",
            fontsize=6,
            color="white",
            clip_on=True,
        )
    axes.set(
        xlim=(0, timeline.makespan),
        ylim=(made.num_ranks - 0.5, -0.5),
        yticks=range(made.num_ranks),
        xlabel="time",
        ylabel="rank",
    )
    axes.set_title(
        title
        or f"{made.name}: {made.num_ranks} ranks, {made.num_microbatches} micro-batches, "
        f"{timeline.bubble:.1%} idle",
        fontsize=9,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    kinds = [kind for kind in MEANINGS if any(action.kind == kind for _, _, action in boxes)]
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
        fontsize=7,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def text(timeline: Timeline, *, width: int = 120, fit: bool = False) -> str:
    """A line for each rank, cut to `width` characters: micro-batches, ' for B and I, " for W, ~ for
    R, ! for U, . for idle.

    Args:
        fit: The whole timeline in that width, of which a column is a part; else a column is the
            shortest action.
    """
    made = timeline.schedule
    marks = {"F": "", "B": "'", "I": "'", "W": '"', "R": "~", "U": "!"}
    first = min(begin for begin, _ in timeline.actions.values())
    unit = min(
        (end - begin for begin, end in timeline.actions.values() if end > begin), default=1.0
    )
    cell = max(len(str(a.number) + marks[a.kind]) for a in timeline.actions) + 1
    columns = max(1, (width - 6) // cell)
    if fit:
        unit = timeline.makespan / columns or 1.0
    columns = min(math.ceil(timeline.makespan / unit - 1e-9), columns)
    lines = []
    for rank, order in enumerate(made.ranks):
        cells = ["."] * columns
        for action in order:
            begin, end = (round((t - first) / unit) for t in timeline.actions[action])
            for column in range(begin, min(end, columns)):
                cells[column] = f"{action.number}{marks[action.kind]}"
        lines.append(f"{rank:3d} | " + "".join(c.ljust(cell) for c in cells).rstrip())
    return "\n".join(lines)


def trace(
    timelines: Timeline | Mapping[str, Timeline], path: Path | str, *, seconds_per_unit: float = 1.0
) -> Path:
    """Write the timeline as a Chrome trace, which Perfetto and chrome://tracing open: a line for
    each rank and channel.

    Args:
        timelines: One, or several by their names, such as {"simulated": ..., "measured": ...}: they
            stand one below the other, all beginning at 0.
        seconds_per_unit: Of all of them.
    """
    events: list[dict[str, Any]] = []
    several = {"": timelines} if isinstance(timelines, Timeline) else timelines
    for title, timeline in several.items():
        events += _events(timeline, f"{title} " if title else "", scale=seconds_per_unit * 1e6)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _events(timeline: Timeline, title: str, *, scale: float) -> Iterator[dict[str, Any]]:
    made = timeline.schedule
    first = min(begin for begin, _ in timeline.actions.values())

    def event(
        name: str, process: str, line: str, times: tuple[float, float], **more: Any
    ) -> dict[str, Any]:
        begin, end = ((t - first) * scale for t in times)
        return {
            "name": name,
            "ph": "X",
            "pid": f"{title}{process}",
            "tid": line,
            "ts": begin,
            "dur": end - begin,
            "args": more,
        }

    for action, times in timeline.actions.items():
        rank = f"rank {made.rank_of[action.stage]}"
        yield event(
            str(action), "ranks", rank, times, what=MEANINGS[action.kind], **action._asdict()
        )
    for transfer, times in timeline.transfers.items():
        source, target = made.rank_of[transfer.source], made.rank_of[transfer.target]
        kind = CHANNELS[transfer.kind]
        yield event(
            str(transfer), "channels", f"{source} to {target}, {kind}", times, **transfer._asdict()
        )
