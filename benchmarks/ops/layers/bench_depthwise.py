"""The depthwise 3 x 3 convolution of a CoAtNet, forward and backward, beside torch's own with its
channels last.

Images and channels of CoAtNet-0's blocks: the inner ones, four times a block's width, and narrower.
`bytes`: what has to be moved, x and y forward, and dy, x and dx backward. On the CPU the heap is
told to keep what is freed, as in bench_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.accuracy import compare, forward_backward, resembles
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.ops.layers.bench_norm import keep_the_heap
from pyops.ops.layers.depthwise import depthwise_conv2d

__all__ = ["cases", "run"]

# Images, side, channels, stride
SHAPES = ((8, 56, 96, 1), (8, 56, 384, 1), (8, 56, 384, 2), (8, 28, 768, 1), (8, 28, 768, 2))
TARGETS = {96: 1.5, 384: 1.5}


def case(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Case:
    images, side, channels, stride = shape

    def last(rows: int) -> Tensor:
        return (
            torch.randn(images, rows, rows, channels, device=device).to(dtype).permute(0, 3, 1, 2)
        )

    leaves = [last(side), torch.randn(channels, 1, 3, 3, device=device).to(dtype)]
    seeds = [last(-(-side // stride))]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return depthwise_conv2d(x, weight, stride=stride)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(x, weight, None, stride, 1, 1, channels)

    for leaf in leaves:
        leaf.requires_grad_()
    calls = {
        "pyops": forward_backward(ours, leaves, seeds),
        "torch": forward_backward(theirs, leaves, seeds),
    }
    return Case(
        "depthwise",
        name,
        calls,
        check=compare(calls["pyops"], theirs, leaves, seeds),
        device=device,
        bytes_moved=(3 * leaves[0].numel() + 2 * seeds[0].numel()) * dtype.itemsize,
        flops=3 * 2 * 9 * seeds[0].numel(),
        vet={"torch": resembles(calls["torch"], calls["pyops"])},
        targets={"torch": TARGETS[channels]} if channels in TARGETS else {},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            images, side, channels, stride = shape
            name = (
                f"depthwise 3 x 3 {str(dtype).removeprefix('torch.')}, {images} x {side} x {side} "
                f"x {channels}, stride {stride}"
            )
            yield name, partial(case, name, shape, dtype, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    if options.device.type == "cpu":
        keep_the_heap()
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
