"""Tables from rows: the newest row of each case and machine, written between markers in README.md
and docs/*.md.

    <!-- results:optim -->
    ... a table per machine, generated; edits are lost ...
    <!-- /results -->

`results:optim` takes every case of the bench; `results:optim/clip` those whose name contains
`clip`; `results:headlines` the cases of HEADLINES, each beside one rival.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.instruments import machine

__all__ = ["fill", "read_rows", "table", "write_tables"]

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r"(<!-- results:([\w./ +-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
Row = dict[str, Any]
HEADLINES = (  # bench, case, rival
    ("optim", "AdamW fp32, 1000 tensors of 64", "torch fused"),
    ("optim", "AdamW fp32, 1 tensor of 16 Mi", "torch fused"),
    ("collectives", "all_reduce 25 MiB float32, 2 ranks, shared_memory", "gloo"),
    (
        "data_parallel",
        "GPT step, 2 ranks, 1 x 256 tokens a rank, torch's fused AdamW for both",
        "torch DDP",
    ),
    ("zero", "GPT step, stage 3, 2 ranks, 8 x 256 tokens a rank", "torch FSDP2"),
    ("tensor_parallel", "GPT step, tp = 2, 8 x 256 tokens", "torch DTensor"),
    ("pipeline", "1f1b, tiny layers, 2 ranks, 16 micro-batches", "torch pipelining"),
    (
        "slow_link",
        "loss, 2 ranks, 100 Mbit/s, batch 8, 250 steps, AdamW, int8",
        "torch DDP + AdamW",
    ),
)


def read_rows(folder: Path = ROOT / "benchmarks" / "results") -> list[Row]:
    """All rows, in the order they were measured; a line that is no row raises ValueError naming
    file and line."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path.name}, line {number} is not JSON: {error}; delete or mend the line"
                ) from error
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each (machine, bench, case, device), in the order in which cases first
    appeared."""
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        found[(machine.slug(row["machine"]), row["bench"], row["case"], row["device"])] = row
    return list(found.values())


def duration(microseconds: float) -> str:
    """Three digits and a unit that fits."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.3g} s"
    return f"{microseconds / 1e3:.3g} ms" if microseconds >= 1e3 else f"{microseconds:.3g} us"


def against(row: Row, name: str) -> str:
    """One rival's cell: how many times faster ours is, within which bounds, and the target where
    there is one."""
    if name not in row["speedup"]:
        return ""
    target = row.get("targets", {}).get(name)
    low, high = row.get("speedup_spread", {}).get(name, (None, None))
    spread = "" if low is None else f", {low:.2f} to {high:.2f}"
    return f"{row['speedup'][name]:.2f}x{spread}" + (f" (aim {target:g}x)" if target else "")


def fewer(row: Row) -> str:
    """How many times fewer bytes went over the wire than the rival's, and the target where there is
    one."""
    aim = f" (aim {row['wire_target']:g}x)" if "wire_target" in row else ""
    return f"{row['wire_ratio']:.1f}x{aim}" if "wire_ratio" in row else ""


def of_roof(row: Row, field: str) -> str:
    """A percentage, and the aim where there is one."""
    aim = row.get("least", {}).get(field)
    return f"{row[field]:.0f}" + (f" (aim {aim:g})" if aim else "") if field in row else ""


def of_aim(row: Row, field: str) -> str:
    """A number, and the aim where there is one."""
    aim = row.get("least", {}).get(field, row.get("most", {}).get(field))
    return f"{row[field]:.2f}" + (f" (aim {aim:g})" if aim else "") if field in row else ""


def of_loss(row: Row) -> str:
    """The loss over that of the rival, and the aim where there is one."""
    if "loss_ratio" not in row:
        return ""
    return f"{row['loss_ratio']:.3f}" + (
        f" (aim {row['loss_limit']:g})" if row["loss_limit"] else ""
    )


# Columns of rows that have something to say there.
SPARSE = ("block_sparse", "block_layouts", "sparse_density")

