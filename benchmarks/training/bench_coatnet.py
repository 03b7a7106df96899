"""A CoAtNet at inference with its batch norms folded into its convolutions, and batch norm over two
ranks beside that of one.

The model is CoAtNet-0 at 224 pixels; images are random. Batch norm over ranks: each of 2 ranks, one
thread each, has half of what stands in the name, and exchanges 2 C + 1 numbers forward and 2 C
backward; "local" is the same norm of its own half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.ranks import measure_on_ranks
from benchmarks.ops.layers.bench_norm import keep_the_heap
from pyops.mesh import ALONE
from pyops.models import CoAtNet, CoAtNetConfig
from pyops.models.coatnet.batch_norm import GroupBatchNorm2d

__all__ = ["run"]

SHAPES = ((32, 96, 28), (32, 384, 14))  # images of both ranks, channels, side
IMAGES, SIDE = 4, 224


def folded(name: str) -> Case:
    torch.manual_seed(0)
    model = CoAtNet(CoAtNetConfig.named("0", image_size=SIDE))
    images = torch.randn(IMAGES, 3, SIDE, SIDE)
    with torch.no_grad():
        model(images)  # statistics that no norm begins with
    model.eval()
    copy = model.folded()

    def call(form: CoAtNet) -> Tensor:
        with torch.no_grad():
            result: Tensor = form(images)
        return result

    def check() -> float:
        expected = call(model)
        error = float((call(copy) - expected).abs().max() / expected.abs().max())
        if not error < 1e-4:
            raise AssertionError(f"folded logits are off by {error} of the largest")
        return error

    calls = {"pyops": lambda: call(copy), "unfolded": lambda: call(model)}
    return Case("coatnet", name, calls, check=check, targets={"unfolded": 1.3})


def step_of(norm: GroupBatchNorm2d, x: Tensor, dy: Tensor) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        y = norm(x)
        return [y.detach(), *torch.autograd.grad(y, [x, norm.weight, norm.bias], dy)]

    return call


def on_ranks(*, device: torch.device, options: Any) -> Iterator[Case]:
    """The cases of a rank."""
    keep_the_heap()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for images, channels, side in SHAPES:
        torch.manual_seed(0)
        shape = (images, side, side, channels)
        whole, dy = (torch.randn(shape).permute(0, 3, 1, 2) for _ in range(2))
        own = slice(rank * images // ranks, (rank + 1) * images // ranks)
        x = whole[own].requires_grad_()
        norms = [GroupBatchNorm2d(channels, group) for group in (dist.group.WORLD, ALONE)]
        shared, local = (step_of(norm, x, dy[own]) for norm in norms)
        exact = step_of(GroupBatchNorm2d(channels, ALONE), whole.clone().requires_grad_(), dy)

        def check(
            shared: Callable[[], list[Tensor]] = shared,
            exact: Callable[[], list[Tensor]] = exact,
            own: slice = own,
        ) -> float:
            errors = [
                float((a - e[own]).abs().max())
                for a, e in zip(shared()[:2], exact()[:2], strict=True)
            ]
            if not max(errors) < 1e-4:
                raise AssertionError(f"y and dx are off by {errors}")
            return max(errors)

        yield Case(
            "coatnet",
            f"batch norm over 2 ranks, {images} x {side} x {side} x {channels}",
            {"pyops": shared, "local": local},
            check=check,
            targets={"local": 1 / 1.15},
        )


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases of one process, and how to make each."""
    name = f"CoAtNet-0 at inference, {IMAGES} images of {SIDE} px, norms folded"
    yield name, partial(folded, name)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`; on the CPU alone."""
    keep_the_heap()
    wanted = [make for name, make in cases() if (options.only or "") in name]
    rows = run_cases(wanted, rounds=options.rounds)
    if (options.only or "batch norm") in "batch norm over 2 ranks":
        rows += measure_on_ranks(on_ranks, size=2, options=options)
    return rows
