"""What `parallelize` makes of the classes of transformers that can be made small: the table of docs/tensor_parallel_models.md.

    python -m benchmarks.parallelize_models                  every class, two ranks (processes), some hours on 2 cores
    python -m benchmarks.parallelize_models Gemma Bert       classes whose names begin so, on the terminal alone
    python -m benchmarks.parallelize_models --write          the page, from the results that are there

Each class is cut by its default plan on two Gloo ranks. Where `parallelize` refuses, the model must be what it was, bit for
bit. Where it does not, outputs and all gradients are compared, in fp64, with those of the uncut model: over the ranks, with
the model's own values, beside the check that `parallelize` made. A class that is cut and wrong is a row "WRONG", and the script
ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.tiny_models import names, tiny
from pyops.tensor_parallel import finish_gradients, parallelize
from pyops.tensor_parallel.convert.architectures import PLANS
from pyops.tensor_parallel.convert.check.example import examples
from pyops.tensor_parallel.convert.check.trial import placed
from pyops.tensor_parallel.convert.swap import laid_out

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models" / "parallelize.jsonl"
PAGE = ROOT / "docs" / "tensor_parallel_models.md"
BOUND = 1e-6  # of the largest number, in fp64
LIMIT = 60  # seconds for a class

Row = dict[str, str]


def main() -> int:
    """Rows of all classes asked for, or the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", help="beginnings of class names; none: all")
    parser.add_argument("--known", action="store_true", help="only classes whose blocks have a plan")
    parser.add_argument("--write", action="store_true", help="write the page from the results that are there, and end")
    arguments = parser.parse_args()
    if arguments.write:
        rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        PAGE.write_text(page(rows))
        return int(any(row["result"] == "WRONG" for row in rows))
    chosen = [
        name for name in sorted(names(), key=unknown) if not arguments.prefixes or name.startswith(tuple(arguments.prefixes))
    ]
    if arguments.known:
        chosen = [name for name in chosen if not unknown(name)]
    with tempfile.NamedTemporaryFile() as store:
        found = RESULTS if not arguments.prefixes else Path(store.name + ".jsonl")
        done = {json.loads(line)["class"] for line in found.read_text().splitlines()} if found.exists() else set()
        left = [name for name in chosen if name not in done]
        torch.multiprocessing.spawn(work, (store.name, left, str(found)), nprocs=2)
        rows = [json.loads(line) for line in found.read_text().splitlines()]
    if not arguments.prefixes:
        PAGE.write_text(page(rows))
    return int(any(row["result"] == "WRONG" for row in rows))


def unknown(name: str) -> bool:
    """Whether the file of a class has no blocks for which there is a plan: those that have come first."""
    import transformers

    return not any(key in vars(sys.modules[getattr(transformers, name).__module__]) for key in PLANS)