EXTRA: dict[str, Callable[[Row], str]] = {
    "GB/s": lambda row: f"{row['gb_per_s']:.1f}" if "gb_per_s" in row else "",
    "% of copy": lambda row: of_roof(row, "percent_of_copy"),
    "TFLOP/s": lambda row: (
        f"{next(iter(row['tflop_per_s'].values())):.4g}" if "tflop_per_s" in row else ""
    ),
    "% of a matrix product": lambda row: of_roof(row, "percent_of_matmul"),
    "MB on the wire": lambda row: f"{row['wire_bytes'] / 1e6:.3g}" if "wire_bytes" in row else "",
    "fewer bytes": fewer,
    "bytes kept per parameter": lambda row: (
        f"{row['kept_per_parameter']:.3f}" if "kept_per_parameter" in row else ""
    ),
    "formula": lambda row: (
        f"{row['formula_per_parameter']:.3f}" if "formula_per_parameter" in row else ""
    ),
    "kept, s b h bytes": lambda row: f"{row['kept_sbh']:.3f}" if "kept_sbh" in row else "",
    "our formula": lambda row: f"{row['formula_sbh']:.3f}" if "formula_sbh" in row else "",
    "Megatron's": lambda row: f"{row['megatron_sbh']:.3f}" if row.get("megatron_sbh") else "",
    "bytes sent per parameter": lambda row: (
        f"{row['sent_per_parameter']:.3f}" if "sent_per_parameter" in row else ""
    ),
    "by the interface": lambda row: (
        f"{row['wire_per_parameter']:.3f}" if "wire_per_parameter" in row else ""
    ),
    "its formula": lambda row: f"{row['sent_formula']:.3f}" if "sent_formula" in row else "",
    "beyond half of one process": lambda row: ", ".join(
        f"{name} {ms:.0f} ms" for name, ms in row.get("beyond_half_ms", {}).items()
    ),
    "overhead of a cell": lambda row: ", ".join(
        f"{name} {us:.0f} us" for name, us in row.get("overhead_us_a_cell", {}).items()
    ),
    "forward and backward": lambda row: (
        f"{row['measured_ms'] / 1e3:.3g} s" if "measured_ms" in row else ""
    ),
    "simulated": lambda row: (
        f"{row['predicted_ms'] / 1e3:.3g} s"
        if "predicted_ms" in row
        else f"{row['simulated']:.2f}x"
        if "simulated" in row
        else ""
    ),
    "validation loss": lambda row: (
        f"{row['validation_loss']:.3f}" if "validation_loss" in row else ""
    ),
    "times the loss of torch DDP": of_loss,
    "MiB, rank by rank": lambda row: ", ".join(f"{size:.1f}" for size in row.get("peak_mib", ())),
    "peak MiB of a rank beyond imports": lambda row: ", ".join(
        f"{name} {peak - imported:.0f}"
        for name, (imported, peak) in row.get("rank_mib", {}).items()
    ),
    "simulated MiB": lambda row: ", ".join(f"{size:.1f}" for size in row.get("simulated_mib", ())),
    "off, in micro-batches": lambda row: ", ".join(
        f"{size:.2f}" for size in row.get("off_in_micro_batches", ())
    ),
    "worst of all": lambda row: ", ".join(
        f"{name} {ratio:.2f}x" for name, ratio in row.get("worst", {}).items()
    ),
    "MB on disk, of before": lambda row: (
        f"{row['disk_bytes'] / 1e6:.2f}, {row['of_disk_bytes']:.0%}" if "disk_bytes" in row else ""
    ),
    "accuracy": lambda row: (
        f"{sum(row['accuracy']) / len(row['accuracy']):.2f} %" if "accuracy" in row else ""
    ),
    "mean staleness": lambda row: f"{row['mean_staleness']:.1f}" if "mean_staleness" in row else "",
    "passes an iteration": lambda row: (
        f"{row['passes_an_iteration']:.2f}" if "passes_an_iteration" in row else ""
    ),
    "virtual seconds, and those to 96 % by seed": lambda row: (
        f"{row['virtual_s']:.0f}; "
        + ", ".join("never" if at is None else f"{at:.0f}" for at in row["reached_s"])
        if "reached_s" in row
        else ""
    ),
    "part of all steps": lambda row: of_aim(row, "part_of_all_steps"),
    "held-out loss": lambda row: (
        f"{row['loss']:.3f}" if "part_of_all_steps" in row and "loss" in row else ""
    ),
    "virtual seconds to a loss of 0.15": lambda row: (
        ("never" if row["loss_reached_s"] is None else f"{row['loss_reached_s']:.2f}")
        if "loss_reached_s" in row
        else ""
    ),
    "held up, s": lambda row: of_aim(row, "held_up_s"),
    "points": lambda row: f"{row['points']:+.2f}" if row.get("speedup") and "points" in row else "",
    "seeds": lambda row: str(row["rounds"]) if row.get("bench") == "elastic" else "",
    "longest transition; largest part of an epoch": lambda row: (
        f"{max(map(max, row['transitions_s'])):.2f} s; {row['transition_share']:.1%}"
        if any(row.get("transitions_s", ()))
        else ""
    ),
    "to keep a sample": lambda row: duration(row["keep_us"]) if "keep_us" in row else "",
    "predicted": lambda row: duration(1e3 * row["planned_ms"]) if "planned_ms" in row else "",
    "off": lambda row: (
        f"{row['step_off']:+.1%}{', fitted' if row['fitted'] else ''}"
        if "step_off" in row
        else f"{row['held_out_off']:.1%}, {row['held_out_off_most']:.1%} at most"
        if "held_out_off" in row
        else ""
    ),
    "MiB": lambda row: f"{row['mib']:.1f}" if "planned_mib" in row else "",
    "MiB predicted": lambda row: f"{row['planned_mib']:.1f}" if "planned_mib" in row else "",
    "MiB off": lambda row: (
        f"{row['mib_off']:+.1%}"
        if "mib_off" in row
        else f"{row['memory_off']:.1%}, {row['memory_off_most']:.1%} at most"
        if "memory_off" in row
        else ""
    ),
    "layouts, GiB of the process": lambda row: (
        f"{row['layouts']:,}, {row['process_gib']:.2f}" if "process_gib" in row else ""
    ),
    "rank correlation": lambda row: of_aim(row, "rank_correlation"),
    "chosen, times the fastest": lambda row: of_aim(row, "best_predicted_over_best"),
    "tokens": lambda row: f"{row['tokens']:,}" if "too_long" in row or "limit_bytes" in row else "",
    "as long as explicit scores": lambda row: longer(row) if "times_as_long" in row else "",
    "visited": lambda row: (
        f"{row['density']:.1%}" if row["bench"] in SPARSE and "density" in row else ""
    ),
    "% of ideal": lambda row: f"{row['percent_of_ideal']:.0f}" if "percent_of_ideal" in row else "",
    "MB received": lambda row: (
        f"{row['received_bytes'] / 1e6:.3g}" if isinstance(row.get("received_bytes"), int) else ""
    ),
    "most pairs over the mean": lambda row: (
        f"{row['most_pairs_over_mean']:.2f}" if "most_pairs_over_mean" in row else ""
    ),
    "each method, and what the model says": lambda row: ", ".join(
        f"{name} {duration(row['us'][name][1])} ({row['predicted_seconds'][name]:.3g} s)"
        for name in row.get("order", ())
    ),
    "in the model's order": lambda row: (
        ("yes" if row["same_order"] else "no") if "same_order" in row else ""
    ),
    "above the dense loss, seed by seed": lambda row: (
        ", ".join(f"{percent:+.2f} %" for percent in row["percent_by_seed"].values())
        if row["bench"] == "nm" and "percent_by_seed" in row
        else ""
    ),
    "share of the magnitude kept": lambda row: ", ".join(
        f"{name} {share:.4f}" for name, share in row.get("kept_share", {}).items()
    ),
    "held-out digits read, mean over seeds": lambda row: ", ".join(
        f"{name} {sum(read) / len(read):.2f} %"
        for name, read in row.get("percent_read", {}).items()
    ),
    "by method": lambda row: (
        ", ".join(f"{name} {value:g}" for name, value in row["by_method"].items())
        + f" {row['unit']}"
        if "by_method" in row
        else ""
    ),
    "of the teacher's accuracy": lambda row: (
        f"{100 * row['of_teacher']:.1f} % (aim {100 * row['least']['of_teacher']:g} %)"
        if "of_teacher" in row
        else ""
    ),
    "vs AdamW's loss": lambda row: (
        f"{row['percent_of_loss']:+.2f} %" if "percent_of_loss" in row else ""
    ),
}


