"""The elementwise optimizers against torch.optim (foreach, fused), DeepSpeedCPUAdam where
installed, and torch's own sequence.

    sizes       one large tensor; 1000 of 64 elements; 1000 of 4 Ki     what a launch costs, what
                                                                        memory allows
    precision   bf16 parameters with float32 masters and moments
    tail        clip + step + zero_grad + bf16 copy
    rules       SGD, SGD with momentum, Lion (torch has none: foreach calls instead) and Adagrad at
                two sizes
    overhead    what step() costs beyond its kernel: 1000 parameters, and one flat parameter

A case that moves memory states its bytes; GB/s and percent of a copy follow from them. On a GPU the
sizes are lists: one tensor of 256 Mi, 1000 of 64 Ki, the parameters of GPT-2 XL. From 64 Mi
elements on a step there aims at 95 % of a copy, in one launch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, keep_row, run_cases
from benchmarks.instruments.rivals import of_adamw
from benchmarks.instruments.trace import launched
from benchmarks.ops.optimizers.bench_kernels import LARGE, gpt2_xl
from benchmarks.ops.optimizers.optimizer_rules import RULES, of_rule
from benchmarks.ops.optimizers.parameter_lists import (
    Step,
    compare,
    difference,
    parameters,
    twins,
)
from pyops.optim import AdamW

__all__ = ["cases", "run"]

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MI, KI = 1 << 20, 1 << 10
MANY, SOME = 1000, 256  # tensors
HUGE = 1 << 30  # elements of which a GPU holds the states of two only


def rivals(params: list[nn.Parameter], device: torch.device) -> dict[str, Step]:
    """torch's ways, each on parameters of its own."""
    found: dict[str, Step] = {
        "torch fused": torch.optim.AdamW(twins(params), **HYPER, fused=True).step,
        "torch foreach": torch.optim.AdamW(twins(params), **HYPER, foreach=True).step,
    }
    if device.type == "cpu" and importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam(twins(params), adamw_mode=True, **HYPER).step
    return found | (of_adamw(lambda: twins(params), HYPER) if device.type == "cuda" else {})


def aims(numel: int, device: torch.device) -> dict[str, Any]:
    """What a step of AdamW over so many elements ought to reach on a GPU, as arguments of a
    Case."""
    if device.type != "cuda":
        return {}
    return {"most": {"launches": 1.0}, "least": {"percent_of_copy": 95.0} if numel >= LARGE else {}}


def of_sizes(name: str, sizes: list[int], *, device: torch.device, target: float | None) -> Case:
    """fp32 throughout, 28 bytes per element. Of the largest list a GPU holds only ours and one
    rival's."""
    params = parameters(sizes, device=device)
    twin, numel = twins(params), sum(sizes)
    ours, theirs = AdamW(params, **HYPER), torch.optim.AdamW(twin, **HYPER, fused=True)
    others = rivals(params, device) if numel < HUGE else {"torch fused": theirs.step}
    return Case(
        "optim",
        name,
        {"pyops": ours.step, **others},
        device=device,
        check=lambda: compare(params, twin, ours.step, theirs.step),
        bytes_moved=28 * numel,
        targets={"torch fused": target} if target else {},
        observe=launched(ours.step, device),
        **aims(numel, device),
    )


def fresh_gradients(name: str, *, device: torch.device) -> Case:
    """The common loop: zero_grad sets gradients to None, backward makes new ones, which the step
    has never seen."""
    params = parameters([64] * MANY, device=device)
    twin = twins(params)
    ours, theirs = AdamW(params, **HYPER), torch.optim.AdamW(twin, **HYPER, fused=True)
    grads = [p.grad for p in params]

    def renew(some: list[nn.Parameter]) -> Step:
        def make() -> None:
            for p in some:
                p.grad = None
            for p, g in zip(some, grads, strict=True):
                assert g is not None
                p.grad = g.clone()

        return make

    return Case(
        "optim",
        name,
        {"pyops": ours.step, "torch fused": theirs.step},
        prepare={"pyops": renew(params), "torch fused": renew(twin)},
        device=device,
        check=lambda: compare(params, twin, ours.step, theirs.step),
    )


