"""The kernels themselves, called as ops: Adam on long lists, the squared norm, sums of rows, random
numbers.

Each against plain torch's way to the same result, and against a copy of as many bytes on the same
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.trace import launched
from pyops.ops import random
from pyops.ops.communication import reduce
from pyops.ops.optimizers import grad_norm, optim
from pyops.ops.optimizers.table import optimizer_table

__all__ = ["cases", "run"]

MI = 1 << 20
HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FLAGS: dict[str, Any] = {
    "decoupled": True,
    "maximize": False,
    "zero_grads": False,
    "stochastic_rounding": False,
    "seed": 1,
}
LARGE = 64 * MI  # elements, from which on a step ought to be bound by memory
BF16 = torch.bfloat16


def gpt2_xl() -> list[int]:
    """Elements of each parameter of GPT-2 XL (Radford et al., 2019): 580 tensors, 1.56 G
    elements."""
    d = 1600
    block = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d, *block * 48, d, d]


def adam(name: str, sizes: list[int], *, device: torch.device) -> Case:
    """fp32 throughout, 28 bytes per element."""
    lists = [[torch.randn(n, device=device) * scale for n in sizes] for scale in (1.0, 0.1, 0.1)]
    lists += [
        [x.square() for x in lists[2]],
        [],
        [],
        [],
        [torch.zeros((), device=device) for _ in sizes],
    ]
    table = optimizer_table(*lists)  # type: ignore[arg-type]
    twin = [[x.clone() for x in column] for column in lists]
    ours = partial(optim.adam_from_table_, table, **HYPER, **FLAGS)

    def fused() -> None:
        torch._foreach_add_(twin[7], 1)
        params, grads, exp_avgs, exp_avg_sqs, none, _, _, steps = twin
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            none,
            steps,
            amsgrad=False,
            maximize=False,
            **HYPER,
        )  # type: ignore[call-overload]

    def check() -> float:
        before = lists[0][0].clone()
        ours()
        fused()
        if torch.equal(before, lists[0][0]):
            raise AssertionError("the step moved nothing")
        worst = max(float((a - b).abs().max()) for a, b in zip(lists[0], twin[0], strict=True))
        if worst > 1e-6:
            raise AssertionError(f"differs from torch by {worst}")
        return worst

    cuda = device.type == "cuda"
    return Case(
        "kernels",
        name,
        {"pyops": ours, "torch fused": fused},
        check=check,
        device=device,
        bytes_moved=28 * sum(sizes),
        targets={"torch fused": 1.0} if cuda else {},
        observe=launched(ours, device),
        most={"launches": 1.0} if cuda else {},
        least={"percent_of_copy": 95.0} if cuda and sum(sizes) >= LARGE else {},
    )


def norm(name: str, sizes: list[int], *, dtype: torch.dtype, device: torch.device) -> Case:
    tensors = [torch.randn(n, device=device).to(dtype) for n in sizes]

    def check() -> float:
        exact = sum(float(t.double().square().sum()) for t in tensors)
        error = abs(float(grad_norm.squared_norm(tensors)[0]) / exact - 1)
        if error > 1e-12:
            raise AssertionError(f"relative error {error}")
        return error

    return Case(
        "kernels",
        name,
        {
            "pyops": lambda: grad_norm.squared_norm(tensors),
            "torch get_total_norm": lambda: torch.nn.utils.get_total_norm(tensors),
        },
        check=check,
        device=device,
        bytes_moved=dtype.itemsize * sum(sizes),
    )


def same(
    ours: Callable[[], object], theirs: Callable[[], object], result: Tensor, other: Tensor
) -> Callable[[], float]:
    """A check that both give the same bits, and that something was written."""

    def check() -> float:
        result.fill_(-7.0)
        ours()
        theirs()
        if not torch.equal(result, other) or bool((result == -7.0).all()):
            raise AssertionError(
                f"differs from torch by {float((result.float() - other.float()).abs().max())}"
            )
        return 0.0

    return check


def sums(numel: int, *, device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    def eight(name: str) -> Case:
        rows = [torch.randn(numel, device=device).to(BF16) for _ in range(8)]
        out, other = (torch.empty(numel, device=device, dtype=BF16) for _ in range(2))

        def theirs() -> None:
            total = rows[0].float()
            for row in rows[1:]:
                total += row
            other.copy_(total)

        ours = partial(reduce.sum_rows_, out, rows)
        return Case(
            "kernels",
            name,
            {"pyops": ours, "torch": theirs},
            check=same(ours, theirs, out, other),
            device=device,
            bytes_moved=18 * numel,
        )

    def cast(name: str) -> Case:
        a, out, other = (
            torch.randn(numel, device=device),
            *(torch.empty(numel, device=device, dtype=BF16) for _ in range(2)),
        )
        ours = partial(reduce.scale_cast_, out, a, scale=0.25)

        def theirs() -> None:
            other.copy_(a * 0.25)

        return Case(
            "kernels",
            name,
            {"pyops": ours, "torch": theirs},
            check=same(ours, theirs, out, other),
            device=device,
            bytes_moved=6 * numel,
        )

    for name, make in (
        (f"sum of 8 bf16 rows of {numel // MI} Mi", eight),
        (f"fp32 to bf16 with scale, {numel // MI} Mi", cast),
    ):
        yield name, partial(make, name)


def draws(numel: int, *, device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    place = {"key": 3, "offset": 0, "row": numel, "row_stride": 0}
    kinds: tuple[tuple[str, Any, Any, torch.dtype, dict[str, float]], ...] = (
        ("uniform", random.philox_uniform_, lambda x: x.uniform_(), torch.float32, {}),
        ("normal", random.philox_normal_, lambda x: x.normal_(), torch.float32, {}),
        (
            "dropout mask",
            random.philox_dropout_mask_,
            lambda x: x.bernoulli_(0.9),
            torch.bool,
            {"p": 0.1},
        ),
    )

    def make(name: str, op: Any, rival: Any, dtype: torch.dtype, extra: dict[str, float]) -> Case:
        out, other = (torch.zeros(numel, device=device, dtype=dtype) for _ in range(2))

        def check() -> None:
            op(out, **extra, **place)
            wanted = {"uniform": 0.5, "normal": 0.0, "dropout mask": 0.9}[name.split(",")[0]]
            if abs(float(out.float().mean()) - wanted) > 0.01 or float(out.float().std()) < 0.2:
                raise AssertionError(f"mean {float(out.float().mean())}, expected {wanted}")

        return Case(
            "kernels",
            name,
            {"pyops": lambda: op(out, **extra, **place), "torch": lambda: rival(other)},
            check=check,
            device=device,
            bytes_moved=dtype.itemsize * numel,
        )

    for kind, op, rival, dtype, extra in kinds:
        name = f"{kind}, {numel // MI} Mi"
        yield name, partial(make, name, op, rival, dtype, extra)


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each; on a GPU large enough to be beyond its caches."""
    cuda = device.type == "cuda"
    large = (256 if cuda else 8) * MI
    lists = {
        f"1 x {large // MI} Mi": [large],
        f"1000 x {64 if cuda else 8} Ki": [(64 if cuda else 8) << 10] * 1000,
    }
    if cuda:
        lists["parameters of GPT-2 XL"] = gpt2_xl()
    for title, sizes in lists.items():
        yield f"adam fp32, {title}", partial(adam, f"adam fp32, {title}", sizes, device=device)
    for dtype in (torch.float32, BF16):
        for title, sizes in lists.items():
            name = f"squared norm {str(dtype).removeprefix('torch.')}, {title}"
            yield name, partial(norm, name, sizes, dtype=dtype, device=device)
    yield from sums(large, device=device)
    yield from draws(large, device=device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
