"""Cross entropy forward and backward beside plain torch, and the last layer with its loss: time,
and the most memory it takes.

Memory is what a process holds at most beyond weight, hidden states and targets, the gradients
included: on the CPU by the kernel's count in a process of its own, on CUDA by torch's. A 16-bit
weight's gradient is added up in fp32 by pyops alone. The last layer with its loss does 6 N H V
operations for N tokens, width H and V words: three products.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import compiled, installed
from pyops.ops.layers.cross_entropy import cross_entropy
from pyops.tensor_parallel import linear_cross_entropy

__all__ = ["cases", "peak_of", "run", "taken_by"]

ROOT = Path(__file__).resolve().parents[3]
Loss = Callable[..., Tensor]


def plain_linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets)


def liger(what: str) -> dict[str, Loss]:
    """Liger's loss, or its "linear" one, where it is installed."""

    def make() -> Loss:
        from liger_kernel.transformers import functional as theirs

        if what == "linear":
            return lambda h, w, y: theirs.liger_fused_linear_cross_entropy(h, w, y)
        return lambda x, y: theirs.liger_cross_entropy(x, y)

    return installed({"Liger": make})


def aims(calls: dict[str, Any], device: torch.device) -> dict[str, float]:
    """On a GPU no rival is to be faster."""
    return dict.fromkeys(list(calls)[1:], 1.0) if device.type == "cuda" else {}


def step(loss: Loss, leaves: list[Tensor], targets: Tensor) -> Tensor:
    """Loss and gradients, fresh."""
    for leaf in leaves:
        leaf.grad = None
    value = loss(*leaves, targets)
    value.backward()
    return value.detach()


def check(ours: Loss, theirs: Loss, leaves: list[Tensor], targets: Tensor) -> float:
    """The largest difference of the gradients, in units of the largest; raises when it is too
    large, or nothing came."""
    found = []
    for loss in (ours, theirs):
        value = step(loss, leaves, targets)
        found.append(
            (value.float(), [leaf.grad.float() for leaf in leaves if leaf.grad is not None])
        )
    (a, mine), (b, others) = found
    bound = 1e-5 if leaves[0].dtype == torch.float32 else 2e-2
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(mine, others, strict=True)]
    if len(errors) != len(leaves) or max(errors) > bound or float((a - b).abs()) > bound * float(b):
        raise AssertionError(f"differs from torch by {errors}, loss {float(a)} and {float(b)}")
    return max(errors)


def agrees(loss: Loss, plain: Loss, leaves: list[Tensor], targets: Tensor) -> Callable[[], None]:
    """A check that a rival's loss is torch's, to a hundredth."""

    def vet() -> None:
        a, b = float(loss(*leaves, targets).detach()), float(plain(*leaves, targets).detach())
        if not abs(a - b) <= 0.01 * abs(b):
            raise AssertionError(f"its loss is {a}, torch's {b}")

    return vet


def loss_case(
    name: str, tokens: int, words: int, *, dtype: torch.dtype, device: torch.device
) -> Case:
    """Bytes: the logits are read twice and their gradient is written."""
    logits = torch.randn(tokens, words, device=device).to(dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), device=device)
    losses: dict[str, Loss] = {"pyops": cross_entropy, "torch": functional.cross_entropy}
    calls = {k: partial(step, f, [logits], targets) for k, f in losses.items()}
    vet = {}
    if device.type == "cuda":
        calls["torch.compile"] = partial(
            step, compiled(functional.cross_entropy), [logits], targets
        )
        for rival, loss in liger("loss").items():
            own = [
                logits.detach().clone().requires_grad_()
            ]  # it writes the gradient over the logits
            calls[rival] = partial(step, loss, own, targets)
            vet[rival] = agrees(
                loss, functional.cross_entropy, [logits.detach().clone().requires_grad_()], targets
            )
    return Case(
        "cross_entropy",
        name,
        calls,
        check=partial(check, cross_entropy, functional.cross_entropy, [logits], targets),
        device=device,
        bytes_moved=3 * logits.numel() * dtype.itemsize,
        vet=vet,
        targets=aims(calls, device) or {"torch": 2.0},
        least={"percent_of_copy": 85.0} if device.type == "cuda" else {},
    )


