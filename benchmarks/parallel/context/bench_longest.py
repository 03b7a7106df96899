"""The longest sequence that a BERT-base trains on within 4 GiB, with explicit scores and with a
sparse pattern; and the time of a step at one length. CPU; drawn by longest_picture.

DeepSpeed's post on sparse attention (9 September 2020) has three settings: dense, dense with
activation checkpointing, and sparse with it; the last is 10 times as long as the first for BERT
base (batch 1, V100 with 32 GB). Here are the same three. Fused attention without a pattern has
memory linear in length, too, so that against it a pattern saves time alone: its steps are timed.

    4 GiB (RLIMIT_DATA) | parameters, gradients, AdamW: 16 bytes each | what grows with length

Each length is a process of its own: a few tokens first, so that the optimizer has its states, then
a whole step. It fits, or memory runs out; the longest that fits is found by doubling and halving.
Dropout is 0.1 as in BERT, in explicit scores by torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import Options
from benchmarks.instruments import machine, report
from benchmarks.instruments.harness import Row, datetime, keep_row, timezone

__all__ = ["LIMIT", "PUBLISHED", "SETTINGS", "longest", "run", "step"]

LIMIT = 4096  # MiB
UNIT = 128  # tokens, of a length: the pattern needs two blocks
CLOSE = 0.04  # a longest length is known when 4 % more do not fit
PATTERN = "BigBird(num_random_blocks=2, seed=1)"
P = 0.1
PUBLISHED = 10.0  # times as long, DeepSpeed's sparse attention beside dense
# (explicit scores, recompute, pattern)
SETTINGS: dict[str, tuple[bool, bool, str]] = {
    "explicit scores": (True, False, ""),
    "explicit scores, recomputed": (True, True, ""),
    "BigBird, recomputed": (False, True, PATTERN),
    "fused, recomputed": (False, True, ""),
}
# Where the search begins if no row says: near what two cores found, to save steps.
STARTS = {
    "explicit scores": 1024,
    "explicit scores, recomputed": 3072,
    "BigBird, recomputed": 22656,
}
# What an allocation that fails says: of torch, of C++, of Python, of pyops, and of an output that a
# kernel asks torch for.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "MemoryError",
    "no memory for",
    "API call failed",
)
TIMED = "fused, recomputed"  # whose longest length would take hours to find
CHILD = """
import resource, sys
limit = int(sys.argv[1]) << 20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from benchmarks.parallel.context.bench_longest import main
main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def explicit_scores(model: torch.nn.Module) -> None:
    """Let attention make its scores, weights and dropped weights in memory."""
    from pyops.tensor_parallel.functional.scores import Core

    def attend(q: Any, k: Any, v: Any, *, scale: float, **_: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.mT * scale).softmax(-1)
        y = torch.nn.functional.dropout(weights, P) @ v
        return y.transpose(1, 2).flatten(2)

    for module in model.modules():
        if isinstance(module, Core):
            module.forward = attend  # type: ignore[method-assign, assignment]


def step(setting: str, tokens: int, layers: int, **smaller: Any) -> Callable[[int], float]:
    """f(length) -> the loss of a step of a BERT-base over so many tokens, at most `tokens`.

    Args:
        setting: Of SETTINGS.
        tokens: The length of the model's table of positions.
        layers: Blocks, 12 of BERT-base.
        smaller: Other fields of `BERTConfig`.
    """
    from pyops import recompute
    from pyops.models import BERT, BERTConfig
    from pyops.optim import AdamW

    explicit, again, pattern = SETTINGS[setting]
    model = BERT(
        BERTConfig(
            sequence_length=tokens,
            num_layers=layers,
            pooled_head=False,
            dropout=P,
            attention_dropout=P,
            pattern=pattern,
            **smaller,
        )
    )
    if explicit:
        explicit_scores(model)
    if again:
        recompute.apply(model, ["blocks.*"])
    optimizer = AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)

    def take(length: int) -> float:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        masked = torch.rand(1, length, generator=generator) < 0.15
        model.set_dropout((1, length), seed=0, step=0)
        loss = model.loss(ids, ids.masked_fill(~masked, -100))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return take


def main(setting: str, length: int, layers: int) -> None:
    """A step in this process; prints its seconds, the loss and the most memory there was."""
    import resource
    import time

    take = step(setting, length, layers)
    take(min(length, UNIT))
    start = time.perf_counter()
    loss = take(length)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}))