def with_masters(
    name: str, sizes: list[int], *, device: torch.device, target: float | None
) -> Case:
    """bf16 parameters and gradients, float32 master and moments: 28 bytes per parameter, as float32
    alone."""
    params = parameters(sizes, device=device, dtype=torch.bfloat16)
    twin, full, numel = twins(params), twins(params, torch.float32), sum(sizes)
    ours, theirs = (
        AdamW(params, **HYPER, master_weights=True),
        torch.optim.AdamW(full, **HYPER, fused=True),
    )

    def by_hand() -> None:
        """torch's way: the gradients copied to float32, the fused step on the masters, the
        parameters copied back."""
        torch._foreach_copy_(
            [p.grad for p in full if p.grad is not None],
            [p.grad for p in twin if p.grad is not None],
        )
        theirs.step()
        torch._foreach_copy_([p.detach() for p in twin], [p.detach() for p in full])

    calls, targets = (
        {"pyops": ours.step, "torch fused + copies": by_hand},
        {"torch fused + copies": target},
    )
    if numel < HUGE:
        calls["pyops fp32"] = AdamW(
            parameters(sizes, device=device), **HYPER
        ).step  # the same bytes, all of them fp32
        targets["pyops fp32"] = 0.9
    return Case(
        "optim",
        name,
        calls,
        device=device,
        check=lambda: compare(params, twin, ours.step, by_hand, relative=2.0**-7),
        bytes_moved=28 * numel,
        targets={rival: aim for rival, aim in targets.items() if aim and target},
        observe=launched(ours.step, device),
        **aims(numel, device),
    )


def narrow(name: str, numel: int, *, device: torch.device) -> Case:
    """bf16 everything with stochastic rounding, 14 bytes per parameter, against torch's bf16, which
    rounds to nearest."""
    params = parameters([numel], device=device, dtype=torch.bfloat16)
    twin = twins(params)
    ours = AdamW(params, **HYPER, state_dtype=torch.bfloat16, stochastic_rounding=True)
    theirs = torch.optim.AdamW(twin, **HYPER, fused=True)
    return Case(
        "optim",
        name,
        {"pyops": ours.step, "torch fused": theirs.step},
        device=device,
        check=lambda: compare(params, twin, ours.step, theirs.step, relative=2.0**-5),
        bytes_moved=14 * numel,
    )


def tail(name: str, count: int, numel: int, *, device: torch.device, target: float | None) -> Case:
    """Everything that a training step does after backward: clip, step, zero_grad, 16-bit weights
    for the next forward."""
    params = parameters([numel] * count, device=device)
    twin = twins(params)
    grads = [p.grad.clone() for p in params if p.grad is not None]
    copies, twin_copies = (
        [torch.empty_like(p, dtype=torch.bfloat16) for p in ps] for ps in (params, twin)
    )
    ours = AdamW([{"params": params, "copies": copies}], **HYPER, max_grad_norm=1.0, zero_grad=True)
    theirs = torch.optim.AdamW(twin, **HYPER, fused=True)

    def sequence() -> None:
        torch.nn.utils.clip_grad_norm_(twin, 1.0)
        theirs.step()
        theirs.zero_grad(set_to_none=False)
        torch._foreach_copy_(twin_copies, [p.detach() for p in twin])

    def check() -> float:
        worst = 0.0
        for _ in range(2):
            for some in (params, twin):
                torch._foreach_copy_([p.grad for p in some if p.grad is not None], grads)
            ours.step()
            sequence()
            worst = max(worst, difference(params, twin))
        for p, copy in zip(params, copies, strict=True):
            if (
                not torch.equal(copy, p.detach().to(torch.bfloat16))
                or p.grad is None
                or p.grad.any()
            ):
                raise AssertionError("a copy or a zeroed gradient is wrong")
        return worst

    return Case(
        "optim",
        name,
        {"pyops": ours.step, "torch fused sequence": sequence},
        device=device,
        check=check,
        bytes_moved=38 * count * numel,
        targets={"torch fused sequence": target} if target else {},
    )


