"""The facts of every Triton kernel under one Triton, within bounds, and those of two beside each
other. Needs no GPU.

python -m benchmarks.ops.machine_code.triton_facts --every OUT.json
python -m benchmarks.ops.machine_code.triton_facts OUT.json
python -m benchmarks.ops.machine_code.triton_facts OLD.json NEW.json

The first two write the facts of the Triton that is installed: of every launch, or without those
that are LEFT_OUT, which has every kernel in half the time. The last checks that both files are
within bounds, and says which launches differ.

Two versions of the compiler make different code of one source: what runs well under the one that
is at hand may be slow under the one that a user has (dropout took four times its instructions).
Launches are named of which something that costs time differs by more than a tenth, and it fails
where EXPLAINED does not say why:

warps     that a multiprocessor has at a time, of those that there are: registers and shared memory
          speak through the CTAs that they leave room for
local     bytes of a thread in local memory: spills
issue     instructions for an element, of the loop where there is one
width     bytes of a global access, on average over those in the code
ahead     KiB that a multiprocessor has asked for, up to twice those that keep the copy going
percent   of a copy, as it follows from these; the last two of kernels without matrix products
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import triton

from benchmarks.ops.machine_code.kernel_facts import Fact, triton_facts
from benchmarks.ops.machine_code.triton_cases import TRITON, WITH_PRODUCTS

__all__ = [
    "BOUNDS",
    "PRODUCTS",
    "Facts",
    "beyond",
    "compare",
    "facts",
    "facts_of",
    "kept_cases",
    "main",
]

Facts = dict[str, float]
LIKE = 0.1
# Cases beside which another stands of the same kernels: of other widths and vocabularies, and of
# attention those that compile longest.
LEFT_OUT = re.compile(
    r"(1024|2048|8192|32000|131072|262144) \w+|(causal 128|causal 64 fp32|dropout 64) .*"
)
SHOWN = ("registers", "warps", "local", "issue", "width", "ahead", "percent")

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
    "dropout: bias dropout add bf16: combine": (80, 73),
    "dropout: back bf16: combine": (64, 54),
    "dropout: back bf16: sum_rows": (48, 19),
    "dropout: part of rows bf16: combine": (64, 54),
    "dropout: bias dropout add fp32: combine": (88, 68),
    "dropout: back fp32: combine": (72, 51),
    "dropout: back fp32: sum_rows": (56, 18),
    "dropout: part of rows fp32: combine": (72, 51),
    "rotary: halves bf16: rotary": (40, 12),
    "rotary: pairs bf16: rotary": (40, 13),
    "rotary: halves fp32: rotary": (40, 11),
    "rotary: pairs fp32: rotary": (40, 13),
    "nm_mask: 2:4 bf16: nm_mask": (56, 12),
    "nm_mask: 2:4 fp32: nm_mask": (48, 12),
    "radix_count: upper bits bf16: count": (72, 28),
    "radix_count: lower bits bf16: count": (64, 26),
    "radix_count: kept bf16: keep": (24, 9),
    "radix_count: upper bits fp32: count": (72, 29),
    "radix_count: lower bits fp32: count": (72, 37),
    "radix_count: kept fp32: keep": (32, 14),
    "codes: rows to codes bf16: rows": (40, 43),
    "codes: rows to codes fp32: rows": (40, 43),
    "codes: sums of codes bf16: scale": (40, 10.5),
    "codes: sums of codes fp32: scale": (48, 9.5),
    "codes: one row by int8 bf16: product": (72, 7),
    "codes: one row by int4 bf16: product": (168, 15),  # under 3.6; 126 and 12 under 3.9
    "fake_quantize: rounded bf16: rounded": (64, 44),
    "fake_quantize: rounded back bf16: rounded": (176, 52),  # under 3.6; 95 under 3.9
    "fake_quantize: rounded fp32: rounded": (72, 43),
    "fake_quantize: rounded back fp32: rounded": (128, 54),
}
COLUMN_SUM = (56, 14)
SPILLED = {  # bytes
    "norm: add layer back 16384 bf16: rows_backward": 16,
    "norm: add layer back 2048 fp32: rows_backward": 8,
}
# Those with matrix products, by their whole name: registers, bytes that are spilled, instructions
PRODUCTS: dict[str, tuple[int, int, float]] = {
    "attention: causal 64 bf16 forward: forward": (192, 0, 39),
    "attention: causal 64 bf16 back: sum_products": (32, 0, 15),
    "attention: causal 64 bf16 back: keys_gradient": (255, 0, 116),
    "attention: causal 64 bf16 back: queries_gradient": (184, 0, 69),
    "attention: causal 128 bf16 forward: forward": (255, 0, 79),
    "attention: causal 128 bf16 back: sum_products": (40, 0, 12),
    "attention: causal 128 bf16 back: keys_gradient": (176, 0, 265),
    "attention: causal 128 bf16 back: queries_gradient": (128, 24, 156),
    "attention: causal 64 fp32 forward: forward": (255, 776, 310),
    "attention: causal 64 fp32 back: sum_products": (48, 0, 16),
    "attention: causal 64 fp32 back: keys_gradient": (255, 120, 657),
    "attention: causal 64 fp32 back: queries_gradient": (240, 0, 417),
    "attention: dropout 64 bf16 forward: forward": (255, 0, 82),
    "attention: dropout 64 bf16 back: sum_products": (32, 0, 15),
    "attention: dropout 64 bf16 back: keys_gradient": (255, 208, 181),
    "attention: dropout 64 bf16 back: queries_gradient": (255, 0, 125),
    "attention: bias 64 bf16 forward: forward": (224, 0, 42),
    "attention: bias 64 bf16 back: sum_products": (32, 0, 15),
    "attention: bias 64 bf16 back: keys_gradient": (255, 24, 126),
    "attention: bias 64 bf16 back: queries_gradient": (200, 0, 77),
    "attention: bias 64 bf16 back: gradients": (168, 0, 39),
}


class Reason(NamedTuple):
    """Why some facts of a launch differ, and which."""

    facts: set[str]
    text: str


COPIES = (
    "lse and delta of the next tile of queries are copied to shared memory in 144 accesses of 8 "
    "bytes under 3.6, which repeat each other, and in 18 of 4 under 3.9; a visit's instructions, "
    "these among them, are alike"
)
FP32_PRODUCTS = (
    "fp32 products are made of fused multiply-adds, whose operands do not fit: how many stay in "
    "registers is each Triton's choice"
)
FEW_MORE = "a few registers more or less decide on a CTA; bytes ahead are enough under both"
EXPLAINED = {
    "norm: add layer back 16384 bf16: rows_backward": Reason(
        {"local"},
        "64 registers are the most of a CTA of 32 warps: 3.9 puts three words aside, once",
    ),
    "norm: add layer back 2048 fp32: rows_backward": Reason(
        {"local", "ahead"},
        "at 128 registers 3.9 asks for all of a row and puts two words aside outside of the loop; "
        "3.6 asks for less at a time, which is enough",
    ),
    "norm: add layer back 8192 fp32: rows_backward": Reason(
        {"issue"}, "3.6 guards each step of the two sums over a row by a predicate of its own"
    ),
    "norm: rms back 16384 fp32: columns_backward": Reason({"warps"}, FEW_MORE),
    "activation: gelu_tanh bf16: forward": Reason({"warps"}, FEW_MORE),
    "cross_entropy: statistics 32000 fp32: statistics": Reason({"warps"}, FEW_MORE),
    "cross_entropy: statistics 50304 fp32: statistics": Reason({"warps"}, FEW_MORE),
    "attention: causal 64 bf16 back: keys_gradient": Reason({"width"}, COPIES),
    "attention: dropout 64 bf16 back: keys_gradient": Reason({"width"}, COPIES),
    "attention: bias 64 bf16 back: keys_gradient": Reason(
        {"width", "local"}, f"{COPIES}; 3.9 spills six words"
    ),
    "attention: causal 128 bf16 back: sum_products": Reason({"warps"}, FEW_MORE),
    "attention: causal 64 fp32 back: sum_products": Reason({"warps"}, FEW_MORE),
    "attention: causal 128 bf16 back: queries_gradient": Reason(
        {"local"}, "at 128 registers, which two CTAs need, 3.9 spills six words"
    ),
    "radix_count: lower bits bf16: count": Reason(
        {"issue"}, "3.9 makes twice the instructions of it; under both it waits for memory"
    ),
    "codes: one row by int4 bf16: product": Reason(
        {"issue", "percent", "warps", "ahead"},
        "3.6 brings x to its codes by shared memory after it has been widened, 3.9 before: a fifth "
        "more instructions, and slower; at most 128 registers spill 32 bytes",
    ),
    "fake_quantize: rounded back bf16: rounded": Reason(
        {"warps"},
        "3.6 takes 168 registers, and at most 96 spills 264 bytes; bytes ahead are enough",
    ),
    "attention: causal 64 fp32 forward: forward": Reason({"local"}, FP32_PRODUCTS),
    "attention: causal 64 fp32 back: keys_gradient": Reason({"local"}, FP32_PRODUCTS),
    "attention: causal 64 fp32 back: queries_gradient": Reason({"warps"}, FP32_PRODUCTS),
}

# Of an H200: bytes a second that a copy moves, instructions a second, of which a kernel gets so
# much, its multiprocessors, and KiB of one of them that keep the copy going: twice as many where a
# CTA asks for all at once and then for nothing until it has them. benchmarks/NOTES.md
COPY, ISSUE, REACHED, MULTIPROCESSORS, ON_THEIR_WAY = 4.3e12, 30e12, 0.8, 132, 33.0
ENOUGH = 2 * ON_THEIR_WAY
MOST = 0.95


def facts_of(stem: str, fact: Fact) -> tuple[str, Facts]:
    """The name of a launch and what is compared of it."""
    machine, threads = fact.machine, 32 * fact.warps
    ctas = min(machine.ctas(threads, fact.shared), -(-fact.grid // MULTIPROCESSORS))
    found: Facts = {
        "registers": machine.registers,
        "warps": ctas * fact.warps,
        "local": machine.local,
        "issue": round(fact.issue, 2),
        "width": round(machine.width, 2),
    }
    if stem in TRITON:
        ahead = machine.ahead * threads * ctas / 1024
        budget = ISSUE / (COPY / fact.case.bytes)
        share = min(MOST, REACHED * budget / fact.issue, ahead / ON_THEIR_WAY)
        found |= {"ahead": round(ahead, 1), "percent": round(100 * share, 1)}
    return f"{stem}: {fact.name}", found


def kept_cases() -> set[str]:
    """The names of the cases that are not LEFT_OUT."""
    cases = (case.name for of_stem in (TRITON | WITH_PRODUCTS).values() for case in of_stem())
    return {name for name in cases if not LEFT_OUT.search(name)}


def facts(only: Collection[str] | None = None) -> dict[str, Facts]:
    """By the name of the launch; of all cases, or of those with these names."""
    return dict(
        facts_of(stem, fact) for stem in TRITON | WITH_PRODUCTS for fact in triton_facts(stem, only)
    )


def apart(one: float, other: float) -> bool:
    """Whether two facts differ by more than a tenth of the larger."""
    return abs(one - other) > LIKE * max(abs(one), abs(other))


def beyond(name: str, found: Facts) -> str:
    """What of a launch is beyond its bounds; "" for nothing.

    Raises:
        KeyError: It has none.
    """
    if name in PRODUCTS:
        registers, local, issue = PRODUCTS[name]
    else:
        kind = re.sub(r" \d+ ", " ", name)
        registers, issue = COLUMN_SUM if kind.endswith("column_sum") else BOUNDS[kind]
        local = SPILLED.get(name, 0)
    wrong = []
    for key, most in (("registers", registers), ("issue", issue), ("local", local)):
        if found[key] > most:
            wrong.append(f"{key} {found[key]:g}, at most {most:g}")
    return ", ".join(wrong)


def costs(found: Facts) -> Facts:
    """What of a launch's facts costs time."""
    kept = {key: value for key, value in found.items() if key != "registers"}
    if "ahead" in kept:
        kept["ahead"] = min(kept["ahead"], ENOUGH)
    return kept