def probe(setting: str, length: int, *, limit: int, layers: int) -> dict[str, float] | None:
    """Figures of a step in a process of its own; None where memory runs out."""
    root = Path(__file__).resolve().parents[3]
    # Freed memory goes back, whichever thread had it
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(limit), setting, str(length), str(layers)],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, **heap, "PYTHONPATH": str(root)},
    )
    if done.returncode == 0:
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if not 0 < found["loss"] < 100:
            raise AssertionError(f"{setting}: a step over {length} tokens has {found}")
        print(f"  {setting}, {length} tokens: {found}", flush=True)
        return found
    if not any(words in done.stderr for words in OUT_OF_MEMORY):
        raise AssertionError(f"{setting}, {length} tokens ended with\n{done.stderr[-2000:]}")
    print(f"  {setting}, {length} tokens: out of memory", flush=True)
    return None


def longest(
    fits: Callable[[int], dict[str, float] | None], start: int
) -> tuple[int, int, dict[str, float]]:
    """The longest length that fits, the shortest found that does not, and the figures of the first;
    all are multiples of UNIT.

    Args:
        fits: Figures of a length, or None.
        start: Where to begin; near the answer saves steps.
    """

    def rounded(length: float) -> int:
        return max(UNIT, int(length) // UNIT * UNIT)

    low, high, figures, factor = 0, 0, {}, 1 + CLOSE
    at = rounded(start)
    while not low or not high:
        found = fits(at)
        if found is None:
            high = at
            if at == UNIT:
                raise AssertionError(f"not even {UNIT} tokens fit")
            at = min(rounded(at / factor), at - UNIT)
        else:
            low, figures = at, found
            at = max(rounded(at * factor), at + UNIT)
        factor = min(factor**2, 2.0)
    while high - low > max(UNIT, CLOSE * low):
        at = rounded((low + high) / 2)
        found = fits(at)
        if found is None:
            high = at
        else:
            low, figures = at, found
    return low, high, figures


def last_found() -> dict[str, int]:
    """The longest length of each setting in the rows there are."""
    rows = [row for row in report.read_rows() if row["bench"] == "longest" and "tokens" in row]
    return {row["setting"]: row["tokens"] for row in rows}


def row_of(case: str, **facts: Any) -> Row:
    seconds = facts.pop("seconds")
    device = torch.device("cpu")
    row = {
        "bench": "longest",
        "case": case,
        "device": "cpu",
        "us": {name: [round(1e6 * s, 3)] * 3 for name, s in seconds.items()},
        "speedup": facts.pop("speedup", {}),
        "max_error": None,
        "rounds": 1,
        **facts,
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    keep_row(row)
    return row


def run(options: Options) -> list[Row]:
    """A row for each setting but TIMED, and one of the times at the longest length of explicit
    scores that are recomputed. Half an hour, where no rows say where to begin."""
    if options.device.type != "cpu":
        return []
    rows, starts = [], last_found()
    found: dict[str, int] = {}
    for setting in SETTINGS:
        case = f"longest sequence of a BERT-base in {LIMIT} MiB, {setting}"
        if setting == TIMED or (options.only or "") not in case:
            continue

        def fits(length: int, setting: str = setting) -> dict[str, float] | None:
            return probe(setting, length, limit=LIMIT, layers=12)

        low, high, figures = longest(fits, starts.get(setting, STARTS[setting]))
        found[setting] = low
        beside = {**starts, **found}.get("explicit scores")
        more: Row = {"times_as_long": round(low / beside, 2)} if beside else {}
        if beside and SETTINGS[setting][2]:
            more["least"] = {"times_as_long": PUBLISHED}
        rows.append(
            row_of(
                case,
                setting=setting,
                tokens=low,
                too_long=high,
                limit_mib=LIMIT,
                peak_bytes=figures["peak_bytes"],
                seconds={"pyops": figures["seconds"]},
                **more,
            )
        )
        print(rows[-1]["case"], low, more, flush=True)
    length = {**starts, **found}.get("explicit scores, recomputed")
    case = f"step of a BERT-base over {length} tokens"
    if length and (options.only or "") in case:
        rows.append(times_at(case, length))
    return rows


def times_at(case: str, length: int) -> Row:
    """Steps of the recomputed settings in turn, three rounds; the sparse one is ours."""
    names = sorted(
        (name for name, (_, again, _) in SETTINGS.items() if again),
        key=lambda name: not SETTINGS[name][2],
    )
    rounds: list[dict[str, float]] = []
    for _ in range(3):
        each = {}
        for name in names:
            figures = probe(name, length, limit=LIMIT, layers=12)
            if figures is None:
                raise AssertionError(f"{name}: {length} tokens do not fit")
            each[name] = figures["seconds"]
        rounds.append(each)
    middle = {name: sorted(each[name] for each in rounds)[1] for name in names}
    ratios = {name: sorted(each[name] / each[names[0]] for each in rounds)[1] for name in names[1:]}
    return row_of(
        case,
        seconds=middle,
        speedup={name: round(ratio, 3) for name, ratio in ratios.items()},
        step_tokens=length,
    )
