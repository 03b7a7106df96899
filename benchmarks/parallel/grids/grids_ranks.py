"""What a rank does in the bench of grids over a slow link: the four products of a layer, forward
and backward, by tensor parallelism in one dimension and on a grid, and the same without a message.

Runs within `slow_link.Link.run`; times with a barrier before each sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.links.slow_link_ranks import Sample
from pyops.mesh import ALONE
from pyops.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.grids import Grid, GridLinear, GridLinearConfig
from pyops.tensor_parallel.grids.costs import AS_PUBLISHED, FEWEST

__all__ = ["METHODS", "layer_passes"]

ONE, PUBLISHED, FEW = METHODS = ("1d", "2d", "2d, A B^T")
SIZES = ((1, 3), (1, 1), (1, 4), (4, 1))  # (in, out) in widths of the model
Layers = list[tuple[nn.Module, Tensor]]


def layer_passes(*, tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """{method: {"seconds", "sent", "received_bytes"}} of a layer's products forward and backward,
    the methods in turn; "compute": seconds of a rank's part of them, every round; "latency":
    seconds of an exchange of four bytes."""
    grid = Grid.of(dist.group.WORLD, mode="2d")
    layers = {
        ONE: _one_dimension(tokens, width),
        PUBLISHED: _on_grid(grid, tokens, width, AS_PUBLISHED),
        FEW: _on_grid(grid, tokens, width, FEWEST),
    }
    for each in layers.values():  # connections
        _passes(each)
    found: dict[str, Any] = {method: {"seconds": [], "sent": []} for method in layers}
    found["compute"] = []
    for turn in range(rounds):
        for method in layers if turn % 2 == 0 else reversed(layers):
            grid.traffic.clear()
            with Sample() as sample:
                _passes(layers[method])
            found[method]["seconds"].append(sample.seconds)
            found[method]["sent"].append(sample.sent)
            found[method]["received_bytes"] = grid.traffic.bytes_received
        dist.barrier()
        found["compute"].append(_computed(tokens, width))
    found["latency"] = _latency()
    return found


def _one_dimension(tokens: int, width: int) -> Layers:
    ranks, found = dist.get_world_size(), []
    for number, (inner, outer) in enumerate(SIZES):
        make: Callable[..., nn.Module] = RowParallelLinear if number % 2 else ColumnParallelLinear
        layer = make(inner * width, outer * width, bias=False, group=dist.group.WORLD)
        wide = inner * width // (ranks if number % 2 else 1)
        found.append((layer, _numbers(tokens, wide)))
    return found


def _on_grid(grid: Grid, tokens: int, width: int, forms: tuple[str, ...]) -> Layers:
    found: Layers = []
    for (inner, outer), form in zip(SIZES, forms, strict=True):
        config = GridLinearConfig(form=form)
        layer = GridLinear(inner * width, outer * width, grid=grid, bias=False, config=config)
        wide = grid.columns(layer.in_features).length
        found.append((layer, _numbers(grid.rows(tokens)[2], wide)))
    return found


def _numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).requires_grad_()


def _passes(layers: Layers) -> None:
    outputs = [layer(x) for layer, x in layers]
    for y in reversed(outputs):
        y.backward(torch.ones_like(y))
    for layer, x in layers:
        layer.zero_grad()
        x.grad = None


def _computed(tokens: int, width: int) -> float:
    """Seconds of a rank's part of the products, forward and backward."""
    ranks = dist.get_world_size()
    layers: list[tuple[nn.Module, Tensor]] = []
    for inner, outer in SIZES:
        layer = ColumnParallelLinear(inner * width, outer * width // ranks, bias=False, group=ALONE)
        layers.append((layer, _numbers(tokens, inner * width)))
    start = time.perf_counter()
    _passes(layers)
    return time.perf_counter() - start


def _latency() -> float:
    x = torch.zeros(1)
    dist.all_reduce(x)
    start = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(x)
    return (time.perf_counter() - start) / 20