def longer(row: Row) -> str:
    """How many times as long as with explicit scores, and the target where there is one."""
    aim = row.get("least", {}).get("times_as_long")
    return f"{row['times_as_long']:.1f}x" + (f" (aim {aim:g}x)" if aim else "")


def table(rows: list[Row]) -> str:
    """One Markdown table: a line per case, a column per rival; columns that no row fills are left
    out."""
    rivals = list(dict.fromkeys(name for row in rows for name in row["speedup"]))
    extra = {title: cell for title, cell in EXTRA.items() if any(cell(row) for row in rows)}
    timed = ["time"] if any(row["us"] for row in rows) else []
    titles = ["case", *timed, *extra, *(f"vs {name}" for name in rivals)]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for row in rows:
        time = next((duration(ours[1]) for ours in row["us"].values()), "")
        cells = [row["case"], *(time for _ in timed), *(cell(row) for cell in extra.values())]
        lines.append("| " + " | ".join([*cells, *(against(row, name) for name in rivals)]) + " |")
    return "\n".join(lines)


def heading(rows: list[Row]) -> str:
    """What a table was measured on; commits and dates where rows differ in them."""
    row = rows[-1]
    where = row["machine"]
    what = where.get("gpu") or f"{where['cpu']}, {where['cores']} cores"
    commits, dates = (
        ", ".join(dict.fromkeys(str(each[key]) for each in rows)) for key in ("commit", "date")
    )
    stamp = f"torch {row['versions']['torch']}, commit {commits}, {dates}"
    text = f"{what} ({where['threads']} threads); {stamp}:"
    return textwrap.fill(text, 100, break_on_hyphens=False)