def differing(before: Facts, after: Facts) -> set[str]:
    """The names of the facts that differ by more than a tenth."""
    return {key for key, value in before.items() if apart(value, after[key])}


def compare(old: dict[str, Facts], new: dict[str, Facts]) -> tuple[list[str], list[str]]:
    """A line for each launch that is not alike in what costs time: those of which EXPLAINED says
    why, with the reason; the others, and reasons for what is alike.

    Raises:
        ValueError: The two have other launches.
    """
    if old.keys() != new.keys():
        raise ValueError(
            f"launches of only one of the two: {sorted(old.keys() ^ new.keys())}; make both files "
            "anew, from one source"
        )
    explained, other = [], []
    for name, before in old.items():
        after, reason = new[name], EXPLAINED.get(name, Reason(set(), ""))
        wrong = differing(costs(before), costs(after))
        pairs = (f"{key} {before[key]:g} | {after[key]:g}" for key in SHOWN if key in before)
        text = f"{name:<53} {', '.join(pairs)}: not alike in {' and '.join(sorted(wrong))}"
        if wrong - reason.facts:
            other.append(text)
        elif wrong:
            explained.append(f"{text}: {reason.text}")
        if unneeded := reason.facts - wrong:
            other.append(f"{name}: alike in {' and '.join(sorted(unneeded))}, which is explained")
    return explained, other


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    files = [argument for argument in arguments if argument != "--every"]
    if len(files) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    if len(files) == 1:
        found = facts(None if "--every" in arguments else kept_cases())
        made = {"triton": triton.__version__, "facts": found}
        Path(files[0]).write_text(json.dumps(made, indent=1) + "\n")
        return 0
    old, new = (json.loads(Path(name).read_text()) for name in files)
    explained, other = compare(old["facts"], new["facts"])
    print("\n".join(explained))
    pairs = [(found, new["facts"][name]) for name, found in old["facts"].items()]
    alike = sum(not differing(costs(one), costs(two)) for one, two in pairs)
    wholly = sum(not differing(one, two) for one, two in pairs)
    print(
        f"{alike} of {len(pairs)} launches are alike within a tenth in what costs time under "
        f"Triton {old['triton']} and {new['triton']}, {len(explained)} others for a reason; "
        f"{wholly} in registers and all bytes ahead, too"
    )
    wrong = [f"not as it should be under both: {text}" for text in other]
    for made in (old, new):
        for name, found in made["facts"].items():
            if text := beyond(name, found):
                wrong.append(f"Triton {made['triton']}, {name}: {text}")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
