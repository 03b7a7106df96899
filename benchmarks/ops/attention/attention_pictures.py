"""The pictures and the table of docs/attention.md: the six patterns over 16 blocks, and how dense
they are over 512.

python -m benchmarks.ops.attention.attention_pictures
"""

from __future__ import annotations

from pathlib import Path

from pyops.attention import BigBird, Dense, Fixed, Longformer, Pattern, SlidingWindow, Variable

__all__ = ["FOLDER", "PICTURES", "draw_all", "table"]

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "attention"
PICTURES: dict[str, Pattern] = {
    "dense": Dense(),
    "fixed": Fixed(),
    "variable": Variable(local_window_blocks=(2, 3, 5)),
    "bigbird": BigBird(num_random_blocks=2),
    "longformer": Longformer(global_block_indices=(0, 8)),
    "sliding_window": SlidingWindow(),
}
BLOCKS = 512


def draw_all(folder: Path) -> list[Path]:
    """Write the pictures into `folder`; returns their paths."""
    return [pattern.draw(folder / f"{name}.svg") for name, pattern in PICTURES.items()]


def table() -> str:
    """Rows of Markdown: the part of all blocks that is visited, of each pattern's defaults."""
    lines = ["| pattern | all see all ways | causal |", "|---|---:|---:|"]
    for pattern in PICTURES.values():
        made = type(pattern)()
        whole, causal = (
            made.layout(BLOCKS * 16, heads=1, block=16, causal=c).density for c in (False, True)
        )
        lines.append(f"| {type(pattern).__name__} | {whole:.2%} | {causal:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    draw_all(FOLDER)
    print(table())
