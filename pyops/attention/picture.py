"""Pictures of layouts, as svg: rows are blocks of queries, columns blocks of keys.

Neighbouring blocks of a row are one rectangle, so the files stay small enough to be kept beside a
page.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from pyops.ops.attention import BlockLayout

__all__ = ["draw"]

CELL, GAP, TOP = 10, 14, 22
FULL, PARTIAL, EMPTY = "#4878b8", "#9db8d8", "#eeeeee"
LARGEST = 128  # blocks of a side that a picture can still show


def draw(layout: BlockLayout, path: Path | str, *, title: str = "") -> Path:
    """Write a picture of a layout: dark is seen whole, pale is tested inside, grey is not visited.

    Args:
        layout: Heads that differ stand side by side.
        path: The file, which ends with .svg.
        title: Above the picture, with the density behind it.

    Returns:
        The path.

    Raises:
        ValueError: For another ending, or more blocks than a picture can show.
    """
    path = Path(path)
    if path.suffix != ".svg":
        raise ValueError(f"{path} should be a picture; give it the ending .svg")
    rows, columns = layout.num_query_blocks, layout.num_key_blocks
    if max(rows, columns) > LARGEST:
        raise ValueError(
            f"{rows} x {columns} blocks are too many for one picture, which shows {LARGEST}; draw "
            "a shorter length"
        )
    width = layout.num_heads * (columns * CELL + GAP) + GAP
    height = TOP + rows * CELL + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{GAP}" y="15">{escape(title)} {layout.density:.1%}</text>',
    ]
    for head in range(layout.num_heads):
        left = GAP + head * (columns * CELL + GAP)
        parts.append(_rectangles(layout, head, left))
    parts.append("</svg>\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))
    return path


def _rectangles(layout: BlockLayout, head: int, left: int) -> str:
    """The rectangles of one head, a path of each colour, and white lines between the blocks."""
    sides = {EMPTY: "", PARTIAL: "", FULL: ""}
    for row in range(layout.num_query_blocks):
        count = int(layout.counts[head, row])
        seen = dict(
            zip(
                layout.indices[head, row, :count].tolist(),
                layout.full[head, row, :count].tolist(),
                strict=True,
            )
        )
        kinds = {None: EMPTY, False: PARTIAL, True: FULL}
        for colour, run in groupby(
            range(layout.num_key_blocks), key=lambda column: kinds[seen.get(column)]
        ):
            run_columns = list(run)
            x, y = left + run_columns[0] * CELL, TOP + row * CELL
            length = len(run_columns) * CELL
            sides[colour] += f"M{x} {y}h{length}v{CELL}h-{length}z"
    width, height = layout.num_key_blocks * CELL, layout.num_query_blocks * CELL
    lines = [f"M{left + x} {TOP}v{height}" for x in range(0, width + 1, CELL)]
    lines += [f"M{left} {TOP + y}h{width}" for y in range(0, height + 1, CELL)]
    return "\n".join(
        [
            *(f'<path fill="{colour}" d="{sides[colour]}"/>' for colour in sides if sides[colour]),
            f'<path stroke="#ffffff" d="{"".join(lines)}"/>',
        ]
    )
