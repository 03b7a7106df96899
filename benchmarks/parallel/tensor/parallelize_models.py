"""What `parallelize` makes of the model classes of transformers that can be made small:
docs/tensor_parallel_models.md.

    python -m benchmarks.parallel.tensor.parallelize_models
        every class, on two ranks (processes); goes on where it ended
    python -m benchmarks.parallel.tensor.parallelize_models Gemma Bert
        classes whose names begin so, printed only
    python -m benchmarks.parallel.tensor.parallelize_models --write
        the page, from the results that are there

Each class is cut by its default plan, and by one that is guessed from its modules' names
(guessed_plans.py), on two Gloo ranks, forked for it from a process that has imported everything.
Where `parallelize` refuses, the model must be what it was, bit for bit. Where it does not, outputs
and all gradients are compared, in fp64, with those of the uncut model: over the ranks, with the
model's own values, beside the check that `parallelize` made. The script ends with 1 where a class
is cut and wrong, a refusal changed something, or an error is no ValueError.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parallel.tensor.parallelize_class import DEFECTS, Row, limit_memory, row_of, told
from benchmarks.parallel.tensor.parallelize_page import page
from benchmarks.parallel.tensor.tiny_models import names, tiny
from pyops.tensor_parallel.convert.architectures import PLANS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "models" / "parallelize.jsonl"
PAGE = ROOT / "docs" / "tensor_parallel_models.md"
RANKS = 2
LIMIT = 300  # seconds of wall time for a class, on a machine that may have other work
TOGETHER = 40  # classes that are measured before new processes are forked


def main() -> int:
    """Rows of all classes asked for, or the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefixes", nargs="*", help="beginnings of class names; none: all")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the page from the results that are there, and end",
    )
    arguments = parser.parse_args()
    kept = not arguments.prefixes
    rows = _read() if kept else {}
    everything = ordered()
    if kept:
        PAGE.write_text(page(list(rows.values()), list(everything)))
    if not arguments.write:
        prefixes = tuple(arguments.prefixes or [""])
        left = [
            name
            for name in everything
            if name.startswith(prefixes) and not _done(rows.get(name), everything[name])
        ]
        left.sort(key=lambda name: name in rows)  # those that lack a guess come last
        for row in swept({name: everything[name] for name in left}):
            print(
                f"{row['class']}: {row['result']} {row['why'][:100]} | "
                f"{row.get('guess')} {row.get('guess_why')}",
                flush=True,
            )
            rows[row["class"]] = row
            if kept:
                with open(RESULTS, "a") as file:
                    file.write(json.dumps(row) + "\n")
                if len(rows) % TOGETHER == 0:
                    PAGE.write_text(page(list(rows.values()), list(everything)))
    if kept:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        PAGE.write_text(page(list(rows.values()), list(everything)))
    return int(
        any(
            row[key] in DEFECTS
            for row in rows.values()
            for key in ("result", "guess")
            if key in row
        )
    )


def _read() -> dict[str, Row]:
    """{class: its last row}."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["class"]: row for row in map(json.loads, lines)}


def _done(row: Row | None, guess: bool) -> bool:
    return row is not None and ("guess" in row or not guess or row["result"] == "not made")


def ordered() -> dict[str, bool]:
    """All classes: those for whose blocks there is a plan, then one of each other architecture,
    then the rest.

    {name: whether a plan is guessed for it}: for one of each architecture, as the others have the
    same blocks.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    found = names()
    modules = {name: getattr(transformers, name).__module__ for name in found}
    planned = {
        module
        for module in set(modules.values())
        if any(key in vars(sys.modules[module]) for key in PLANS)
    }
    first = {
        module: name
        for name, module in sorted(modules.items(), key=lambda item: _weight(item[0]), reverse=True)
    }
    found.sort(key=lambda name: (modules[name] not in planned, first[modules[name]] != name))
    return {name: first[modules[name]] == name for name in found}


def _weight(name: str) -> tuple[bool, int]:
    """What stands for an architecture is its model with a head for language, or else that of the
    shortest name."""
    return not name.endswith(("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")), len(name)


def swept(chosen: Mapping[str, bool]) -> Iterator[Row]:
    """A row for each class, as it is found."""
    torch.set_num_threads(1)
    with (
        torch.no_grad()
    ):  # what a first model imports; no backward, whose threads would not outlive a fork
        tiny("LlamaForCausalLM")(torch.tensor([[1, 2]]))
    gc.collect()
    gc.freeze()
    pair = None
    for done, (name, guess) in enumerate(chosen.items()):
        if pair is not None and (done % TOGETHER == 0 or pair.spoilt):
            pair.end()
            pair = None
        pair = pair or Pair()
        yield {"class": name, **pair.row_of(name, guess=guess)}
    if pair is not None:
        pair.end()


class Pair:
    """Two forked ranks that measure classes one after the other. spoilt: one of them died, was
    late, or found a defect."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.spoilt, self._folder = False, tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._pipes: list[Any] = [ours for ours, _ in pipes]
        self._workers = [
            context.Process(target=_work, args=(rank, self._folder.name, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker, (_, theirs) in zip(self._workers, pipes, strict=True):
            worker.start()
            theirs.close()

    def row_of(self, name: str, *, guess: bool) -> Row:
        """{result, why, guess, guess_why}: both ranks make the model, and if both could, they cut
        it."""
        cut = "cut, and by a guess" if guess else "cut"
        late = time.monotonic() + LIMIT
        for stage in ("made", cut):
            for pipe in self._pipes:
                pipe.send(name if stage == "made" else stage)
            replies = [self._reply(pipe, late) for pipe in self._pipes]
            lost = [reply for reply in replies if "result" not in reply]
            self.spoilt = self.spoilt or bool(lost)
            if lost and stage == cut:
                replies = [
                    {"result": "raised", "why": reply["lost"]} if reply in lost else reply
                    for reply in replies
                ]
            bad = lost or [reply for reply in replies if reply["result"] != "made"]
            if stage == "made" and bad:
                return {"result": "not made", "why": bad[0].get("why") or bad[0]["lost"]}
        row = max(replies, key=lambda reply: reply["result"] == "raised")  # else they are the same
        self.spoilt = self.spoilt or any(row.get(key) in DEFECTS for key in ("result", "guess"))
        return row

    def _reply(self, pipe: Any, late: float) -> Row:
        if not pipe.poll(max(0.0, late - time.monotonic())):
            return {"lost": f"{LIMIT} s have passed"}
        try:
            found: Row = pipe.recv()
        except EOFError:
            return {"lost": "the process died"}
        return found

    def end(self) -> None:
        """Both processes are ended."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._folder.cleanup()


def _work(rank: int, folder: str, pipe: Any) -> None:
    """A rank: a class by its name, then whether both ranks could make it."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)  # warnings of transformers
    limit_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    model: Any = None
    parent = os.getppid()
    while True:
        while not pipe.poll(5.0):
            if os.getppid() != parent:
                return
        asked = pipe.recv()
        try:
            if asked in ("cut", "cut, and by a guess"):
                pipe.send(row_of(model, group=dist.group.WORLD, guess=asked != "cut"))
            else:
                model = tiny(asked)
                pipe.send({"result": "made"})
        except Exception as error:
            pipe.send(
                {"result": "bench" if asked.startswith("cut") else "not made", "why": told(error)}
            )


if __name__ == "__main__":
    sys.exit(main())