def headlines(rows: list[Row]) -> str:
    """One line for each of HEADLINES: its newest row and how many times faster than the rival."""
    found = {(row["bench"], row["case"]): row for row in newest(rows) if row["device"] == "cpu"}
    chosen = [(found[bench, case], rival) for bench, case, rival in HEADLINES]
    dates = sorted({row["date"] for row, _ in chosen})
    where = chosen[0][0]["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, no GPU; torch "
        f"{chosen[0][0]['versions']['torch']}; {dates[0]} to {dates[-1]}:",
        "",
        "| case | beside | faster |",
        "|---|---|---:|",
        *(f"| {row['case']} | {rival} | {row['speedup'][rival]:.2f}x |" for row, rival in chosen),
    ]
    return "\n".join(lines) + "\n"


def section(rows: list[Row], what: str) -> str:
    """All tables of one marker: one for each machine and device."""
    if what == "headlines":
        return headlines(rows)
    bench, _, part = what.partition("/")
    chosen = [row for row in newest(rows) if row["bench"] == bench and part in row["case"]]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in chosen:
        groups.setdefault((machine.slug(row["machine"]), row["device"]), []).append(row)
    if not groups:
        return "(no rows yet)\n"
    return "\n".join(f"{heading(group)}\n\n{table(group)}\n" for group in groups.values())


def fill(text: str, rows: list[Row]) -> str:
    """The text with every marked section generated anew."""
    return MARKED.sub(lambda match: f"{match[1]}{section(rows, match[2])}{match[3]}", text)


def write_tables(root: Path = ROOT) -> list[Path]:
    """Write the tables into README.md and docs/*.md; returns the files that changed."""
    rows = read_rows(root / "benchmarks" / "results")
    changed = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if path.exists() and (after := fill(before := path.read_text(), rows)) != before:
            path.write_text(after)
            changed.append(path)
    return changed


if __name__ == "__main__":
    for written in write_tables():
        print(f"tables written in {written.relative_to(ROOT)}")
