"""A training step of a GPT in bf16 on one device: model FLOP utilisation beside plain PyTorch and
torch.compile.

    pyops                   as `pyops train` runs it
    pyops + torch.compile   with train.compile
    plain ...               the same model in torch's modules, torch.compile (on a GPU), torch's
                            fused AdamW

Before anything is timed, three steps from the same weights must give the losses of the plain model,
and its gradients' norms: random tokens cost a new model much the same whatever is wrong in it, but
their gradients don't. Operations are counted by the usual formula, 6 N + 12 L d s a token
(`gpt_step.Size.flops`), and set against a bf16 product measured in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.training.gpt_step import SIZES, PlainStep, PyopsStep, Size

__all__ = ["cases", "check_losses", "run"]

Step = Callable[[], tuple[float, float]]  # loss, norm of the gradient
CLOSE = 0.02


def differ(found: tuple[float, float], expected: tuple[float, float]) -> float:
    """The larger of the relative differences of loss and norm; raises when it is more than 16 bits
    explain."""
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    if not worst <= CLOSE or not expected[1] > 0:
        raise AssertionError(f"loss and gradient's norm are {found}, the plain model's {expected}")
    return worst


def check_losses(ours: Step, plain: Step) -> float:
    """Both take three steps from the same weights on the same tokens; the largest relative
    difference of loss and norm."""
    found = [(ours(), plain()) for _ in range(3)]
    if not found[2][0][0] < found[0][0][0]:
        raise AssertionError(f"the loss does not fall: {[mine[0] for mine, _ in found]}")
    return max(differ(mine, other) for mine, other in found)


def observe(tokens: int, row: Row) -> dict[str, Any]:
    """Tokens a second of each, and the better of ours against the best of the others."""
    middle = {name: us[1] for name, us in row["us"].items()}
    mine, others = (
        [time for name, time in middle.items() if name.startswith("pyops") == own]
        for own in (True, False)
    )
    found: dict[str, Any] = {
        "tokens_per_s": {name: round(1e6 * tokens / time) for name, time in middle.items()}
    }
    return found | ({"best_speedup": round(min(others) / min(mine), 3)} if others else {})


def case(name: str, size: Size, *, device: torch.device, compiled: bool, autocast: bool) -> Case:
    """compiled: torch.compile for the rivals, and ours once more with it. autocast: one rival more,
    of fp32 parameters."""
    torch._dynamo.reset()
    ours = PyopsStep(size, device)
    rivals = {"plain": PlainStep(size, device, ours.start)}
    if autocast:
        rivals["plain, autocast"] = PlainStep(size, device, ours.start, autocast=True)
    calls: dict[str, Step] = {"pyops": partial(ours, compiled=False)}
    if compiled:
        ours.compile()
        for rival in rivals.values():
            rival.compile()
        calls["pyops + torch.compile"] = ours
    calls |= {
        f"{rival} + torch.compile" if compiled else rival: step for rival, step in rivals.items()
    }
    return Case(
        "gpt",
        name,
        calls,
        device=device,
        flops=size.flops,
        check=lambda: check_losses(
            partial(ours, compiled=False), partial(rivals["plain"], compiled=False)
        ),
        targets={rival: 1.0 for rival in calls if rival.startswith("plain")}
        if device.type == "cuda"
        else {},
        least={"best_speedup": 1.1} if device.type == "cuda" else {},
        observe=partial(observe, size.tokens),
        facts={"parameters": size.parameters, "tokens": size.tokens},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each. Of the largest there is memory for one rival beside
    ours."""
    for title in ("GPT 125M", "GPT 1.3B") if device.type == "cuda" else ("GPT tiny",):
        size = SIZES[title]
        name = f"{title}, bf16, {size.batch} x {size.length} tokens a step"
        yield (
            name,
            partial(
                case,
                name,
                size,
                device=device,
                compiled=device.type == "cuda",
                autocast=title != "GPT 1.3B",
            ),
        )


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    chosen = [make for name, make in cases(options.device) if (options.only or "") in name]
    return run_cases(chosen, rounds=min(options.rounds, 7))