def work(rank: int, store: str, left: list[str], found: str) -> None:
    """One of the two ranks."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}.init", rank=rank, world_size=2)
    tiny("LlamaForCausalLM")  # what is imported with the first model is not within its limit
    for name in left:
        row = {"class": name, **row_of(name)}
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, row)
        worst = next((each for each in rows if each["result"] in ("WRONG", "changed")), rows[0])
        if rank == 0:
            with open(found, "a") as file:
                file.write(json.dumps(worst) + "\n")
            print(f"{worst['class']}: {worst['result']} {worst['why']}", flush=True)


def row_of(name: str) -> Row:
    """{result, why} of a class, on each rank."""
    failed = None
    try:
        with limit(LIMIT):
            model = tiny(name)
            known = has_plan(model)
            before, inputs, expected = reference(model) if known else (model, {}, None)
    except Exception as error:
        failed = told(error)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, failed)  # a rank alone may have been too slow
    if any(everyone):
        return {"result": "not made", "why": next(filter(None, everyone))}
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    modules = [(key, id(module), type(module)) for key, module in model.named_modules()]
    found = []
    for sequence_parallel in (False, True) if known else (False,):
        cut = copy.deepcopy(model)
        try:
            parallelize(cut, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        except ValueError as error:
            why = told(error)
            same = all(torch.equal(value, kept[key]) for key, value in cut.state_dict().items())
            same = same and [(key, kind) for key, _, kind in modules] == [(k, type(m)) for k, m in cut.named_modules()]
            same = same and not any(m._forward_hooks or m._forward_pre_hooks for m in cut.modules())
            found.append(("refused" if same else "changed", why))
            continue
        found.append(compared(cut, before, inputs, expected))
    (result, why), (with_sp, why_sp) = found[0], found[-1]
    if result == "right" and with_sp != "right":
        return {"result": "WRONG" if with_sp == "WRONG" else "right", "why": f"; sequence_parallel {with_sp}: {why_sp}"}
    return {"result": result, "why": why if result != "right" else ""}


def has_plan(model: nn.Module) -> bool:
    """Whether there is one for the classes of its blocks."""
    return any(kind.__name__ in PLANS for module in model.modules() for kind in type(module).__mro__)


def reference(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """The model in fp64, arguments for it, and (outputs, gradients)."""
    before = copy.deepcopy(model).double()
    reasons = []
    for _, options in examples(model, None):
        inputs = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()}
        try:
            return before, inputs, passed(before, inputs)
        except Exception as error:
            reasons.append(error)
            before.zero_grad()
    raise reasons[0]


def passed(model: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and gradients of a sum of all of them, weighted."""
    torch.manual_seed(7)
    outputs = [each for each in tensors(model(**inputs)) if each.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    weighted = [(torch.randn(y.shape, generator=generator, dtype=y.dtype) * y).sum() for y in outputs if y.requires_grad]
    torch.stack(weighted).sum().backward()
    return [y.detach() for y in outputs], {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """All that are in mappings and sequences."""
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from tensors(value)


def compared(cut: nn.Module, before: nn.Module, inputs: Any, expected: Any) -> tuple[str, str]:
    """("right", "") or ("WRONG", what): outputs, and norms of every parameter's gradient over both ranks, and their parts."""
    cut = cut.double()
    try:
        outputs, _ = passed(cut, inputs)
        finish_gradients(cut, group=dist.group.WORLD)
    except Exception as error:
        return "WRONG", f"fails when run: {told(error)}"
    for y, reference in zip(outputs, expected[0], strict=True):
        if y.shape != reference.shape or float((y - reference).abs().max()) > BOUND * float(reference.abs().max()):
            return "WRONG", "an output differs"
    scale = max(float(g.abs().max()) for g in expected[1].values())
    for key, module, place in placed(cut):
        p = cut.get_parameter(key)
        whole = expected[1].get(key)
        if whole is None:
            continue
        mine = whole if place is None else place.take(laid_out(module, whole, place))
        got = torch.zeros_like(mine) if p.grad is None else p.grad
        if float((got - mine).abs().max()) > BOUND * max(float(whole.abs().max()), 1e-3 * scale):
            return "WRONG", f"the gradient of {key} differs"
    return "right", ""


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"{seconds} s have passed")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def told(error: BaseException) -> str:
    """A line about it."""
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text[:160]}" if not isinstance(error, ValueError) else text[:220]


TITLES = {
    "right": "Right by the default plan",
    "refused": "Refused, and unchanged",
    "changed": "Refused, but changed",
    "WRONG": "Cut, and wrong",
    "not made": "Not made small, so not tried",
}


def page(rows: list[Row]) -> str:
    """The docs page."""
    import transformers

    counts = ", ".join(f"{sum(row['result'] == key for row in rows)} {title.lower()}" for key, title in TITLES.items())
    lines = [
        "# Model classes of transformers under `parallelize`",
        "",
        "Written by `python -m benchmarks.parallelize_models`; transformers "
        f"{transformers.__version__}, 2 ranks, models of two layers of width 16 with random values.",
        f"Of {len(rows)} classes: {counts}. A class that is not listed was not measured; the script goes on where it ended.",
        "",
        "Right: outputs and all gradients are, in fp64, those of the uncut model to 1e-6 of the largest number, with sequence",
        "parallelism and without where nothing else is said. A class without a plan needs `plan=`, which is checked alike.",
    ]
    for key, title in TITLES.items():
        found = sorted((row for row in rows if row["result"] == key), key=lambda row: row["class"])
        if not found:
            continue
        lines += ["", f"## {title}: {len(found)}", ""]
        reasons: dict[str, list[str]] = {}
        for row in found:
            reasons.setdefault(reason(row["why"]), []).append(row["class"])
        lines += ["| classes | |", "|---|---|"]
        lines += [f"| {', '.join(classes)} | {why} |" for why, classes in sorted(reasons.items(), key=lambda kv: -len(kv[1]))]
    return "\n".join(lines) + "\n"


def reason(why: str) -> str:
    """Reasons that are alike are one."""
    if why.startswith("no plan is known for"):
        return "no plan is known"
    return why.removeprefix("; ")


if __name__ == "__main__":
    sys.exit(main())