def operands(
    tokens: int, width: int, words: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.empty(words, width, device=device).normal_(std=0.02).to(dtype)
    return [hidden.requires_grad_(), weight.requires_grad_()], torch.randint(
        words, (tokens,), device=device
    )


def linear_case(
    name: str, tokens: int, width: int, words: int, *, dtype: torch.dtype, device: torch.device
) -> Case:
    leaves, targets = operands(tokens, width, words, dtype=dtype, device=device)
    cuda = device.type == "cuda"
    losses: dict[str, Loss] = {"pyops": linear_cross_entropy, "torch": plain_linear}
    others = liger("linear") if cuda else {}
    if cuda:
        losses |= {"torch.compile": compiled(plain_linear)} | others
    peaks = {
        k: peak(k, tokens, width, words, dtype=dtype, device=device) for k in ("pyops", "torch")
    }
    gradients = dtype.itemsize * (tokens + words) * width
    calls = {k: partial(step, f, leaves, targets) for k, f in losses.items()}
    return Case(
        "cross_entropy",
        name,
        calls,
        device=device,
        flops=6 * tokens * width * words,
        check=partial(check, linear_cross_entropy, plain_linear, leaves, targets),
        targets=aims(calls, device) or {"torch": 1.0},
        vet={rival: agrees(loss, plain_linear, leaves, targets) for rival, loss in others.items()},
        least={"memory_ratio_beside_gradients": 8.0} if cuda else {},
        most={"ms": 40.0} if cuda else {},
        facts={
            "peak_bytes": peaks,
            "gradient_bytes": gradients,
            "memory_ratio": round(peaks["torch"] / peaks["pyops"], 2),
            "memory_ratio_beside_gradients": round(
                (peaks["torch"] - gradients) / max(1, peaks["pyops"] - gradients), 2
            ),
        },
    )


def peak(
    kind: str, tokens: int, width: int, words: int, *, dtype: torch.dtype, device: torch.device
) -> int:
    """`peak_of`, on the CPU in a process of its own."""
    arguments = (kind, tokens, width, words, str(dtype).removeprefix("torch."), device.type)
    if device.type == "cuda":
        return peak_of(*arguments)
    code = (
        "from benchmarks.ops.layers.bench_cross_entropy import peak_of; "
        f"print(peak_of(*{json.dumps(arguments)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise AssertionError(f"measuring memory ended with\n{done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def peak_of(kind: str, tokens: int, width: int, words: int, dtype: str, device: str) -> int:
    """Bytes that one step takes at most beyond what is there before it."""
    loss: Loss = linear_cross_entropy if kind == "pyops" else plain_linear
    where = torch.device(device)
    step(
        loss, *operands(8, 16, 32, dtype=getattr(torch, dtype), device=where)
    )  # libraries are loaded, threads started
    leaves, targets = operands(tokens, width, words, dtype=getattr(torch, dtype), device=where)
    return taken_by(partial(step, loss, leaves, targets), where)


def taken_by(call: Callable[[], object], where: torch.device) -> int:
    """Bytes that a call takes at most beyond what is there before it: on the CPU of the whole
    process."""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    resident = _status("VmRSS")
    call()
    return _status("VmHWM") - resident


def _status(name: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name + ":")
    )
    return int(line.split()[1]) << 10


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    cuda = device.type == "cuda"
    sizes = [(2048, 50304, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if cuda:  # logits of 2 GiB, whatever the vocabulary
        sizes = [
            ((1 << 30) // words, words, torch.bfloat16) for words in (32768, 65536, 131072, 262144)
        ]
        sizes.append((8192, 65536, torch.float32))
    for tokens, words, dtype in sizes:
        name = (
            f"cross entropy {str(dtype).removeprefix('torch.')}, {tokens} x {words}, forward "
            "+ backward"
        )
        yield name, partial(loss_case, name, tokens, words, dtype=dtype, device=device)
    shapes = [(8192, 4096, 131072)] if cuda else [(2048, 512, 50304), (2048, 1024, 50304)]
    for tokens, width, words in shapes:
        for dtype in (torch.bfloat16,) if cuda else (torch.float32, torch.bfloat16):
            name = (
                f"linear cross entropy {str(dtype).removeprefix('torch.')}, {tokens} x "
                f"{width} x {words}, forward + backward"
            )
            yield name, partial(linear_case, name, tokens, width, words, dtype=dtype, device=device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`. On the CPU a call of the linear ones takes
    seconds: three rounds."""
    chosen = [(name, make) for name, make in cases(options.device) if (options.only or "") in name]
    slow = [
        make for name, make in chosen if options.device.type == "cpu" and name.startswith("linear")
    ]
    rows = run_cases(
        [make for _, make in chosen if make not in slow], rounds=min(options.rounds, 9)
    )
    return rows + run_cases(slow, rounds=min(options.rounds, 3))