def overhead(
    name: str, params: list[nn.Parameter], *, device: torch.device, limit_us: float
) -> Row:
    """What step() costs on the host beyond the kernel: the median of step() less the kernel, both
    on the same table.

    The parameters are made as small as can be, so that the kernel hides nothing.
    """
    from benchmarks.instruments import machine

    optimizer = AdamW(params, **HYPER)
    optimizer.step()
    group, plan = optimizer.param_groups[0], optimizer._plans[0][0]

    def kernel() -> None:
        optimizer._launch(group, plan.table, None, None, None)  # type: ignore[arg-type]

    found: dict[str, list[float]] = {"step": [], "kernel": []}
    for _ in range(300):
        for label, call in (("step", optimizer.step), ("kernel", kernel)):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            found[label].append(time.perf_counter() - start)
    beyond = sorted(s - k for s, k in zip(found["step"], found["kernel"], strict=True))
    quantiles = [round(1e6 * beyond[round(q * (len(beyond) - 1))], 2) for q in (0.2, 0.5, 0.8)]
    verdict = "meets" if quantiles[1] < limit_us else "ABOVE"
    print(
        f"{name:<52} {quantiles[1]:>10.1f} us beyond the kernel ({verdict} {limit_us:g})",
        flush=True,
    )
    return {
        "bench": "optim",
        "case": name,
        "device": device.type,
        "us": {"pyops": quantiles},
        "speedup": {},
        "max_error": None,
        "limit_us": limit_us,
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each; the sizes of a GPU are larger, to be beyond its
    caches."""
    on_cpu = device.type == "cpu"
    large = 16 * MI if on_cpu else 128 * MI
    title = f"{large // MI} Mi"
    many = (SOME, 64 * KI) if on_cpu else (SOME, 512 * KI)

    def aim(value: float) -> float | None:
        return value if on_cpu else None

    lists = {f"1 tensor of {title}": [large]}
    if not on_cpu:
        lists = {
            "1 tensor of 256 Mi": [256 * MI],
            "1000 tensors of 64 Ki": [64 * KI] * 1000,
            "GPT-2 XL": gpt2_xl(),
        }
    for words, sizes in lists.items():
        case = f"AdamW fp32, {words}"
        yield case, partial(of_sizes, case, sizes, device=device, target=0.97 if on_cpu else 1.0)
    for numel, factor in ((64, 8.0), (4 * KI, 2.5)):
        case = f"AdamW fp32, {MANY} tensors of {numel if numel == 64 else '4 Ki'}"
        yield case, partial(of_sizes, case, [numel] * MANY, device=device, target=aim(factor))
    for words, sizes in lists.items():
        case = f"AdamW bf16 + fp32 master and moments, {title if on_cpu else words}"
        yield case, partial(with_masters, case, sizes, device=device, target=2.0 if on_cpu else 1.0)
    for rule in RULES:
        for words, count, numel in (
            (f"1 tensor of {title}", 1, large),
            (f"{MANY} tensors of 64", MANY, 64),
        ):
            case = f"{rule} fp32, {words}"
            yield case, partial(of_rule, case, rule, count, numel, device=device, target=aim(1.0))
    fresh = f"AdamW fp32, {MANY} tensors of 64, new gradients"
    yield fresh, lambda: fresh_gradients(fresh, device=device)
    bf16 = f"AdamW bf16 throughout, stochastic rounding, {title}"
    yield bf16, lambda: narrow(bf16, large, device=device)
    around = f"clip + step + zero_grad + bf16 copy, {many[0]} tensors, {title}"
    yield around, lambda: tail(around, *many, device=device, target=aim(2.2))


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    device, only = options.device, options.only or ""
    rows = run_cases([make for name, make in cases(device) if only in name], rounds=options.rounds)
    for name, count, limit in (
        (f"host cost of a step, {MANY} tensors", MANY, 300.0),
        ("host cost of a step, flat", 1, 60.0),
    ):
        if only in name:
            rows.append(
                overhead(
                    name, parameters([1] * count, device=device), device=device, limit_us=limit
                )
            )
            keep_row(rows[-1])
    return rows
