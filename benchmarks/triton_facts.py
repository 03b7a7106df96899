"""The facts of every Triton kernel under one Triton, within bounds, and those of two beside each
other. Needs no GPU.

python -m benchmarks.triton_facts OUT.json          of the Triton that is installed
python -m benchmarks.triton_facts OLD.json NEW.json    both within bounds, and which launches differ

Two versions of the compiler make different code of one source: what runs well under the one that
is at hand may be slow under the one that a user has (dropout took four times its instructions).
Facts that differ by more than a tenth are named; it fails where the share of a copy that follows
from them does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import triton

from benchmarks.kernel_facts import TRITON, Fact, triton_facts

__all__ = ["BOUNDS", "Facts", "beyond", "compare", "facts", "facts_of", "main"]

Facts = dict[str, float]
LIKE = 0.1
COMPARED = ("registers", "local", "issue", "ahead")

# A launch, without its width: registers, and instructions for an element.
BOUNDS = {
    "norm: rms bf16: rows_forward": (40, 19),
    "norm: add layer bf16: rows_forward": (57, 33),
    "norm: rms back bf16: rows_backward": (100, 25),
    "norm: add layer back bf16: rows_backward": (128, 38),
    "norm: add layer back bf16: columns_backward": (96, 48),
    "norm: rms fp32: rows_forward": (48, 19),
    "norm: add layer fp32: rows_forward": (57, 37),
    "norm: rms back fp32: rows_backward": (111, 20),
    "norm: add layer back fp32: rows_backward": (128, 35),
    "norm: rms back fp32: columns_backward": (72, 30),
    "norm: add layer back fp32: columns_backward": (104, 46),
    "activation: gelu bf16: forward": (40, 33),
    "activation: gelu back bf16: backward": (96, 33),
    "activation: gelu_tanh bf16: forward": (40, 32),
    "activation: gelu_tanh back bf16: backward": (96, 37),
    "activation: silu bf16: forward": (40, 25),
    "activation: silu back bf16: backward": (96, 28),
    "activation: relu bf16: forward": (40, 14),
    "activation: relu back bf16: backward": (96, 12),
    "activation: swiglu bf16: gated_forward": (40, 26),
    "activation: swiglu back bf16: gated_backward": (96, 32),
    "activation: gelu fp32: forward": (40, 48),
    "activation: gelu back fp32: backward": (80, 49),
    "activation: gelu_tanh fp32: forward": (40, 29),
    "activation: gelu_tanh back fp32: backward": (80, 35),
    "activation: silu fp32: forward": (40, 22),
    "activation: silu back fp32: backward": (80, 26),
    "activation: relu fp32: forward": (40, 12),
    "activation: relu back fp32: backward": (80, 10),
    "activation: swiglu fp32: gated_forward": (40, 24),
    "activation: swiglu back fp32: gated_backward": (80, 31),
    "cross_entropy: statistics bf16: statistics": (32, 8.5),
    "cross_entropy: statistics + sum bf16: statistics": (32, 10.5),
    "cross_entropy: gradient bf16: gradient": (40, 20),
    "cross_entropy: statistics fp32: statistics": (40, 7.5),
    "cross_entropy: statistics + sum fp32: statistics": (48, 9.5),
    "cross_entropy: gradient fp32: gradient": (72, 18),
    "dropout: bias dropout add bf16: combine": (80, 81),
    "dropout: back bf16: combine": (64, 54),
    "dropout: back bf16: sum_rows": (48, 19),
    "dropout: part of rows bf16: combine": (64, 54),
    "dropout: bias dropout add fp32: combine": (88, 77),
    "dropout: back fp32: combine": (72, 51),
    "dropout: back fp32: sum_rows": (56, 18),
    "dropout: part of rows fp32: combine": (72, 51),
    "rotary: halves bf16: rotary": (40, 12),
    "rotary: pairs bf16: rotary": (40, 13),
    "rotary: halves fp32: rotary": (40, 11),
    "rotary: pairs fp32: rotary": (40, 13),
}
COLUMN_SUM = (56, 14)
SPILLED = {  # bytes
    "norm: add layer back 16384 bf16: rows_backward": 16,
    "norm: add layer back 2048 fp32: rows_backward": 8,
}
# Launches whose share may differ, and why.
EXPLAINED = {
    "dropout: bias dropout add bf16: combine": (
        "half of the code is for a stream that begins within a block of Philox, and does not run"
    ),
}

# Of an H200: bytes a second that a copy moves, instructions a second, of which a kernel gets so
# much, and KiB of a multiprocessor that keep the copy going. benchmarks/NOTES.md
COPY, ISSUE, REACHED, ON_THEIR_WAY = 4.3e12, 30e12, 0.8, 33.0
MOST = 0.95


def facts_of(stem: str, fact: Fact) -> tuple[str, Facts]:
    """The name of a launch and what is compared of it."""
    threads = 32 * fact.warps
    ahead = fact.machine.ahead * threads * fact.machine.ctas(threads, fact.shared) / 1024
    budget = ISSUE / (COPY / fact.case.bytes)
    share = min(MOST, REACHED * budget / fact.issue, ahead / ON_THEIR_WAY)
    return f"{stem}: {fact.name}", {
        "registers": fact.machine.registers,
        "local": fact.machine.local,
        "issue": round(fact.issue, 2),
        "ahead": round(ahead, 1),
        "percent": round(100 * share, 1),
    }


def facts(only: Collection[str] | None = None) -> dict[str, Facts]:
    """By the name of the launch; of all cases, or of those with these names."""
    return dict(facts_of(stem, fact) for stem in TRITON for fact in triton_facts(stem, only))


def apart(one: float, other: float) -> bool:
    """Whether two facts differ by more than a tenth of the larger."""
    return abs(one - other) > LIKE * max(abs(one), abs(other))


def beyond(name: str, found: Facts) -> str:
    """What of a launch is beyond its bounds; "" for nothing.

    Raises:
        KeyError: It has none.
    """
    kind = re.sub(r" \d+ ", " ", name)
    registers, issue = COLUMN_SUM if kind.endswith("column_sum") else BOUNDS[kind]
    wrong = []
    for key, most in (
        ("registers", registers),
        ("issue", issue),
        ("local", SPILLED.get(name, 0)),
    ):
        if found[key] > most:
            wrong.append(f"{key} {found[key]:g}, at most {most:g}")
    return ", ".join(wrong)


def compare(old: dict[str, Facts], new: dict[str, Facts]) -> tuple[list[str], list[str]]:
    """A line for each launch whose facts are not alike, and for each whose share of a copy is not,
    though nothing explains it.

    Raises:
        ValueError: The two have other launches.
    """
    if old.keys() != new.keys():
        raise ValueError(
            f"launches of only one of the two: {sorted(old.keys() ^ new.keys())}; make both files "
            "anew, from one source"
        )
    lines, other = [], []
    for name, before in old.items():
        after = new[name]
        pairs = (f"{key} {before[key]:g} | {after[key]:g}" for key in (*COMPARED, "percent"))
        text = f"{name:<53} {', '.join(pairs)}"
        if any(apart(before[key], after[key]) for key in COMPARED):
            lines.append(f"{text}: {EXPLAINED[name]}" if name in EXPLAINED else text)
        if apart(before["percent"], after["percent"]) and name not in EXPLAINED:
            other.append(text)
    return lines, other


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    if len(arguments) == 1:
        made = {"triton": triton.__version__, "facts": facts()}
        Path(arguments[0]).write_text(json.dumps(made, indent=1) + "\n")
        return 0
    old, new = (json.loads(Path(name).read_text()) for name in arguments)
    lines, other = compare(old["facts"], new["facts"])
    print("\n".join(lines))
    count = len(old["facts"])
    as_fast = sum(
        not apart(found["percent"], new["facts"][name]["percent"])
        for name, found in old["facts"].items()
    )
    print(
        f"{count - len(lines)} of {count} launches are alike within a tenth under Triton "
        f"{old['triton']} and {new['triton']}; the share of a copy that follows, of "
        f"{as_fast}"
    )
    wrong = [f"not as fast under both: {text}" for text in other]
    for made in (old, new):
        for name, found in made["facts"].items():
            if text := beyond(name, found):
                wrong.append(f"Triton {made['triton']}, {name}: {text}")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
