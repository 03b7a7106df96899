"""One layer on one rank in float64, on one rank and on the ranks of a group in any dtype: what
every layer's test compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    AttentionConfig,
    ColumnConfig,
    ColumnParallelLinear,
    CrossEntropyConfig,
    EmbeddingConfig,
    LinearCrossEntropyConfig,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RelativeBias,
    RelativeBiasConfig,
    RowConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
    sync_partial_grads,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "CONFIGS",
    "Case",
    "configured",
    "errors_on_rank",
    "largest",
    "mean",
    "randomise",
    "tokens_of",
]

Shape = tuple[int, int]

CONFIGS: dict[Callable[..., Any], type] = {
    ColumnParallelLinear: ColumnConfig,
    ParallelAttention: AttentionConfig,
    ParallelMLP: MLPConfig,
    RelativeBias: RelativeBiasConfig,
    RowParallelLinear: RowConfig,
    VocabParallelEmbedding: EmbeddingConfig,
    linear_cross_entropy: LinearCrossEntropyConfig,
    vocab_parallel_cross_entropy: CrossEntropyConfig,
}


def configured(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """The layer, or the loss, called with options of which those that are fields of its config go
    there."""
    names = {field.name for field in fields(CONFIGS[function])}
    config = CONFIGS[function](**{name: options.pop(name) for name in names & options.keys()})
    return function(*args, config=config, **options)


@dataclass(frozen=True)
class Case:
    """make(group=, sequence_parallel=) -> layer; call(layer, x, shape) -> y.

    x_unit, y_unit: 0 where x or y is whole; otherwise its columns are cut over the ranks in units
    of that many.
    """

    make: Callable[..., nn.Module]
    width: int
    call: Callable[[nn.Module, Tensor, Shape], Tensor] = lambda layer, x, shape: layer(x)
    x_unit: int = 0
    y_unit: int = 0


def randomise(model: nn.Module) -> nn.Module:
    """Every parameter of a whole layer drawn, biases and norms too, so that none is left out of a
    comparison."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def tokens_of(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of [B, T, D]."""
    flat = x.flatten(0, 1)
    return Placement.cut(flat.shape, dim=0, rank=ranks.rank, ranks=ranks.size).take(flat)


def run(
    layer: nn.Module, case: Case, x: Tensor, dy: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = case.call(layer, x, shape)
    y.backward(dy.to(y.dtype).view(y.shape))
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)
    return y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}


def largest(a: Tensor, b: Tensor, whole: Tensor) -> float:
    """Largest difference, in units of the largest number of the whole reference, which is not
    zero."""
    assert a.shape == b.shape, (a.shape, b.shape)
    assert whole.abs().max() > 1e-3
    return float((a.double() - b).abs().max() / whole.abs().max()) if a.numel() else 0.0


def mean(a: Tensor, b: Tensor, whole: Tensor) -> float:
    """Root of the mean squared difference."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b).square().mean().sqrt())


def errors_on_rank(
    group: dist.ProcessGroup | None,
    case: Case,
    *,
    shape: Shape,
    dtype: torch.dtype,
    sequence_parallel: bool,
    distance: Callable[[Tensor, Tensor, Tensor], float] = largest,
    **options: Any,
) -> tuple[dict[str, float], dict[str, float]]:
    """({what: error}, {what: error of one rank in this dtype}), what: y, dx, every parameter's
    gradient; against float64."""
    ranks = Ranks.of(group)
    sp = sequence_parallel and ranks.size > 1
    dense = randomise(case.make(group=ALONE).double())
    dense.to(dtype).double()  # the numbers that a layer of this dtype holds exactly
    x = torch.randn(*shape, case.width, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        y_shape = case.call(copy.deepcopy(dense), x.double(), shape).shape
    dy = torch.randn(y_shape, dtype=torch.float64).to(dtype)
    y64, dx64, grads64 = run(dense, case, x.double(), dy.double(), shape)
    y1, dx1, grads1 = run(copy.deepcopy(dense).to(dtype), case, x, dy, shape)

    layer = case.make(group=group, sequence_parallel=sequence_parallel, **options).to(dtype)
    placements = Placement.of(layer)
    whole = dict(dense.named_parameters())
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(placements[name].take(whole[name]))

    def local(value: Tensor, unit: int) -> Tensor:
        """A rank's part of an activation [B, T, F]: its columns, all tokens; or whole rows; or its
        tokens."""
        if unit:
            value = Placement.cut(
                value.shape, dim=2, unit=unit, rank=ranks.rank, ranks=ranks.size
            ).take(value)
            return value.flatten(0, 1) if sp else value
        return tokens_of(value, ranks) if sp else value

    local_dy = local(dy, case.y_unit)
    if sp and case.y_unit:  # all tokens and the padding of the last ranks
        rows = ranks.rows_per_rank(len(local_dy)) * ranks.size
        local_dy = torch.cat(
            [local_dy, local_dy.new_zeros(rows - len(local_dy), local_dy.shape[1])]
        )
    y, dx, grads = run(layer, case, local(x, case.x_unit), local_dy, shape)
    sync_partial_grads(layer, group=group)
    mine = local(y64, case.y_unit)
    tokens = shape[0] * shape[1]
    real = (
        slice(0, max(0, tokens - ranks.start(tokens)))
        if sp and not case.y_unit
        else slice(0, len(mine))
    )
    found = {
        "y": distance(y[real], mine[real], y64),
        "dx": distance(dx, local(dx64, case.x_unit), dx64),
    }
    alone = {"y": distance(y1, y64, y64), "dx": distance(dx1, dx64, dx64)}
    for name, gradient in grads.items():
        place, reference = placements[name], grads64[name]
        found[name] = distance(gradient, place.take(reference), reference)
        alone[name] = distance(grads1[name], reference, reference)
        padding = place.length - (place.stop - place.start) if place.dim is not None else 0
        assert (
            place.dim is None
            or not gradient.narrow(place.dim, place.length - padding, padding).any()
        )
    return found, alone
