"""The pictures and the table of docs/pipeline.md: every schedule for 4 ranks and 8 micro-batches, F
= I = W.

python -m benchmarks.parallel.pipeline.schedule_pictures
"""

from __future__ import annotations

from pathlib import Path

from pyops.pipeline import Costs, Timeline, draw, schedule, simulate

__all__ = ["OPTIONS", "table", "timelines"]

DOCS = Path(__file__).resolve().parents[3] / "docs"
RANKS, MICROBATCHES = 4, 8
OPTIONS: tuple[tuple[str, dict[str, object]], ...] = (
    ("gpipe", {}), ("1f1b", {}), ("1f1b", {"warmup": "b"}), ("interleaved", {"v": 2}), ("zb1p", {}),
    ("interleaved_zb", {"v": 2}), ("zbv", {}), ("pipedream", {}), ("pipedream_2bw", {}),
    ("pipemare", {"warmup": "b"}),
)  # fmt: skip


def timelines() -> list[tuple[str, Timeline]]:
    """(name with its options, timeline) of every picture; times are those of all stages of a rank
    together."""
    found = []
    for name, options in OPTIONS:
        made = schedule(name, num_stages=RANKS, num_microbatches=MICROBATCHES, **options)
        share = made.num_ranks / made.num_stages
        label = "_".join([name, *(str(value) for value in options.values())])
        found.append((label, simulate(made, Costs(share, share, share))))
    return found


def table() -> str:
    """Rows of Markdown: makespan, bubble and memory."""
    lines = [
        "| schedule | length | idle | micro-batches kept on rank 0, 1, 2, 3 |",
        "|---|---:|---:|---|",
    ]
    for label, timeline in timelines():
        made = timeline.schedule
        share = made.num_ranks / made.num_stages
        kept = ", ".join(f"{made.peak(rank) * share:g}" for rank in range(made.num_ranks))
        lines.append(f"| {label} | {timeline.makespan:g} | {timeline.bubble:.1%} | {kept} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for label, timeline in timelines():
        draw(timeline, DOCS / "pipeline" / f"{label}.png")
    print(table())
