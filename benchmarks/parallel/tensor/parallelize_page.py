"""The page docs/tensor_parallel_models.md, from the rows of `parallelize_models`."""

from __future__ import annotations

from benchmarks.parallel.tensor.parallelize_class import Row

__all__ = ["TITLES", "page"]

TITLES = {
    "right": "Right",
    "refused": "Refused, and unchanged",
    "changed": "Refused, but changed",
    "raised": "An error that is no refusal, or a crash",
    "WRONG": "Cut, and wrong",
    "not compared": "Cut, and not compared",
    "bench": "The measurement itself failed",
    "not made": "Not made small, so not tried",
}


def page(rows: list[Row], everything: list[str]) -> str:
    """The docs page. everything: the names of all classes, measured or not."""
    missing = sorted(set(everything) - {row["class"] for row in rows})
    guesses = [
        {**row, "result": row["guess"], "why": row["guess_why"]}
        for row in rows
        if row.get("guess", "none") != "none"
    ]
    lines = [*_head(rows, guesses, everything, missing), "", "## By the default plan"]
    lines += _sections(rows, [*TITLES])
    lines += ["", "## By a plan that is guessed from the modules' names"]
    lines += _sections(guesses, [*TITLES])
    if missing:
        lines += ["", f"## Not measured yet: {len(missing)}", "", ", ".join(missing)]
    return "\n".join(lines) + "\n"


def _head(
    rows: list[Row], guesses: list[Row], everything: list[str], missing: list[str]
) -> list[str]:
    import transformers

    made = [row for row in rows if row["result"] != "not made"]
    return [
        "# Model classes of transformers under `parallelize`",
        "",
        "Written by `python -m benchmarks.parallel.tensor.parallelize_models`, which goes on where "
        "it ended; transformers "
        f"{transformers.__version__}, 2 ranks,",
        "models of two layers of width 16 with random values, or of more where a "
        "configuration can't be so small.",
        "",
        f"transformers exports {len(everything)} model classes, heads counted each. Of "
        f"these {len(made)} were tried, "
        f"{len(rows) - len(made)} could not be made small,",
        f"and {len(missing)} are not measured yet. For {len(guesses)}, one of an "
        "architecture, a plan was also guessed from",
        "the modules' names, so that the check is tried on plans which come near.",
        "",
        "| | by the default plan | by a guessed plan |",
        "|---|---|---|",
        *(
            f"| {title} | {_count(made, key)} | {_count(guesses, key)} |"
            for key, title in TITLES.items()
            if key != "not made"
        ),
        "",
        "Right: outputs and all gradients are, in fp64, those of the uncut model to 1e-6 "
        "of the largest number (to 1e-4 in",
        "fp32, where only that is possible), with sequence parallelism and without where "
        "nothing else is said. Refused: a",
        "ValueError on every rank, after which modules, attributes, hooks, "
        "configurations and the bits of all tensors are what",
        "they were. A class without a plan needs `plan=`, which is checked alike; a "
        "guess that is right can be passed there.",
    ]


def _count(rows: list[Row], key: str) -> int:
    return sum(row["result"] == key for row in rows)


def _sections(rows: list[Row], keys: list[str]) -> list[str]:
    lines: list[str] = []
    for key in keys:
        found = sorted((row for row in rows if row["result"] == key), key=lambda row: row["class"])
        if not found:
            continue
        lines += ["", f"### {TITLES[key]}: {len(found)}", ""]
        reasons: dict[str, list[str]] = {}
        for row in found:
            reasons.setdefault(_reason(row["why"]), []).append(row["class"])
        lines += ["| classes | |", "|---|---|"]
        lines += [
            f"| {', '.join(classes)} | {why} |"
            for why, classes in sorted(reasons.items(), key=lambda kv: -len(kv[1]))
        ]
    return lines


def _reason(why: str) -> str:
    """Reasons that are alike are one."""
    return "no plan is known" if why.startswith("no plan is known for") else why
