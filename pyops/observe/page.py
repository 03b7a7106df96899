"""run.html: a run on one page, in one file that needs nothing else.

runs/small/metrics.jsonl  config.json  flight/   ->   run.html
loss, rate, time of steps, goodput, slow ranks: curves as SVG; the configuration as a table
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyops.observe.flight.reading import FlightError, read_records
from pyops.observe.flight.verdict import explain

__all__ = ["page_of", "write_page"]

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 220, 70, 28  # of a picture, in units of the SVG
MOST_POINTS = 1500  # of a curve: more are put together
COLORS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2")
CURVES = (
    ("loss", ("loss", "validation_loss")),
    ("accuracy on held-out data", ("validation_accuracy",)),
    ("gradient norm", ("grad_norm",)),
    ("learning rate", ("lr",)),
    ("tokens per second", ("tokens_per_s",)),
    ("samples per second", ("samples_per_s",)),
    ("seconds of a step", ("step_s",)),
    ("GiB of memory", ("memory_gib",)),
    ("bytes sent in a step", ("bytes_sent",)),
    ("goodput: part of the time since the first start in steps that count", ("goodput",)),
    ("score of the slowest rank: the fastest rank's seconds over its own", ("slowest_score",)),
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em;"
    "color:#222;background:#fff}svg{width:100%;height:auto}h2{font-size:1em;margin:1.6em 0 .2em}"
    "td{padding:0 1em 0 0;vertical-align:top}td:first-child{color:#666}pre{white-space:pre-wrap}"
    "text{font:11px system-ui,sans-serif;fill:#666}"
)


def write_page(folder: str | Path) -> Path:
    """Write `folder`/run.html; returns its path.

    Args:
        folder: Of a run.

    Raises:
        OSError: It can't be written.
    """
    path = Path(folder) / "run.html"
    beside = path.with_suffix(".html.tmp")
    beside.write_text(page_of(folder))
    beside.replace(path)
    return path


def page_of(folder: str | Path) -> str:
    """The page of a run, as HTML.

    Args:
        folder: With metrics.jsonl; config.json and flight are shown where they are there.

    Raises:
        ValueError: The folder is not one of a run.
    """
    where = Path(folder)
    rows = _rows(where / "metrics.jsonl")
    if not rows:
        raise ValueError(
            f"{folder} has no metrics.jsonl with a line of a step; give the folder of a run"
        )
    name = where.resolve().name
    parts = [f"<h1>{html.escape(name)}</h1>", _summary(rows)]
    for title, keys in CURVES:
        series = {key: _points(rows, key) for key in keys}
        if any(len(points) > 1 for points in series.values()):
            parts += [f"<h2>{html.escape(title)}</h2>", _picture(series)]
    parts += _collectives(where)
    config = _json(where / "config.json")
    if config:
        parts += ["<h2>configuration</h2>", _table(config)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(name)}</title><style>{STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # that a killed run left half-written
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    last = rows[-1]
    facts = {"steps": f"{last['step'] + 1:,}"}
    for key in ("loss", "validation_loss", "validation_accuracy", "goodput", "skipped"):
        found = [row[key] for row in rows if row.get(key) is not None]
        if found:
            facts[key.replace("_", " ")] = f"{found[-1]:.4g}"
    return _table(facts)


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value), no more than MOST_POINTS: the mean of as many neighbors as it takes."""
    found = [
        (float(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]
    several = -(-len(found) // MOST_POINTS)
    if several < 2:
        return found
    groups = [found[i : i + several] for i in range(0, len(found), several)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _picture(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    everything = [point for points in series.values() for point in points]
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    across = (WIDTH - LEFT - 10) / ((right - left) or 1)
    up = (HEIGHT - BOTTOM - 10) / (high - low)
    lines = []
    for i in range(5):
        value = low + (high - low) * i / 4
        y = HEIGHT - BOTTOM - (value - low) * up
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for x, anchor in ((left, "start"), (right, "end")):
        at = LEFT + (x - left) * across
        lines.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">step {x:g}</text>'
        )
    for number, (name, points) in enumerate(series.items()):
        if not points:
            continue
        color = COLORS[number % len(COLORS)]
        path = "L".join(
            f"{LEFT + (x - left) * across:.1f} {HEIGHT - BOTTOM - (y - low) * up:.1f}"
            for x, y in points
        )
        lines.append(
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.4">'
            f"<title>{html.escape(name)}</title></path>"
        )
        if len(series) > 1:
            lines.append(
                f'<text x="{WIDTH - 16}" y="{22 + 15 * number}" text-anchor="end" '
                f'style="fill:{color}">{html.escape(name.replace("_", " "))}</text>'
            )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(lines)}</svg>'


def _collectives(where: Path) -> list[str]:
    if not (where / "flight").is_dir():
        return []
    try:
        text = explain(read_records(where))
    except FlightError:
        return []
    return ["<h2>collectives, by the flight record</h2>", f"<pre>{html.escape(text)}</pre>"]


def _table(values: Mapping[str, Any], prefix: str = "") -> str:
    lines = [
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in _flat(values, prefix)
    ]
    return f"<table>{''.join(lines)}</table>"


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
